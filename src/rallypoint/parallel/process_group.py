"""From a rendezvous to a torch process group.

Owns: how ranks that have met connect: who listens where, and the addresses that they exchange. Must not know: what is
reduced. There is no global default group: a process may have several, and ranks may be threads of one process.

A rank listens on a port before it tells its address, so ranks do not race for a port and no connection comes too early.
On CPUs gloo listens on a port that the system gives it, and its address is the rank's payload: gloo needs nothing but
the rendezvous. Other backends need a store for as long as they live: rank 0 opens one before it joins, and its address
is the payload. torch knows which backend a type of device has.

Ranks that wait for this one stop waiting if the connections of a gloo group are shut down. gloo cannot do that itself:
its `abort` does nothing, and connections live as long as anything refers to the group, which parts of torch do. So the
sockets are shut down below it. Their addresses identify them: every group listens on a port of its own, and each
connection of a group has one end at a port that one of its ranks listens on.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import datetime
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Self, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed import Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from rallypoint.cluster.rendezvous import Membership, Rendezvous, is_loopback, listening_socket
from rallypoint.errors import (
    MembershipLostError,
    PeerFailedError,
    PlacementError,
    RallyError,
    RendezvousError,
    StaleGenerationError,
)

Device: TypeAlias = str
"""torch's word for a type of device."""
_LOST_CONNECTION, _ADVICE = "onnection", ". This is typically caused"
"""In gloo's words for a peer that is gone, and what it adds to them."""
_PATIENCE_LEASES = 1.5
_LOOK_EVERY_S = 0.1
_SOON = datetime.timedelta(seconds=1)
Join: TypeAlias = Callable[[bytes], Membership]
"""Join with a payload."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Ranks that can communicate: a torch process group and the membership that stands behind it.

    Closing it, which the end of a `with` block does, leaves the membership; the others notice at their next `check`.
    """

    membership: Membership
    torch_group: dist.ProcessGroup
    """For `torch.distributed.all_reduce(tensor, group=...)` and the like."""
    device: Device
    """Type of device of the tensors that are communicated."""
    _store: Store
    """The store that the group refers to, kept as long as the group."""

    @property
    def rank(self) -> int:
        """This rank, from 0."""
        return self.membership.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.membership.world_size

    def check(self) -> None:
        """See `Membership.check`."""
        self.membership.check()

    def close(self) -> None:
        """Leave the group."""
        self.membership.close()

    def abandon(self) -> None:
        """Leave in the middle of an operation: the other ranks fail at once and learn that this rank left.

        gloo does not end all operations when their connections end: threads then wait for the rest of the group's
        timeout, and destroying the group would wait for them. So the group is kept for good.
        """
        self.membership.close()
        if self.device == "cpu":
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.torch_group))
            sever([member.payload.partition(b" ")[2] for member in self.membership.members])
        else:
            self.torch_group.abort()

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """If an operation in the block fails because a rank is gone, name that rank.

        Raises:
            MembershipLostError: the rendezvous knows that a rank is gone, or notices soon that it is missing.
            PeerFailedError: another rank closed its connection, or did not come in time.
        """
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, RallyError):
                raise
            self.check()
            text = str(error)
            if "gloo/" not in text and not isinstance(error, dist.DistError):
                raise
            if _LOST_CONNECTION in text:
                self._wait_for_news()
            raise PeerFailedError(
                f"{self.membership.name!r}: an operation of rank {self.rank} of {self.size} with the others "
                f"failed: {text.partition(_ADVICE)[0]}"
            ) from error

    def wait(self, work: dist.Work) -> None:
        """Wait for an operation of this group, within a block that is `watched`, as long as all ranks are there.

        A group whose operation might wait for longer is kept for good, see `abandon`.
        """
        if self.device == "cpu":
            lost: RallyError | None = None
            while not _ends_soon(work):
                if lost is not None:
                    ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.torch_group))
                    raise lost
                try:
                    self.check()
                except (MembershipLostError, StaleGenerationError) as error:
                    lost = error  # what is on its way may still come
        work.wait()

    def _wait_for_news(self) -> None:
        """Give the rendezvous time to notice a rank that died."""
        until = time.monotonic() + _PATIENCE_LEASES * self.membership.lease_s
        while time.monotonic() < until:
            time.sleep(_LOOK_EVERY_S)
            self.check()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _ends_soon(work: dist.Work) -> bool:
    with contextlib.suppress(RuntimeError):  # it takes longer, or failed, which the next wait raises
        work.wait(_SOON)
    return work.is_completed()


def meet(
    rendezvous: Rendezvous,
    name: str,
    *,
    rank: int,
    world_size: int,
    timeout_s: float,
    device: Device = "cpu",
    address: str | None = None,
    generation: int | None = None,
) -> Group:
    """Meet the other ranks and connect to them: by gloo on CPUs, else by what torch has for the device.

    Args:
        rendezvous: where to meet; everything that its `join` raises is raised here.
        name: the meeting's.
        rank: from 0.
        world_size: number of ranks.
        timeout_s: how long to wait for the others, and later for each collective operation.
        device: where tensors will be.
        address: IP address of this machine that the other ranks reach, and the only one that is listened on; by
            default the one in the direction of the rendezvous, which is loopback when there is only this machine.
        generation: see `Rendezvous.join`.

    Raises:
        RendezvousError: ranks on different machines, one of which offers an address that only itself can reach.
        RuntimeError: a rank that had joined is gone before it was connected.
        PlacementError: this build of torch has no backend for the device.
    """
    join: Callable[..., Membership] = partial(
        rendezvous.join, name, rank=rank, world_size=world_size, timeout_s=timeout_s, generation=generation
    )
    connect = _connect_gloo if device == "cpu" else partial(_connect_through_store, device, _Backend.of(device))
    timeout = datetime.timedelta(seconds=timeout_s)
    return connect(
        lambda payload: join(payload=payload), rank, world_size, address or rendezvous.own_address(), timeout
    )


class _Payloads(Store):
    """A store for gloo: what a rank writes becomes its payload, and what it reads is a peer's payload.

    gloo writes one value, under a key that ends in its rank, and then reads those of the others.
    """

    def __init__(self, join: Join, address: str) -> None:
        super().__init__()
        self._join, self._address = join, address
        self.membership: Membership | None = None

    def set(self, key: str, value: bytes) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        if self.membership is not None:
            raise RuntimeError(f"gloo writes a second value, {key!r}: this version of torch is not known here")
        self.membership = self._join(self._address.encode() + b" " + bytes(value))
        _check_reachable(self.membership)

    def get(self, key: str) -> bytes:
        assert self.membership is not None, "gloo reads only after it has written"
        return self.membership.members[int(key.rpartition("/")[2])].payload.partition(b" ")[2]

    def wait(self, keys: list[str], timeout: datetime.timedelta | None = None) -> None:
        """Return at once: all values are there when this rank has written its own."""


def _connect_gloo(join: Join, rank: int, size: int, address: str, timeout: datetime.timedelta) -> Group:
    # Private names, because the public door opens one group for the whole process, and listens on every interface.
    options = dist.ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = timeout
    store = _Payloads(join, address)
    with _leaving_unless_connected(lambda: store.membership):
        backend = dist.ProcessGroupGloo(store, rank, size, options)
    assert store.membership is not None, "gloo has written its address"
    group = dist.ProcessGroup(store, rank, size)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    return Group(store.membership, group, "cpu", store)


@dataclasses.dataclass(frozen=True, slots=True)
class _Backend:
    """torch's collectives for a type of device."""

    kind: Any
    """The class of its process groups."""
    type: dist.ProcessGroup.BackendType

    @classmethod
    def of(cls, device: Device) -> Self:
        """Find it by the names that torch gives to its parts."""
        known = dist.Backend.default_device_backend_map
        name = known.get(device, "none").upper()
        kind, type_ = vars(dist).get(f"ProcessGroup{name}"), dist.ProcessGroup.BackendType.__members__.get(name)
        if kind is None or type_ is None:
            raise PlacementError(
                f"torch {torch.__version__} has no collectives for devices of type {device!r}; it has backends for "
                f"{', '.join(f'{known[one]} ({one})' for one in known)}. Install the build of torch for that device"
            )
        return cls(kind, type_)


def _connect_through_store(
    device: Device, backend: _Backend, join: Join, rank: int, size: int, address: str, timeout: datetime.timedelta
) -> Group:
    store, port = None, 0
    if rank == 0:
        listening = listening_socket(address)
        port, fd = listening.getsockname()[1], listening.detach()
        store = TCPStore(address, port, None, True, timeout, False, master_listen_fd=fd)
    membership = join(f"{address} {port}".encode())
    with _leaving_unless_connected(lambda: membership):
        _check_reachable(membership)
        if store is None:
            host, _, port = membership.members[0].payload.decode().partition(" ")
            store = TCPStore(host, int(port), None, False, timeout, False)
        options = backend.kind.Options()
        options._timeout = timeout
        connected = backend.kind(store, rank, size, options)
    group = dist.ProcessGroup(store, rank, size)
    group._set_default_backend(backend.type)
    group._register_backend(torch.device(device), backend.type, connected)
    return Group(membership, group, device, store)


@contextlib.contextmanager
def _leaving_unless_connected(membership: Callable[[], Membership | None]) -> Iterator[None]:
    try:
        yield
    except RuntimeError:
        if joined := membership():
            with joined:
                joined.check()  # raises with the name of a rank that is known to be gone
        raise


def _check_reachable(membership: Membership) -> None:
    """Refuse loopback addresses between machines: a rank would connect to itself, or to no rank."""
    addresses = [member.payload.partition(b" ")[0].decode() for member in membership.members]
    nodes = {member.node for member in membership.members}
    lonely = [member for member, address in zip(membership.members, addresses, strict=True) if is_loopback(address)]
    if len(nodes) > 1 and lonely:
        raise RendezvousError(
            f"the ranks of {membership.name!r} are on {len(nodes)} machines, but {lonely[0]} offers "
            f"{addresses[lonely[0].rank]}, which only its own machine reaches: give the rendezvous an address "
            "that all machines reach",
            tuple(member.rank for member in lonely),
        )


def sever(written: Sequence[bytes]) -> int:
    """Shut down the connections of this process that belong to a group; waits of its peers fail at once.

    Args:
        written: what gloo of each rank has written for its peers; it contains the address that it listens on.

    Returns:
        Number of connections.
    """
    num_severed = 0
    for connection in _connections():
        with connection, contextlib.suppress(OSError):  # a peer that leaves as well may be faster
            ends = (_as_written(connection.getsockname()), _as_written(connection.getpeername()))
            if any(end in text for end in ends for text in written):
                # This holds for all descriptors of the socket. gloo then reads its end and closes it. Only the reading
                # side: an operation that sends might never learn that its socket cannot be written to.
                connection.shutdown(socket.SHUT_RD)
                num_severed += 1
    return num_severed


def _connections() -> Iterator[socket.socket]:
    """Yield every TCP connection of this process, by a descriptor of its own."""
    for name in os.listdir("/dev/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile, or no socket
            descriptor = os.dup(int(name))
            try:
                connection = socket.socket(fileno=descriptor)
            except OSError:
                os.close(descriptor)
                raise
            try:
                is_tcp = connection.type == socket.SOCK_STREAM and connection.family in (
                    socket.AF_INET,
                    socket.AF_INET6,
                )
                connected = is_tcp and bool(connection.getpeername())
            except OSError:
                connected = False
            if connected:
                yield connection
            else:
                connection.close()


def _as_written(address: tuple[str, int] | tuple[str, int, int, int]) -> bytes:
    """Return an address as C has it in a `sockaddr`: the port and the IP address in network order.

    >>> _as_written(("127.0.0.1", 258)).hex(" ")
    '01 02 7f 00 00 01'
    """
    host, port = address[:2]
    if ":" in host:
        flow = struct.pack("!I", address[2] if len(address) == 4 else 0)
        return struct.pack("!H", port) + flow + socket.inet_pton(socket.AF_INET6, host.partition("%")[0])
    return struct.pack("!H", port) + socket.inet_aton(host)
