"""How long clients may take, how many of them there may be, and what is logged about them.

Owns: a deadline for every stage of a connection, the limit on their number, and how often complaints are logged. Must
not know: what is answered, who accepts.

uvicorn reads and writes HTTP, and closes idle connections. But it waits for ever for the rest of a head, for the rest
of a body after the answer, and for a client to read; and it limits only requests whose head is complete, not
connections.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import enum
import heapq
import http
import json
import logging
import time
from collections.abc import Callable

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from rallypoint.errors import EndpointError
from rallypoint.serving.responses import error_body

_SHORTEST_S, _LONGEST_S = 1.0, 60.0
_MOST_KINDS = 8


class Complaints(logging.Handler):
    """Writes the first complaint at once, and sums up what comes within the next second.

    While complaints keep coming the pauses between lines double up to a minute, so that an attack of a day is about
    1,500 lines. Used by one thread.

    >>> now, lines = [0.0], []
    >>> complaints = Complaints(lines.append, clock=lambda: now[0])
    >>> for _ in range(500): complaints("no HTTP")
    >>> now[0] = 1.0; complaints("too slow"); lines
    ['no HTTP', 'no HTTP (499 times in 1 s); too slow']
    """

    def __init__(self, say: Callable[[str], None], *, clock: Callable[[], float] = time.monotonic) -> None:
        """Write lines by `say`; what it raises, as for a full disk, is ignored."""
        super().__init__(logging.WARNING)
        self._say, self._clock = say, clock
        self._counts: collections.Counter[str] = collections.Counter()
        self._num_more = 0
        self._said_at, self._pause_s = -_LONGEST_S, _SHORTEST_S
        self.logger = logging.Logger("rallypoint.serving", logging.WARNING)
        """Takes complaints from libraries; known to nobody else, so that no other handler hears them too."""
        self.logger.addHandler(self)

    def __call__(self, what: str) -> None:
        """Complain."""
        if what in self._counts or len(self._counts) < _MOST_KINDS:
            self._counts[what] += 1
        else:
            self._num_more += 1
        self.write_due()

    def emit(self, record: logging.LogRecord) -> None:
        """Complain with what a library logs."""
        self(self.format(record))

    def write_due(self) -> None:
        """Write what has been complained about, if it is time; to be called now and then."""
        waited = self._clock() - self._said_at
        if waited < self._pause_s:
            return
        if not self._counts:
            self._pause_s = _SHORTEST_S
            return
        over = f" in {waited:.0f} s" if waited < 2 * _LONGEST_S else ""
        parts = [what if num == 1 else f"{what} ({num:,} times{over})" for what, num in self._counts.items()]
        if self._num_more:
            parts.append(f"and {self._num_more:,} of other kinds")
        with contextlib.suppress(Exception):
            self._say("; ".join(parts))
        self._pause_s = min(2 * self._pause_s, _LONGEST_S) if waited < 2 * self._pause_s else _SHORTEST_S
        self._said_at = self._clock()
        self._counts.clear()
        self._num_more = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """Seconds that a client may take at each stage before its connection is closed."""

    head_s: float = 20.0
    """Time for a request's head to arrive, from the start of the connection; on a kept one, from the first byte."""
    idle_s: float = 60.0
    """Time for the next request to begin."""
    unread_s: float = 60.0
    """Time for a client to read something, if the buffers are full."""
    rest_s: float = 5.0
    """Time for the rest of a refused body, or of an answer after which the connection is closed."""


class Stage(enum.Enum):
    """What a connection waits for."""

    HEAD = "the rest of a request's head"
    IDLE = "the next request"
    BODY = "the rest of a request's body"
    ANSWER = "us"
    UNREAD = "the client to read"
    REST = "the client to stop sending a body that was refused"
    CLOSING = "the client to read what came before the end"


class OpenConnections:
    """The open connections, at most `capacity`.

    When another one comes, those that have waited longest for their clients are closed, a sixteenth at a time: a client
    with something to ask sends it at once. Connections that are being answered stay; if all are, the new one is
    refused.
    """

    def __init__(
        self, capacity: int, deadlines: Deadlines, complain: Complaints, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Begin without connections."""
        self.capacity, self.deadlines, self.complain, self.clock = capacity, deadlines, complain, clock
        self.open: set[HttpConnection] = set()
        """Connections that have begun and not ended."""

    def has_place(self) -> bool:
        """Return whether another connection may come, after closing some that wait if there is no room."""
        if len(self.open) < self.capacity:
            return True
        waiting = [connection for connection in self.open if connection.stage is not Stage.ANSWER]
        if not waiting:
            self.complain(f"all {self.capacity} connections are being answered; another one was refused with 503")
            return False
        for connection in heapq.nsmallest(max(1, self.capacity // 16), waiting, key=lambda one: one.since):
            self.complain(f"{self.capacity} connections, as many as may be: one that waited for its client was closed")
            connection.abort()
        return True

    def close_overdue(self) -> None:
        """Close the connections that are past their deadline; call it now and then."""
        now = self.clock()
        for connection in list(self.open):
            connection.look()
            if now >= connection.deadline:
                connection.give_up()
        self.complain.write_due()


class HttpConnection(H11Protocol):
    """uvicorn's side of a connection, with deadlines."""

    def __init__(self, config: uvicorn.Config, state: ServerState, room: OpenConnections) -> None:
        super().__init__(config, state, {})
        self.logger = room.complain.logger
        self._room = room
        self._at: tuple[Stage, object] = (Stage.HEAD, None)
        self._has_begun = False
        """Whether part of the next request's head has arrived."""
        self.since = room.clock()
        """Time at which it entered its stage."""
        self.deadline = self.since + room.deadlines.head_s
        """Time at which it is closed, unless it enters another stage."""

    @property
    def stage(self) -> Stage:
        """What it waits for."""
        return self._at[0]

    def look(self) -> None:
        """Start the deadline of a new stage."""
        # Stages of different requests are different stages: each request has a cycle of its own.
        at = (self._find_stage(), self.cycle)
        if at == self._at:
            return
        limits = self._room.deadlines
        seconds = {
            Stage.HEAD: limits.head_s,
            Stage.IDLE: limits.idle_s,
            Stage.BODY: float("inf"),  # the application counts, and says so to the client
            Stage.ANSWER: float("inf"),
            Stage.UNREAD: limits.unread_s,
            Stage.REST: limits.rest_s,
            Stage.CLOSING: limits.rest_s,
        }
        self._at, self.since = at, self._room.clock()
        self.deadline = self.since + seconds[at[0]]

    def give_up(self) -> None:
        """Close it: its client is past the deadline."""
        if self.stage is Stage.HEAD and self._has_begun:
            seconds = self._room.deadlines.head_s
            self._room.complain(f"the head of a request did not arrive within {seconds:g} s; its connection is closed")
            self.transport.write(refusal(408, f"the head of the request did not arrive within {seconds:g} s"))
        if self.stage in (Stage.UNREAD, Stage.CLOSING):
            self.abort()
        else:
            self.transport.close()
            self.look()

    def abort(self) -> None:
        """Close it now, whatever is under way."""
        self.transport.abort()
        self._room.open.discard(self)

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride] - as uvicorn's
        """Begin."""
        super().connection_made(transport)
        self._room.open.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        self._room.open.discard(self)

    def data_received(self, data: bytes) -> None:
        """Pass on what the client sends."""
        super().data_received(data)
        self._has_begun = self.conn.their_state is h11.IDLE
        self.look()

    def pause_writing(self) -> None:
        """Begin to wait for the client to read."""
        super().pause_writing()
        self.look()

    def resume_writing(self) -> None:
        """Go on writing."""
        super().resume_writing()
        self.look()

    def on_response_complete(self) -> None:
        """Go on to the next request, of which a part may have come already."""
        super().on_response_complete()
        self._has_begun = self.conn.their_state is h11.IDLE and bool(self.conn.trailing_data[0])
        self.look()

    def send_400_response(self, msg: str) -> None:
        """Say that what came is not HTTP, unless an answer is being written, and close."""
        self._room.complain("what is not HTTP came over a connection, which is closed")
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.write(refusal(400, msg))
        self.transport.close()

    def _find_stage(self) -> Stage:
        if self.transport.is_closing():
            return Stage.CLOSING
        if self.flow.write_paused:
            return Stage.UNREAD
        if self.conn.their_state is h11.IDLE:
            return Stage.IDLE if self.cycle and not self._has_begun else Stage.HEAD
        if self.cycle.response_complete:
            return Stage.REST
        return Stage.BODY if self.conn.their_state is h11.SEND_BODY else Stage.ANSWER


def refusal(status: int, message: str) -> bytes:
    """Return a whole response without a request; the connection must be closed after it."""
    body = json.dumps(error_body(EndpointError(status, message))).encode()
    head = (
        f"HTTP/1.1 {status} {http.HTTPStatus(status).phrase}",
        "content-type: application/json",
        f"content-length: {len(body)}",
        "retry-after: 1",
        "connection: close",
    )
    return "\r\n".join((*head, "", "")).encode() + body
