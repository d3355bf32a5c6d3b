"""etcd's JSON gateway: its gRPC calls as HTTP posts, with the standard library only."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rallypoint.errors import RendezvousError, RendezvousUnreachableError

_BEGIN_WATCH_S = 5.0
_ANSWER_S = 30.0
_MOST_BYTES = 64 << 20
"""Size of an answer: etcd itself takes requests of 1.5 MiB."""
_UNAUTHENTICATED = 16
"""gRPC's code for a token that is missing or has lapsed."""


class EtcdClient:
    """A client of one server; a copy in another process connects by itself. Safe for threads."""

    def __init__(self, url: str, user: str | None = None) -> None:
        """Remember where the server is; connects with the first call.

        Args:
            url: `http://host:port` or `https://host:port`; certificates are checked against the system's.
            user: `name:password`, if the server asks for one.
        """
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise RendezvousError(f"the address of etcd is a URL such as http://127.0.0.1:2379, got {url!r}")
        self.url, self._user, self._token = url, user, ""
        self._is_secure, self.host, self._port = parts.scheme == "https", parts.hostname, parts.port or 2379
        self._threads = threading.local()

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.url, self._user))

    def call(self, method: str, request: Mapping[str, object]) -> Any:
        """Make one call and return its answer, as parsed JSON; every call made here may be repeated.

        Raises:
            RendezvousUnreachableError: no answer, or a refusal.
        """
        if self._user and not self._token:
            self._authenticate()
        answer = self._post(method, request)
        if answer.get("code") == _UNAUTHENTICATED and self._user:
            self._authenticate()
            answer = self._post(method, request)
        if "error" in answer:
            raise RendezvousUnreachableError(f"etcd at {self.url} refuses {method}: {answer['error']}")
        return answer

    @contextlib.contextmanager
    def watching(self, ranges: Sequence[Mapping[str, object]]) -> Iterator[Callable[[float], None]]:
        """Watch ranges of keys, beginning before the block is entered; nothing that happens in it is missed.

        Yields a function that blocks until something happens, at most the given seconds. On a connection of its own.

        Raises:
            RendezvousUnreachableError: the server cannot be reached, or went away.
        """
        with contextlib.ExitStack() as stack:
            with self._named("watch"):
                try:
                    held, stream, happened = self._begin_watch(ranges, stack, _BEGIN_WATCH_S)
                except TimeoutError:  # once in thousands of times the server forgets to confirm it
                    held, stream, happened = self._begin_watch(ranges, stack, _ANSWER_S)

            def await_event(timeout_s: float) -> None:
                if happened:
                    return
                held.settimeout(timeout_s)
                with self._named("watch"), contextlib.suppress(TimeoutError):
                    _next_answer(stream)

            yield await_event

    def _begin_watch(
        self, ranges: Sequence[Mapping[str, object]], stack: contextlib.ExitStack, timeout_s: float
    ) -> tuple[socket.socket, http.client.HTTPResponse, bool]:
        """Return the socket and stream of a watch that has begun, and whether something has happened already."""
        connection = stack.enter_context(contextlib.closing(self._connection(timeout_s)))
        body = "".join(json.dumps({"create_request": one}) for one in ranges)
        connection.request("POST", "/v3/watch", body, self._headers())
        # Held here, because a response that ends with its connection takes the socket away from it.
        held, stream = connection.sock, stack.enter_context(contextlib.closing(connection.getresponse()))
        happened, num_begun = False, 0
        while num_begun < len(ranges):
            answer = _next_answer(stream)["result"]
            num_begun += answer.get("created", False)
            happened |= "events" in answer  # of a range whose watch began before another one's
        return held, stream, happened

    def _authenticate(self) -> None:
        name, _, password = (self._user or "").partition(":")
        answer = self._post("auth/authenticate", {"name": name, "password": password})
        if "token" not in answer:
            raise RendezvousUnreachableError(f"etcd at {self.url} refuses user {name!r}: {answer.get('error')}")
        self._token = answer["token"]

    def _post(self, method: str, request: Mapping[str, object]) -> Any:
        with self._named(method):
            try:
                return self._exchange(method, request)
            except (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError):
                return self._exchange(method, request)  # the server had closed a connection that lay idle

    def _exchange(self, method: str, request: Mapping[str, object]) -> Any:
        connection: http.client.HTTPConnection | None = getattr(self._threads, "connection", None)
        if connection is None:
            connection = self._threads.connection = self._connection(_ANSWER_S)
        try:
            connection.request("POST", f"/v3/{method}", json.dumps(request), self._headers())
            text = _whole(connection.getresponse())
        except (OSError, http.client.HTTPException, ValueError):
            connection.close()
            raise
        return json.loads(text)

    def _connection(self, timeout_s: float) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._is_secure else http.client.HTTPConnection
        return kind(self.host, self._port, timeout=timeout_s)

    def _headers(self) -> dict[str, str]:
        return {"Content-Type": "application/json"} | ({"Authorization": self._token} if self._token else {})

    @contextlib.contextmanager
    def _named(self, method: str) -> Iterator[None]:
        try:
            yield
        except (OSError, http.client.HTTPException, LookupError, ValueError) as error:
            text = f"no etcd answers {method} at {self.url}: {error or type(error).__name__}"
            raise RendezvousUnreachableError(text) from None


def _whole(answer: http.client.HTTPResponse) -> bytes:
    """Return an answer that is etcd's: not a redirect, whose text says nothing of it, and not without end."""
    if 300 <= answer.status < 400:
        raise ValueError(f"it redirects to {answer.getheader('Location')}, which is not followed; name that URL")
    text = answer.read(_MOST_BYTES + 1)
    if len(text) > _MOST_BYTES:
        raise ValueError(f"an answer of more than {_MOST_BYTES >> 20} MiB")
    return text


def _next_answer(stream: http.client.HTTPResponse) -> Any:
    while not (line := stream.readline(_MOST_BYTES)).strip():
        if not line:
            raise http.client.IncompleteRead(line)
    return json.loads(line)
