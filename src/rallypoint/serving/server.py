"""An ASGI application on a socket, served by a thread of its own.

Owns: listening, and the end. Must not know: what is served.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import threading
from collections.abc import Callable

import uvicorn
from starlette.types import ASGIApp

from rallypoint.errors import ServingError

_KEEP_ALIVE_S = 60
_LAST_WORDS_S = 5.0
"""Time for errors to reach clients, once what they wait for was given up."""


def bind(host: str, port: int) -> socket.socket:
    """Take a port, without listening yet; 0 is any that is free.

    Raises:
        ServingError: it is taken, or the host is not one of this machine.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
            # Others could still bind the port until somebody listens; clients would wait if we did so already.
        except OSError:
            bound.close()
            raise
    except OSError as error:
        raise ServingError(
            f"cannot serve at {host}:{port}: {error.strerror}; choose another --port, or end what has it"
        ) from None
    return bound


def is_loopback(host: str) -> bool:
    """Say whether a name or address can be reached from this machine only.

    >>> [is_loopback(host) for host in ("localhost", "127.0.0.1", "::1", "0.0.0.0", "10.0.0.7")]
    [True, True, True, False, False]
    """
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Server:
    """Serves until it is stopped."""

    def __init__(self, app: ASGIApp, bound: socket.socket, *, grace_s: float, on_end: Callable[[], None]) -> None:
        """Prepare.

        Args:
            app: what answers.
            bound: the socket, see `bind`.
            grace_s: how long requests under way may take to end when the server is stopped.
            on_end: called when the server has ended, for whatever reason, in its thread.
        """
        self._grace_s, self._socket, self._on_end = grace_s, bound, on_end
        self._server = uvicorn.Server(
            uvicorn.Config(
                app,
                http="h11",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=int(grace_s + _LAST_WORDS_S) + 1,
            )
        )
        self._has_started = threading.Event()
        self._failure: OSError | None = None
        self._thread = threading.Thread(target=self._run, name="http")

    def start(self) -> None:
        """Listen; returns when calls are accepted.

        Raises:
            ServingError: somebody else has taken the port meanwhile.
        """
        self._thread.start()
        self._has_started.wait()
        if self._failure is not None:
            raise ServingError(f"cannot listen: {self._failure.strerror}; choose another --port") from self._failure

    def stop(self, give_up: Callable[[], None]) -> None:
        """Accept no more, let what is under way end for some time, then have it given up, and end the thread.

        Args:
            give_up: makes every request that is still under way end, with an error.
        """
        self._server.should_exit = True
        self._thread.join(self._grace_s)
        give_up()
        self._thread.join()

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except OSError as error:
            self._failure = error
        finally:
            self._has_started.set()
            self._on_end()

    async def _serve(self) -> None:
        serving = asyncio.ensure_future(self._server.serve([self._socket]))
        while not self._server.started and not serving.done():
            await asyncio.sleep(0.01)
        self._has_started.set()
        await serving
