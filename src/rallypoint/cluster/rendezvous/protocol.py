"""The API of a rendezvous: join it, and hold a membership.

Owns what a participant does: take a seat, wait, confirm, renew its lease, notice that others are gone. The
rules are those of `Room`. A backend (`Rooms`) stores rooms, wakes waiting ranks, and removes members that no longer
renew. Knows no backend and no tensors.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import platform
import threading
import time
import uuid
import weakref
from collections.abc import Callable
from functools import partial
from typing import Protocol, Self, TypeAlias

from rallypoint.cluster.rendezvous.address import own_address
from rallypoint.cluster.rendezvous.leases import LOOKS_PER_LEASE, start_thread
from rallypoint.cluster.rendezvous.room import Member, Room
from rallypoint.cluster.waiting import Wait
from rallypoint.errors import (
    MembershipLostError,
    RankTakenError,
    RendezvousError,
    RendezvousTimeoutError,
    RendezvousUnreachableError,
)

_LOG = logging.getLogger(__name__)
_VOICE_EVERY_S = 30.0
_SOON_S = 5.0
"""Seconds that a transaction may wait for the next change."""
_GIVEN_UP_S = 1.0
"""Seconds between two looks at whether a wait was given up."""
_PATIENCE_LEASES = 2.0
"""Number of leases that a newcomer waits for the holder of its seat to prove dead."""

Change: TypeAlias = Callable[[Room], Room | RendezvousError]
"""A transition of a room; may be called again when another one came first, and may travel to another process."""


class Rooms(Protocol):
    """A place that keeps rooms. Every method may be called from any thread, and blocks.

    All of them raise `RendezvousUnreachableError` when the place does not answer.
    """

    lease_s: float
    """Seconds after which a member that does not renew counts as dead; it may take up to half as long again."""

    @property
    def towards(self) -> str | None:
        """Host on the network of the other participants; None if all of them are on this machine."""
        ...

    def transact(self, name: str, change: Change, wait_s: float = 0.0) -> Room | RendezvousError:
        """Replace a room by what `change` makes of it, atomically; return that. Errors replace nothing.

        If the change does not concern waiters, it may wait that long for the next one, which saves a round trip.
        """
        ...

    def wait(self, name: str, news: int, timeout_s: float) -> Room:
        """Return the room as soon as its `news` has changed, or unchanged at the timeout."""
        ...

    def renew(self, name: str, incarnation: str) -> None:
        """Begin or renew a lease; begins before the seat is taken. A lapsed lease is not revived."""
        ...

    def release(self, incarnation: str) -> None:
        """Forget the lease of one that has departed."""
        ...

    def close(self) -> None:
        """Where it was opened: end it and leave nothing behind. Elsewhere: nothing."""
        ...


def _look(room: Room) -> Room:
    return room


class Rendezvous:
    """How ranks that start at different times, on different machines, find each other.

    The object may be pickled and handed to other processes, which connect when they first use it.
    """

    def __init__(self, rooms: Rooms) -> None:
        self.rooms = rooms

    def join(
        self,
        name: str,
        *,
        rank: int,
        world_size: int,
        payload: bytes = b"",
        timeout_s: float,
        generation: int | None = None,
        given_up: threading.Event | None = None,
    ) -> Membership:
        """Wait until all ranks have joined, and return every rank's payload.

        Args:
            name: of the meeting; the same for all ranks that are to meet.
            rank: from 0.
            world_size: number of ranks.
            payload: any bytes for the others: an address, the id of a communicator.
            timeout_s: how long to wait, in all.
            generation: which attempt this is, counted from 1; a higher number than the last one fences off whoever is
                left over from that. None takes part in the present attempt; when that one was complete and has lost
                this rank, begins the next.
            given_up: set by another thread to end the wait soon.

        Raises:
            RendezvousTimeoutError: some ranks did not come.
            RankTakenError: another process is this rank; known for sure after two leases.
            WorldSizeError: the others expect another number of ranks.
            StaleGenerationError: a newer generation has begun.
            MembershipLostError: this process was stopped for longer than its lease.
            RendezvousUnreachableError: the place that keeps the rendezvous does not answer.
        """
        if not 0 <= rank < world_size:
            raise ValueError(
                f"rank {rank} of rendezvous {name!r}: expected at least 0 and less than world_size={world_size}"
            )
        if generation is not None and generation < 1:
            raise ValueError(f"generations of rendezvous {name!r} are counted from 1, got {generation}")
        member = Member(rank, payload, platform.node(), os.getpid(), uuid.uuid4().hex, time.time())
        wait = Wait(
            f"rendezvous {name!r}", timeout_s, lambda line: _LOG.warning("%s: %s", member, line), every_s=_VOICE_EVERY_S
        )
        with contextlib.ExitStack() as unless_joined:
            renewal = _Renewal(self.rooms, name, member.incarnation)
            unless_joined.callback(_depart, self.rooms, name, member.incarnation)
            unless_joined.callback(renewal.close)
            room = self._seat(member, Room(name), world_size, generation, wait)
            room = self._gather(member, room, wait, given_up)
            unless_joined.pop_all()
        return Membership(name, room.generation, rank, room.seats, self.rooms, renewal)

    def own_address(self) -> str:
        """Return the address of this machine that the other participants reach; loopback if all are on it."""
        return own_address(self.rooms.towards)

    def close(self) -> None:
        """End the rendezvous where it was opened, leaving nothing behind; ranks that still wait get an error."""
        self.rooms.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _seat(self, member: Member, room: Room, world_size: int, generation: int | None, wait: Wait) -> Room:
        """Take the seat; if it is taken, first find out whether its holder is alive."""
        patience_s = min(wait.limit_s, _PATIENCE_LEASES * self.rooms.lease_s)
        change = partial(Room.join, member=member, world_size=world_size, generation=generation)
        while True:
            soon_s = min(_SOON_S, wait.limit_s - wait.look())
            outcome = self.rooms.transact(room.name, change, soon_s)
            if isinstance(outcome, Room):
                return outcome
            left_s = patience_s - wait.look()
            if not isinstance(outcome, RankTakenError) or left_s <= 0:
                raise outcome
            room = self.rooms.wait(room.name, room.news, left_s)

    def _gather(self, member: Member, room: Room, wait: Wait, given_up: threading.Event | None) -> Room:
        """Wait until the generation in which the member has a seat is complete."""
        while True:
            if member not in room.seats:
                raise room.lost(member.incarnation)
            if room.complete:
                return room
            if room.assembled and member.incarnation not in room.confirmed:
                soon_s = min(_SOON_S, wait.limit_s - wait.look())
                room = self._settled(room.name, partial(Room.confirm, incarnation=member.incarnation), soon_s)
                continue
            if wait.is_over:
                room = self._give_up(member, room, wait)
                continue
            pause_s = wait.pause_s if given_up is None else min(wait.pause_s, _GIVEN_UP_S)
            room = self.rooms.wait(room.name, room.news, pause_s)
            wait.look()
            if given_up is not None and given_up.is_set():
                wait.limit_s = wait.waited_s
            if not wait.is_over:
                wait.say_if_due(_missing(room))

    def _give_up(self, member: Member, room: Room, wait: Wait) -> Room:
        """Leave the seat and raise, unless the generation was completed at the last moment."""
        after = self._settled(room.name, partial(Room.give_up, incarnation=member.incarnation, at=time.time()))
        if after.complete or after.generation != room.generation:
            return after
        gave_up = f"{member} gave up after timeout_s={wait.limit_s:g}: {wait.line(_missing(room))}"
        raise RendezvousTimeoutError(gave_up, room.missing)

    def _settled(self, name: str, change: Change, wait_s: float = 0.0) -> Room:
        outcome = self.rooms.transact(name, change, wait_s)
        if isinstance(outcome, RendezvousError):
            raise outcome
        return outcome


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Membership:
    """A seat in a complete generation; the others see it as alive until it is closed or its process dies."""

    name: str
    generation: int
    rank: int
    members: tuple[Member, ...]
    """All of them, by rank; the same for everybody."""
    _rooms: Rooms = dataclasses.field(repr=False)
    _renewal: _Renewal = dataclasses.field(repr=False)

    @property
    def world_size(self) -> int:
        """Number of members."""
        return len(self.members)

    @property
    def lease_s(self) -> float:
        """Seconds until a member that died is noticed."""
        return self._rooms.lease_s

    def check(self) -> None:
        """Raise if the group is no longer whole; one round trip.

        Raises:
            MembershipLostError: a member left or died, or this one was given up by the others; `ranks` says who.
            StaleGenerationError: a newer generation has begun; `ranks` says by whom.
            RendezvousUnreachableError: the place that keeps the rendezvous does not answer.
        """
        room = self._rooms.transact(self.name, _look)
        if isinstance(room, RendezvousError):
            raise room
        if room.generation != self.generation:
            raise room.lost(self.members[self.rank].incarnation)
        if gone := room.departed:
            text = "; ".join(map(str, gone))
            message = f"rendezvous {self.name!r} has lost {len(gone)} of {self.world_size} members: {text}"
            raise MembershipLostError(message, tuple(sighting.rank for sighting in gone))

    def close(self) -> None:
        """Leave; the others' `check` says so. A second call does nothing."""
        if self._renewal.close():
            _depart(self._rooms, self.name, self.members[self.rank].incarnation)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class _Renewal:
    """Renews a lease from a thread of its own, while its owner waits or computes; ends with its owner."""

    def __init__(self, rooms: Rooms, name: str, incarnation: str) -> None:
        self._closing = threading.Event()
        weakref.finalize(self, self._closing.set)
        rooms.renew(name, incarnation)
        start_thread(partial(_renew_until, self._closing, rooms, name, incarnation), self._closing, f"lease of {name}")

    def close(self) -> bool:
        """Stop renewing; return whether it was this call that did it."""
        was_open = not self._closing.is_set()
        self._closing.set()
        return was_open


def _renew_until(closing: threading.Event, rooms: Rooms, name: str, incarnation: str) -> None:
    heard = True
    while not closing.wait(rooms.lease_s / LOOKS_PER_LEASE):
        try:
            rooms.renew(name, incarnation)
            heard = True
        except RendezvousUnreachableError as error:
            if heard:
                _LOG.warning("the lease of rendezvous %r cannot be renewed: %s", name, error)
            heard = False


def _depart(rooms: Rooms, name: str, incarnation: str) -> None:
    with contextlib.suppress(RendezvousUnreachableError):  # nobody is left who could be told
        rooms.transact(name, partial(Room.depart, incarnation=incarnation, how="left", at=time.time()))
        rooms.release(incarnation)


def _missing(room: Room) -> str:
    """Return how many ranks have joined, and where the others were last seen."""
    there = room.world_size - len(room.missing)
    missing = "; ".join(room.whereabouts(rank) for rank in room.missing)
    return f"generation {room.generation}: {there} of {room.world_size} ranks are there. Missing: {missing}"
