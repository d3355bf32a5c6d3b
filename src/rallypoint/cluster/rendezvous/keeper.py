"""Rooms in the memory of one process, and the leases of their members: what a server of rooms consists of.

Not safe for threads by itself; `memory` puts a lock around it and `ray` a Ray actor.
"""

from __future__ import annotations

import time
from collections import Counter
from functools import partial

from rallypoint.cluster.rendezvous.leases import Leases
from rallypoint.cluster.rendezvous.protocol import Change
from rallypoint.cluster.rendezvous.room import Room
from rallypoint.errors import RendezvousError


class Keeper:
    """Keeps rooms, and makes members depart who no longer renew."""

    def __init__(self) -> None:
        self._rooms: dict[str, Room] = {}
        self._renewals: Counter[str] = Counter()
        self._leases = Leases()

    def room(self, name: str) -> Room:
        """Return the room of that name; an empty one if nobody has come yet."""
        return self._rooms.get(name) or Room(name)

    def transact(self, name: str, change: Change) -> tuple[Room | RendezvousError, bool]:
        """Apply a transition; also return whether it was news to those who wait."""
        before = self.room(name)
        after = change(before)
        if isinstance(after, RendezvousError):
            return after, False
        self._rooms[name] = after
        return after, after.news != before.news

    def renew(self, name: str, incarnation: str) -> None:
        """See `Rooms.renew`."""
        del name  # incarnations are unique
        self._renewals[incarnation] += 1

    def release(self, incarnation: str) -> None:
        """See `Rooms.release`."""
        self._renewals.pop(incarnation, None)

    def look(self) -> bool:
        """Take one look at all leases; return whether anybody is gone."""
        names = {member.incarnation: name for name, room in self._rooms.items() for member in room.present}
        expired = self._leases.look({incarnation: self._renewals[incarnation] for incarnation in names})
        for incarnation in expired:
            gone = partial(Room.depart, incarnation=incarnation, how="died or froze", at=time.time())
            self.transact(names[incarnation], gone)
            self.release(incarnation)
        return bool(expired)
