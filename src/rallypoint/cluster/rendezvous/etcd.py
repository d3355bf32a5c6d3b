"""Rooms in an etcd server, for clusters that have one: it outlives drivers and nodes.

Under `/rallypoint/SCOPE/NAME/` lie the room, replaced by a transaction that compares its revision; `news`, which those
who wait watch; and a key per member that etcd itself removes when the member's lease is not renewed. All of it hangs on
a lease of the driver: after its death nothing stays.

etcd is asked at its JSON gateway: its gRPC calls as HTTP posts, with the standard library only.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import http.client
import json
import logging
import math
import socket
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rallypoint.cluster.rendezvous.protocol import Change
from rallypoint.cluster.rendezvous.room import Room
from rallypoint.errors import RendezvousError, RendezvousUnreachableError

_LOG = logging.getLogger(__name__)
_SHORTEST_LEASE_S = 2
"""etcd's default: one and a half times what its servers need to elect another leader."""
_SCOPE_LEASE_S = 60
"""Seconds that stored data outlives a driver that was killed."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Found:
    """What one read of a room's keys returned."""

    stored: Room
    room_revision: int
    """When the room was last written; 0: never."""
    holders: frozenset[str]
    """Incarnations whose lease has not lapsed."""

    @property
    def room(self) -> Room:
        """The room without those whose lease has lapsed."""
        room = self.stored
        for member in room.present:
            if member.incarnation not in self.holders:
                room = room.depart(member.incarnation, "died or froze", time.time())
        return room


class EtcdRooms:
    """See `Rooms`: a client of the server. Copies in other processes connect when they first use it."""

    def __init__(self, client: EtcdClient, scope: str, lease_s: float, scope_lease: str) -> None:
        """See `open`, which makes them; `scope_lease` is the id of the driver's lease."""
        self._client, self._scope, self._scope_lease = client, scope, scope_lease
        self.lease_s = float(max(_SHORTEST_LEASE_S, math.ceil(lease_s)))  # etcd counts in whole seconds
        self.towards = client.host
        self._leases: dict[str, str] = {}
        self._closing: threading.Event | None = None

    @classmethod
    def open(cls, url: str, scope: str, lease_s: float, user: str | None = None) -> EtcdRooms:
        """Connect to the server, as `user` (`name:password`) if it asks who one is.

        Raises:
            RendezvousUnreachableError: there is no etcd at that address, or it refuses the user.
        """
        client = EtcdClient(url, user)
        granted = client.call("lease/grant", {"TTL": _SCOPE_LEASE_S})
        rooms = cls(client, scope, lease_s, granted["ID"])
        client.call("kv/put", {"key": rooms._is_open["key"], "lease": granted["ID"]})
        rooms._closing = threading.Event()
        threading.Thread(target=rooms._keep, args=(rooms._closing,), name="leases", daemon=True).start()
        return rooms

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self._client, self._scope, self.lease_s, self._scope_lease))

    def transact(self, name: str, change: Change, wait_s: float = 0.0) -> Room | RendezvousError:
        """See `Rooms.transact`; never waits."""
        del wait_s
        while True:
            found = self._find(name)
            after = change(found.room)
            if isinstance(after, RendezvousError) or after is found.stored:
                return after
            room_key = _encode(self._key(name, "room"))
            puts = [{"key": room_key, "value": _encode(after.encode()), "lease": self._scope_lease}]
            if after.news != found.stored.news:
                puts.append({"key": _encode(self._key(name, "news")), "lease": self._scope_lease})
            unchanged = {"key": room_key, "target": "MOD", "mod_revision": found.room_revision}
            request = {"compare": [unchanged], "success": [{"request_put": put} for put in puts]}
            if self._client.call("kv/txn", request).get("succeeded"):
                return after

    def wait(self, name: str, news: int, timeout_s: float) -> Room:
        """See `Rooms.wait`."""
        changed = {"key": _encode(self._key(name, "news"))}
        lapsed = {**_within(self._key(name, "lease/")), "filters": ["NOPUT"]}
        # Watched from now on and read after that: nothing falls in between. (A watch that starts at an earlier revision
        # would do too, but etcd looks after such ones only ten times a second.)
        with self._client.watching([changed, lapsed]) as await_event:
            if self._find(name).room.news == news:
                await_event(timeout_s)
        room = self.transact(name, lambda room: room)
        assert isinstance(room, Room), "looking at a room changes nothing, and is never refused"
        return room

    def renew(self, name: str, incarnation: str) -> None:
        """See `Rooms.renew`."""
        if lease := self._leases.get(incarnation):
            self._client.call("lease/keepalive", {"ID": lease})
            return
        lease = self._leases[incarnation] = self._client.call("lease/grant", {"TTL": int(self.lease_s)})["ID"]
        key = _encode(self._key(name, f"lease/{incarnation}"))
        self._client.call("kv/put", {"key": key, "lease": lease})

    def release(self, incarnation: str) -> None:
        """See `Rooms.release`."""
        if lease := self._leases.pop(incarnation, None):
            self._client.call("lease/revoke", {"ID": lease})

    def close(self) -> None:
        """See `Rooms.close`; it takes the keys of this scope away, and leaves the server to its owner."""
        if self._closing is None or self._closing.is_set():
            return
        self._closing.set()
        with contextlib.suppress(RendezvousUnreachableError):  # then the leases' end does the same, a minute later
            self._client.call("kv/deleterange", _within(f"/rallypoint/{self._scope}/"))
            self._client.call("lease/revoke", {"ID": self._scope_lease})

    def _find(self, name: str) -> _Found:
        prefix = self._key(name, "")
        request = {"compare": [self._is_open], "success": [{"request_range": _within(prefix)}]}
        answer = self._client.call("kv/txn", request)
        if not answer.get("succeeded"):
            text = f"etcd at {self._client.url} has no scope {self._scope!r} any more: its owner closed it or died"
            raise RendezvousUnreachableError(text)
        found = answer["responses"][0]["response_range"].get("kvs", [])
        entries = {base64.b64decode(entry["key"]).decode(): entry for entry in found}
        entry = entries.get(prefix + "room", {})
        room = Room.decode(name, base64.b64decode(entry.get("value", "")))
        leases = prefix + "lease/"
        holders = frozenset(key.removeprefix(leases) for key in entries if key.startswith(leases))
        return _Found(room, int(entry.get("mod_revision", 0)), holders)

    @property
    def _is_open(self) -> dict[str, object]:
        """The condition that the driver has not closed, and lives."""
        key = _encode(f"/rallypoint/{self._scope}/open")
        return {"key": key, "target": "VERSION", "result": "GREATER", "version": 0}

    def _key(self, name: str, leaf: str) -> str:
        return f"/rallypoint/{self._scope}/{urllib.parse.quote(name, safe='')}/{leaf}"

    def _keep(self, closing: threading.Event) -> None:
        """Renew the driver's lease until closed."""
        while not closing.wait(_SCOPE_LEASE_S / 4):
            try:
                self._client.call("lease/keepalive", {"ID": self._scope_lease})
            except RendezvousUnreachableError as error:
                _LOG.warning("the lease of scope %r cannot be renewed: %s", self._scope, error)


def _encode(raw: str | bytes) -> str:
    return base64.b64encode(raw.encode() if isinstance(raw, str) else raw).decode()


def _within(prefix: str) -> dict[str, object]:
    """The range of all keys that begin with a prefix, which ends in a slash; "0" is the character after it."""
    return {"key": _encode(prefix), "range_end": _encode(prefix[:-1] + "0")}


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
