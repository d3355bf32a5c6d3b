"""An ASGI application on a socket, served by a thread of its own.

Owns: listening, accepting, and the end. Must not know: what is served.

Connections are not accepted by uvicorn: when descriptors run out, its asyncio server tries 2,048 times at once, logs
each time, and does the same again for each of them a second later.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import math
import os
import resource
import socket
import threading
import traceback
from collections.abc import Callable
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from rallypoint.errors import ServingError
from rallypoint.serving.connections import Complaints, Deadlines, HttpConnection, OpenConnections, refusal

LOOPBACK = ("localhost", "127.0.0.1", "::1")
"""Names under which a machine reaches itself."""
_LAST_WORDS_S = 5.0
"""Time for errors to reach clients, once their requests were cancelled."""
_BACKLOG = 2048
_FEWEST, _MOST = 8, 1000
"""Connections at once."""
_PAUSE_S = 1.0
"""Before accepting is tried again, where the system had nothing left for it."""
_LOOK_EVERY_S = 0.25
"""Between two looks at all deadlines."""


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


def check_keys(host: str, keys: tuple[str, ...]) -> None:
    """Check that keys are there if other machines can reach a host, and that each can stand in a header.

    Raises:
        ServingError: one is missing, or unusable.
    """
    if not keys and not is_loopback(host):
        raise ServingError(
            f"other machines can reach {host}, so a key is needed: set RALLYPOINT_API_KEY, or give --api-key"
        )
    if any(not key.isascii() or not key.isprintable() or key != key.strip() or not key for key in keys):
        raise ServingError("a key must be of printable ASCII characters, so that it can stand in an HTTP header")


class Server:
    """Serves until it is stopped."""

    def __init__(
        self,
        app: ASGIApp,
        bound: socket.socket,
        *,
        grace_s: float,
        on_end: Callable[[], None],
        say: Callable[[str], None],
        deadlines: Deadlines = Deadlines(),  # noqa: B008 - frozen
    ) -> None:
        """Prepare.

        Args:
            app: what answers.
            bound: the socket, see `bind`.
            grace_s: how long requests under way may take to end when the server is stopped.
            on_end: called when the server has ended, for whatever reason, in its thread.
            say: called with one line about clients that misbehave, in its thread.
            deadlines: of connections.
        """
        self._grace_s, self._socket, self._on_end = grace_s, bound, on_end
        self._room = OpenConnections(_capacity(), deadlines, Complaints(say))
        self._config = uvicorn.Config(
            app,
            http=HttpConnection,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=math.ceil(self._room.deadlines.idle_s),
            timeout_graceful_shutdown=int(grace_s + _LAST_WORDS_S) + 1,
        )
        self._server = uvicorn.Server(self._config)
        self._has_started, self._is_over = threading.Event(), asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._failure: OSError | None = None
        # Its end is waited for in `stop`; nothing that it does may keep a process from ending.
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)

    @property
    def max_connections(self) -> int:
        """Most connections that may be open at once."""
        return self._room.capacity

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
        """Accept no more, give running requests some time, then cancel them and end the thread.

        Args:
            give_up: ends every request that is still running, with an error.
        """
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # it has ended by itself
                self._loop.call_soon_threadsafe(self._is_over.set)
        self._thread.join(self._grace_s)
        give_up()
        self._thread.join(2 * _LAST_WORDS_S + 1)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except OSError as error:
            self._failure = error
        finally:
            self._socket.close()
            self._has_started.set()
            self._on_end()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(self._hear)
        self._socket.setblocking(False)
        self._socket.listen(_BACKLOG)
        answering = asyncio.create_task(self._server.serve(sockets=[]))  # connections come from `_accept`
        watching, others = asyncio.create_task(self._watch()), [self._accept(), self._is_over.wait()]
        waiting = [asyncio.create_task(other) for other in others]
        await asyncio.wait([answering, watching, *waiting], return_when=asyncio.FIRST_COMPLETED)
        for task in waiting:
            task.cancel()
        outcomes = await asyncio.gather(*waiting, return_exceptions=True)
        self._socket.close()
        self._server.should_exit = True
        await answering
        watching.cancel()
        outcomes += await asyncio.gather(watching, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome

    async def _accept(self) -> None:
        """Accept connections, one per turn of the loop, so that connected clients are served in between."""
        loop = asyncio.get_running_loop()
        while not self._server.started:
            await asyncio.sleep(0.01)
        self._has_started.set()
        while True:
            try:
                client, _ = await loop.sock_accept(self._socket)
            except ConnectionAbortedError:
                continue
            except OSError as error:
                # Usually out of descriptors: other parts of the process may have taken them all.
                self._room.complain(f"no connection can be accepted, tried again in {_PAUSE_S:g} s: {error.strerror}")
                await asyncio.sleep(_PAUSE_S)
                continue
            if not self._room.has_place():
                _refuse(client, self._room.capacity)
            else:
                try:
                    await loop.connect_accepted_socket(self._connection, client)
                except OSError as error:
                    client.close()
                    self._room.complain(f"a connection could not be taken over: {error.strerror}")
            await asyncio.sleep(0)

    def _connection(self) -> HttpConnection:
        return HttpConnection(self._config, self._server.server_state, self._room)

    async def _watch(self) -> None:
        while True:
            self._room.close_overdue()
            await asyncio.sleep(_LOOK_EVERY_S)

    def _hear(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Take from asyncio what nobody else has caught."""
        del loop
        error = context.get("exception")
        where = "".join(traceback.format_exception(error)) if error else ""
        self._room.complain(f"{where}{context['message']}")


def _capacity() -> int:
    """Return how many connections there may be: half of the free descriptors, because the process needs some."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_open = len(os.listdir("/dev/fd"))
    free = _MOST if limit == resource.RLIM_INFINITY else (limit - num_open) // 2
    return min(max(free, _FEWEST), _MOST)


def _refuse(client: socket.socket, capacity: int) -> None:
    """Refuse a connection with a response, which its client may or may not read, and close it."""
    with client, contextlib.suppress(OSError):
        client.setblocking(False)
        client.send(refusal(503, f"all {capacity} connections are being answered; try again"))
        client.shutdown(socket.SHUT_WR)
        client.recv(65536)  # closed with something unread, the answer would be lost
