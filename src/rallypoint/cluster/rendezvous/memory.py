"""Rooms in the memory of one process: for its threads, or for a server of rooms."""

from __future__ import annotations

import threading
import time
from collections import Counter
from functools import partial
from typing import NoReturn

from rallypoint.cluster.rendezvous.leases import LOOKS_PER_LEASE, Leases
from rallypoint.cluster.rendezvous.protocol import Change
from rallypoint.cluster.rendezvous.room import Room
from rallypoint.errors import RendezvousError, RendezvousUnreachableError


class RoomKeeper:
    """Rooms and the leases of their members. Not safe for threads: users put a lock or a Ray actor around it."""

    def __init__(self) -> None:
        self._rooms: dict[str, Room] = {}
        self._renewals: Counter[str] = Counter()
        self._leases = Leases()

    def room(self, name: str) -> Room:
        """Return the room of that name; an empty one if no rank has joined yet."""
        return self._rooms.get(name) or Room(name)

    def transact(self, name: str, change: Change) -> tuple[Room | RendezvousError, bool]:
        """Apply a transition; also return whether it was news to waiting ranks."""
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


class MemoryRooms:
    """See `Rooms`: a keeper behind a lock."""

    towards = None

    def __init__(self, lease_s: float) -> None:
        self.lease_s = lease_s
        self._keeper = RoomKeeper()
        self._news = threading.Condition()
        self._closing = threading.Event()
        self._looking = threading.Thread(target=self._look, name="leases", daemon=True)
        self._looking.start()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a rendezvous in memory cannot be sent to another process: use ray, tcp or etcd")

    def transact(self, name: str, change: Change, wait_s: float = 0.0) -> Room | RendezvousError:
        """See `Rooms.transact`; never waits."""
        del wait_s
        with self._open():
            outcome, is_news = self._keeper.transact(name, change)
            if is_news:
                self._news.notify_all()
        return outcome

    def wait(self, name: str, news: int, timeout_s: float) -> Room:
        """See `Rooms.wait`."""
        with self._open():
            self._news.wait_for(lambda: self._closing.is_set() or self._keeper.room(name).news != news, timeout_s)
        with self._open():
            return self._keeper.room(name)

    def renew(self, name: str, incarnation: str) -> None:
        """See `Rooms.renew`; nothing is left to renew when it was closed."""
        with self._news:
            self._keeper.renew(name, incarnation)

    def release(self, incarnation: str) -> None:
        """See `Rooms.release`."""
        with self._open():
            self._keeper.release(incarnation)

    def close(self) -> None:
        """See `Rooms.close`."""
        self._closing.set()
        with self._news:
            self._news.notify_all()
        self._looking.join()

    def _open(self) -> threading.Condition:
        if self._closing.is_set():
            raise RendezvousUnreachableError("the rendezvous was closed by the program that opened it")
        return self._news

    def _look(self) -> None:
        while not self._closing.wait(self.lease_s / LOOKS_PER_LEASE):
            with self._news:
                if self._keeper.look():
                    self._news.notify_all()
