"""Rooms in torch's TCPStore, for clusters without Ray: one port of the driver that all ranks can reach.

A room is one key that is replaced by compare-and-set. Waiting ranks block on a key that appears with the next news.
The process that opened the store looks at the leases. The store has no authentication: anyone who reaches the port can
write to it, so it listens on loopback unless told otherwise.
"""

from __future__ import annotations

import contextlib
import datetime
import threading
import time
from collections.abc import Iterator
from functools import partial

from torch.distributed import (
    DistNetworkError,
    DistStoreError,
    TCPStore,  # pyright: ignore[reportPrivateImportUsage]
)

from rallypoint.cluster.rendezvous.address import listening_socket
from rallypoint.cluster.rendezvous.leases import LOOKS_PER_LEASE, Leases, start_thread
from rallypoint.cluster.rendezvous.protocol import Change
from rallypoint.cluster.rendezvous.room import Room
from rallypoint.errors import RendezvousError, RendezvousUnreachableError

_CONNECT_S = datetime.timedelta(seconds=30)


class TcpRooms:
    """See `Rooms`: a client of the store. Copies in other processes connect when they first use it."""

    def __init__(self, host: str, port: int, lease_s: float) -> None:
        self.towards, self._port, self.lease_s = host, port, lease_s
        self._threads = threading.local()
        self._server: TCPStore | None = None
        self._closing = threading.Event()
        self._gone: str | None = None

    @classmethod
    def open(cls, address: str, lease_s: float) -> TcpRooms:
        """Start the store on `host:port`; the host says which interface, port 0 takes one that is free.

        Raises:
            RendezvousError: the address cannot be listened on.
        """
        host, _, port = address.rpartition(":")
        try:
            # Bound here and handed over: no port is picked first and taken later, and no other interface listens.
            listening = listening_socket(host.strip("[]"), int(port))
        except (OSError, ValueError) as error:
            raise RendezvousError(f"cannot listen on {address!r}, expected IP:PORT of this machine: {error}") from None
        rooms = cls(host.strip("[]"), listening.getsockname()[1], lease_s)
        fd = listening.detach()
        rooms._server = TCPStore(rooms.towards, rooms._port, None, True, _CONNECT_S, False, master_listen_fd=fd)
        start_thread(rooms._keep, rooms._closing, "leases")
        return rooms

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.towards, self._port, self.lease_s))

    def transact(self, name: str, change: Change, wait_s: float = 0.0) -> Room | RendezvousError:
        """See `Rooms.transact`; never waits."""
        del wait_s
        with self._store() as store:
            text = store.compare_set(f"room/{name}", "", "")
            while True:
                before = Room.decode(name, text)
                after = change(before)
                if isinstance(after, RendezvousError) or after is before:
                    return after
                wanted = after.encode()
                found = store.compare_set(f"room/{name}", text.decode(), wanted.decode())
                if found == wanted:
                    break
                text = found
            if after.news != before.news:
                store.set(f"news/{name}/{after.news}", "")
        return after

    def wait(self, name: str, news: int, timeout_s: float) -> Room:
        """See `Rooms.wait`."""
        with self._store() as store, contextlib.suppress(DistStoreError):
            store.wait([f"news/{name}/{news + 1}"], datetime.timedelta(seconds=timeout_s))
        with self._store() as store:
            return Room.decode(name, store.compare_set(f"room/{name}", "", ""))

    def renew(self, name: str, incarnation: str) -> None:
        """See `Rooms.renew`."""
        del name  # incarnations are unique
        with self._store() as store:
            store.add(f"lease/{incarnation}", 1)

    def release(self, incarnation: str) -> None:
        """Keep the counter: a look in progress may be about to read it, and would wait for a key that is not there."""

    def close(self) -> None:
        """See `Rooms.close`."""
        if self._server is not None:
            self._closing.set()
            self._gone = "the rendezvous was closed by the program that opened it"
            self._server = None

    @contextlib.contextmanager
    def _store(self) -> Iterator[TCPStore]:
        """A connection of this thread's own: a client does one call at a time, and waiting is one."""
        if self._gone is not None:  # what a store held is lost with it; torch writes a page to stderr at each attempt
            raise RendezvousUnreachableError(self._gone)
        store: TCPStore | None = getattr(self._threads, "store", None)
        try:
            if store is None:
                store = TCPStore(self.towards, self._port, None, False, _CONNECT_S, False)
            self._threads.store = store
            yield store
        except DistNetworkError as error:
            reason = str(error).splitlines()[0]
            self._gone = f"the TCPStore at {self.towards}:{self._port} does not answer: {reason}"
            raise RendezvousUnreachableError(self._gone) from None

    def _keep(self) -> None:
        """Look at the leases until closed."""
        leases = Leases()
        with contextlib.suppress(RendezvousUnreachableError):  # closed during a look
            while not self._closing.wait(self.lease_s / LOOKS_PER_LEASE):
                names, renewals = self._renewals()
                for incarnation in leases.look(renewals):
                    gone = partial(Room.depart, incarnation=incarnation, how="died or froze", at=time.time())
                    self.transact(names[incarnation], gone)

    def _renewals(self) -> tuple[dict[str, str], dict[str, int]]:
        """The room of each member, and how often the member renewed its lease; by incarnation."""
        names: dict[str, str] = {}
        renewals: dict[str, int] = {}
        with self._store() as store:
            for name in [key.removeprefix("room/") for key in store.list_keys() if key.startswith("room/")]:
                room = Room.decode(name, store.get(f"room/{name}"))
                # The member that changed the room may have died before it told the others.
                store.set(f"news/{name}/{room.news}", "")
                holders = [member.incarnation for member in room.present]
                counters = store.multi_get([f"lease/{holder}" for holder in holders]) if holders else []
                names |= dict.fromkeys(holders, name)
                renewals |= {holder: int(counter) for holder, counter in zip(holders, counters, strict=True)}
        return names, renewals
