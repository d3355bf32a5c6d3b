"""The rules by which ranks find each other, as a value and its transitions.

A room is the state of one meeting, found by its name. Generations count the attempts to fill it. A generation is open
while seats are free. When the last seat is taken, every rank confirms once more, so that no rank gets the address of
another that died while others were still on their way. With the last confirmation the generation is complete, and its
members never change again. A rank that leaves is remembered as a sighting: where it was last seen.

Every backend stores this value and replaces it atomically; none has rules of its own. Nothing here reads a clock, waits
or knows where the room is kept. Times are wall-clock seconds of their writer, for messages, and are never compared.

Invariants: one member to a seat; `news` and `generation` never go back; a complete generation keeps its members.

>>> room = Room("actor").join(Member(0, b"10.0.0.1", "node-a", 11, "x"), world_size=2)
>>> room.missing
(1,)
>>> room = room.join(Member(1, b"10.0.0.2", "node-b", 12, "y"), world_size=2)
>>> room.complete, room.missing
(False, (0,))
>>> room.confirm("x").complete
True
"""

from __future__ import annotations

import base64
import dataclasses
import json
import time
from typing import Literal

from rallypoint.errors import MembershipLostError, RankTakenError, RendezvousError, StaleGenerationError, WorldSizeError

How = Literal["left", "gave up waiting", "died or froze", "took part"]
"""How a member was last seen: the last one means that a newer generation began while it was a member."""


@dataclasses.dataclass(frozen=True, slots=True)
class Member:
    """One participant: a rank, what it brought, and where it runs."""

    rank: int
    payload: bytes
    """What it wants the others to know: an address, an id; any bytes."""
    node: str
    """Host name."""
    pid: int
    incarnation: str
    """Unique to this attempt of this process to be this rank."""
    since: float = 0.0
    """When it came; seconds since 1970 by its own clock."""

    def __str__(self) -> str:
        return f"rank {self.rank} (node {self.node}, pid {self.pid})"


@dataclasses.dataclass(frozen=True, slots=True)
class Sighting:
    """Where and when a rank that is not there was last seen."""

    rank: int
    node: str
    pid: int
    incarnation: str
    generation: int
    how: How
    at: float
    """Seconds since 1970, by the clock of the machine that noticed."""

    def __str__(self) -> str:
        moment = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self.at))
        where = f"rank {self.rank} (node {self.node}, pid {self.pid})"
        return f"{where} {self.how} in generation {self.generation}, {moment}"


@dataclasses.dataclass(frozen=True, slots=True)
class Room:
    """What is known under one name; transitions return the next room, or the error for the caller."""

    name: str
    generation: int = 0
    """Number of the latest attempt, from 1; 0 while no rank has joined."""
    world_size: int = 0
    complete: bool = False
    seats: tuple[Member, ...] = ()
    """Members of this generation, by rank."""
    confirmed: frozenset[str] = frozenset()
    """Incarnations that were alive when the last seat had been taken."""
    sightings: tuple[Sighting, ...] = ()
    """The latest one of each rank that went, by rank."""
    news: int = 0
    """Counts the changes that waiting ranks are woken for: all seats taken, complete, a rank gone, a new generation."""

    def join(self, member: Member, world_size: int, generation: int | None = None) -> Room | RendezvousError:
        """Take the seat of the member's rank.

        Args:
            member: who comes.
            world_size: number of ranks that it expects.
            generation: the attempt it belongs to; a newer one than the room's begins it. None is the current one, or
                the next one when the current one was complete and this rank's member is gone.
        """
        if member in self.seats:
            return self
        if refusal := self._refusal(member, world_size, generation):
            return refusal
        is_over = self.complete or not self.generation
        current = self.generation + 1 if is_over else self.generation
        room = self if (generation or current) == self.generation else self._begin(generation or current)
        return room._seat(member, world_size)

    def confirm(self, incarnation: str) -> Room | RendezvousError:
        """Confirm, after every seat was taken, that a rank is still there; the last one completes the generation."""
        if not any(member.incarnation == incarnation for member in self.seats):
            return self.lost(incarnation)
        if self.complete or not self.assembled:
            return self
        confirmed = self.confirmed | {incarnation}
        if len(confirmed) < self.world_size:
            return dataclasses.replace(self, confirmed=confirmed)
        return dataclasses.replace(self, confirmed=confirmed, complete=True, news=self.news + 1)

    def depart(self, incarnation: str, how: How, at: float) -> Room:
        """Free a seat; in a complete generation only note who is gone. An unknown incarnation changes nothing."""
        member = next((member for member in self.seats if member.incarnation == incarnation), None)
        if member is None or self._is_gone(member):
            return self
        room = dataclasses.replace(self, sightings=self._seen(member, how, at), news=self.news + 1)
        if self.complete:
            return room
        rest = tuple(other for other in self.seats if other is not member)
        return dataclasses.replace(room, seats=rest, confirmed=frozenset())

    def give_up(self, incarnation: str, at: float) -> Room:
        """Stop waiting, unless the generation was completed meanwhile."""
        return self if self.complete else self.depart(incarnation, "gave up waiting", at)

    @property
    def assembled(self) -> bool:
        """Whether every seat is taken."""
        return bool(self.seats) and len(self.seats) == self.world_size

    @property
    def present(self) -> tuple[Member, ...]:
        """The members of this generation that are not known to be gone, by rank."""
        gone = {sighting.incarnation for sighting in self.sightings}
        return tuple(member for member in self.seats if member.incarnation not in gone)

    @property
    def departed(self) -> tuple[Sighting, ...]:
        """The members that are gone, by rank."""
        members = {member.incarnation for member in self.seats}
        return tuple(sighting for sighting in self.sightings if sighting.incarnation in members)

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks without which this generation is not complete: without a seat, or not confirmed when all have one."""
        there = {member.rank for member in self.seats if not self.assembled or member.incarnation in self.confirmed}
        return () if self.complete else tuple(rank for rank in range(self.world_size) if rank not in there)

    def whereabouts(self, rank: int) -> str:
        """Return what is known of a rank, in one sentence without a full stop."""
        if member := self.member_of(rank):
            return f"{member} came, but did not answer when all were there"
        sighting = next((sighting for sighting in self.sightings if sighting.rank == rank), None)
        return str(sighting) if sighting else f"rank {rank} never came"

    def member_of(self, rank: int) -> Member | None:
        """Return the member that has the seat of a rank."""
        return next((member for member in self.seats if member.rank == rank), None)

    def lost(self, incarnation: str) -> RendezvousError:
        """Say why an incarnation that had a seat has it no longer."""
        mine = next((sighting for sighting in self.sightings if sighting.incarnation == incarnation), None)
        if mine and mine.generation == self.generation:
            return MembershipLostError(f"lost its seat at rendezvous {self.name!r}: {mine}", (mine.rank,))
        return StaleGenerationError(
            f"generation {self.generation} of rendezvous {self.name!r} has begun, with {_listed(self.seats)}: "
            "ranks of an earlier one have to join again",
            tuple(member.rank for member in self.seats[:3]),
        )

    def encode(self) -> bytes:
        """Return the room as JSON; members and sightings as lists of their fields, in order."""
        fields = {
            "name": self.name,
            "generation": self.generation,
            "world_size": self.world_size,
            "complete": self.complete,
            "seats": [
                (m.rank, base64.b64encode(m.payload).decode(), m.node, m.pid, m.incarnation, m.since)
                for m in self.seats
            ],
            "confirmed": sorted(self.confirmed),
            "sightings": [dataclasses.astuple(sighting) for sighting in self.sightings],
            "news": self.news,
        }
        return json.dumps(fields, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, name: str, text: bytes) -> Room:
        """Return the room that `encode` wrote; the empty one for no text."""
        if not text:
            return cls(name)
        fields = json.loads(text)
        fields["seats"] = tuple(
            Member(rank, base64.b64decode(payload), *others) for rank, payload, *others in fields["seats"]
        )
        fields["confirmed"] = frozenset(fields["confirmed"])
        fields["sightings"] = tuple(Sighting(*sighting) for sighting in fields["sightings"])
        return cls(**fields)

    def _refusal(self, member: Member, world_size: int, generation: int | None) -> RendezvousError | None:
        """Return why a newcomer cannot take part in the generation that it asks for; None if it can."""
        if generation is not None and generation > self.generation:
            return None
        if generation is not None and generation < self.generation:
            return StaleGenerationError(
                f"{member} came to generation {generation} of rendezvous {self.name!r}, "
                f"but generation {self.generation} has begun: it is left over from an earlier attempt",
                (member.rank,),
            )
        if self.present and world_size != self.world_size:
            return WorldSizeError(
                f"{member} expects world_size={world_size} at rendezvous {self.name!r}, "
                f"but world_size={self.world_size} was set by {_listed(self.present)}",
                (member.rank,),
            )
        holder = self.member_of(member.rank)
        if holder is not None and not self._is_gone(holder):
            return RankTakenError(
                f"two participants claim the same rank at rendezvous {self.name!r}: {member} is refused, "
                f"because {holder} has the seat in generation {self.generation} and is alive",
                (member.rank,),
            )
        if self.complete and generation is not None:
            return StaleGenerationError(
                f"{member} came to generation {generation} of rendezvous {self.name!r}, which was complete before: "
                f"the ranks that come back begin generation {generation + 1}",
                (member.rank,),
            )
        return None

    def _is_gone(self, member: Member) -> bool:
        return any(sighting.incarnation == member.incarnation for sighting in self.sightings)

    def _begin(self, generation: int) -> Room:
        """Open a new generation; members of the last one become sightings."""
        room = self
        for member in self.present:
            room = dataclasses.replace(room, sightings=room._seen(member, "took part", member.since))
        return Room(self.name, generation, sightings=room.sightings, news=self.news + 1)

    def _seat(self, member: Member, world_size: int) -> Room:
        seats = tuple(sorted((*self.seats, member), key=lambda seat: seat.rank))
        room = dataclasses.replace(self, world_size=world_size, seats=seats)
        if not room.assembled:
            return room
        # The last to come has shown that it is alive; for a world of one that is everybody.
        room = dataclasses.replace(room, confirmed=frozenset({member.incarnation}), news=room.news + 1)
        return dataclasses.replace(room, complete=world_size == 1)

    def _seen(self, member: Member, how: How, at: float) -> tuple[Sighting, ...]:
        others = (sighting for sighting in self.sightings if sighting.rank != member.rank)
        mine = Sighting(member.rank, member.node, member.pid, member.incarnation, self.generation, how, at)
        return tuple(sorted((*others, mine), key=lambda sighting: sighting.rank))


def _listed(members: tuple[Member, ...]) -> str:
    """The first few, for a message."""
    return ", ".join(map(str, members[:3])) + ", ..." * (len(members) > 3) or "nobody any more"
