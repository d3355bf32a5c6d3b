"""Weights between processes of one node: buckets in memory that they share.

Owns: the memory, and who may touch which bucket of it when. Must not know: what is in a bucket.

Weights that lie in shared memory themselves (`shared`) are copied once: their sender fills the headers of buckets, and
those who take check and copy every rectangle from where it is. For others every member with a root has memory for a few
buckets and fills them one after another; those who take copy each out into their model and say so, and when all have,
it is filled again. While one bucket is copied out the next ones are copied in, so that a publish takes hardly longer
than the slower of the two, and the buckets stay in the processor's cache.

Nothing of it has a name in the file system: the memory is a file that was never in a folder, and its descriptor goes
over a socket. So there is nothing to sweep, also after `kill -9` of anybody.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Protocol

import torch
from torch import Tensor

from rallypoint.cluster.rendezvous import Rendezvous
from rallypoint.errors import WeightsMismatchError
from rallypoint.weights.line import Plan, at_meeting
from rallypoint.weights.shared import Exposed
from rallypoint.weights.sockets import Listener, Peer, closing_descriptors, connect
from rallypoint.weights.stream import HEADER_BYTES, Manifest, Runs, Sink, Source, seal

NUM_SLOTS = 4
"""Buckets that a member with a root has memory for."""
NUM_HEADERS = 3
"""The same, where that is of headers alone: so far the sender is ahead, whose checks leave rectangles in the cache."""


class Buffers(Protocol):
    """Memory that processes can share."""

    def make(self, num_bytes: int) -> tuple[Tensor, bytes, Sequence[int]]:
        """Return memory, and what another process opens it by: some bytes, and open files."""
        ...

    def open(self, num_bytes: int, told: bytes, descriptors: Sequence[int]) -> Tensor:
        """Return the memory that another process made."""
        ...

    def settle(self) -> None:
        """Return when everything that was copied by this process is where it should be."""
        ...


class HostMemory:
    """Memory of the machine; see `Buffers`."""

    def make(self, num_bytes: int) -> tuple[Tensor, bytes, Sequence[int]]:
        """See `Buffers.make`."""
        if sys.platform == "linux":
            descriptor = os.memfd_create("rallypoint weights")
        else:
            with tempfile.TemporaryFile() as file:
                descriptor = os.dup(file.fileno())
        os.ftruncate(descriptor, num_bytes)
        return self.open(num_bytes, b"", [descriptor]), b"", [descriptor]

    def open(self, num_bytes: int, told: bytes, descriptors: Sequence[int]) -> Tensor:
        """See `Buffers.open`."""
        del told
        return torch.frombuffer(mmap.mmap(descriptors[0], num_bytes), dtype=torch.uint8)

    def settle(self) -> None:
        """See `Buffers.settle`; a processor is done when it says so."""


class Outlet:
    """What a member sends from: its memory, and those who take from it."""

    def __init__(
        self, slots: Sequence[Tensor], takers: Sequence[Peer], stay: Mapping[int, Runs], addresses: Mapping[str, int]
    ) -> None:
        """Take over memory and connections.

        Args:
            slots: memory of a bucket each.
            takers: the connections to all of them.
            stay: number of a bucket -> its rectangles, which are read from where they are.
            addresses: name of a tensor -> where it was when takers were told of it.
        """
        self._slots, self._takers, self.stay, self.addresses = slots, takers, stay, addresses
        self._num_shown = 0

    def free_slot(self) -> Tensor:
        """Return the memory for the next bucket, when everybody has taken what was in it before."""
        self._wait(self._num_shown + 1 - len(self._slots))
        return self._slots[self._num_shown % len(self._slots)]

    def show(self) -> None:
        """Tell everybody that it is filled."""
        self._num_shown += 1
        for taker in self._takers:
            taker.tell()

    def settle(self) -> None:
        """Return when everybody has taken everything."""
        self._wait(self._num_shown)

    def close(self) -> None:
        """Close the connections."""
        for taker in self._takers:
            taker.close()

    def _wait(self, count: int) -> None:
        for taker in self._takers:
            taker.hear(count)


class Inlet:
    """What a member takes from: the memory of another one, or its own."""

    def __init__(self, slots: Sequence[Tensor], root: Peer, stay: Mapping[int, Runs]) -> None:
        """Take over memory and the connection to the member that fills it; see `Outlet`."""
        self._slots, self._root, self.stay = slots, root, stay
        self._num_taken = 0

    def next_slot(self) -> Tensor:
        """Return the memory of the next bucket, when it is filled."""
        self._root.hear(self._num_taken + 1)
        return self._slots[self._num_taken % len(self._slots)]

    def taken(self) -> None:
        """Let it be filled again."""
        self._num_taken += 1
        self._root.tell()

    def close(self) -> None:
        """Close the connection."""
        self._root.close()


class MemoryLine:
    """See `Line`."""

    def __init__(
        self, plan: Plan, place: int, buffers: Buffers, outlet: Outlet | None, inlets: dict[int, Inlet]
    ) -> None:
        """See `join`, which makes them; `inlets` are by root."""
        self._plan, self._buffers, self._outlet, self._inlets = plan, buffers, outlet, inlets
        self._root = plan.members[place].root

    def run(self, version: int, source: Source | None, sink: Sink | None, tick: Callable[[], None]) -> None:
        """See `Line.run`; who both sends and takes has a thread for each."""
        with contextlib.ExitStack() as unless_done:
            unless_done.callback(self.close)
            if source is None:
                self._take(sink, tick)
            elif sink is None:
                self._send(version, source, tick)
            else:
                self._do_both(version, source, sink, tick)
            unless_done.pop_all()

    def close(self) -> None:
        """See `Line.close`."""
        for inlet in self._inlets.values():
            inlet.close()
        if self._outlet is not None:
            self._outlet.close()

    def _do_both(self, version: int, source: Source, sink: Sink, tick: Callable[[], None]) -> None:
        with ThreadPoolExecutor(2, thread_name_prefix="publish") as threads, contextlib.ExitStack() as unless_done:
            unless_done.callback(self.close)  # which ends the other thread
            doing = threads.submit(self._send, version, source, tick), threads.submit(self._take, sink, tick)
            for done in wait(doing, return_when=FIRST_EXCEPTION).done:
                done.result()
            unless_done.pop_all()

    def _send(self, version: int, source: Source, tick: Callable[[], None]) -> None:
        assert self._outlet is not None, "a member with a source has a root"
        addresses = self._outlet.addresses
        if addresses and not source.lie_at(addresses):
            raise WeightsMismatchError("weights were moved since those who take them were told where they are")
        for index, bucket in enumerate(self._plan.manifest.buckets):
            if bucket.root == self._root:
                slot = self._outlet.free_slot()
                if index in self._outlet.stay:
                    seal(slot, index, version, self._outlet.stay[index])
                else:
                    source.pack(bucket, index, version, slot)
                self._buffers.settle()
                self._outlet.show()
                tick()
        self._outlet.settle()

    def _take(self, sink: Sink | None, tick: Callable[[], None]) -> None:
        assert sink is not None, "a member sends, or takes, or both"
        for index, bucket in enumerate(self._plan.manifest.buckets):
            inlet = self._inlets[bucket.root]
            sink.unpack(index, inlet.next_slot(), inlet.stay.get(index))
            self._buffers.settle()
            inlet.taken()
            tick()


def join(
    rendezvous: Rendezvous, plan: Plan, place: int, buffers: Buffers | None = None, exposed: Exposed | None = None
) -> MemoryLine:
    """See `Join`; `buffers` are the machine's memory by default, `exposed` what this member sends from where it is."""
    buffers = buffers or HostMemory()
    me, names = plan.members[place], [member.name for member in plan.members]
    with contextlib.ExitStack() as unless_joined, Listener() as listener:
        # From then on the sockets say who is there.
        with (
            at_meeting(plan),
            rendezvous.join(
                plan.name, rank=place, world_size=len(names), payload=listener.address, timeout_s=plan.timeout_s
            ) as membership,
        ):
            addresses = [member.payload for member in membership.members]
        roots: dict[int, Peer] = {}
        for other, member in enumerate(plan.members):
            if me.taker is not None and member.root is not None:
                roots[member.root] = connect(addresses[other], names[other], place, plan.timeout_s)
                unless_joined.callback(roots[member.root].close)
        outlet = None
        if me.root is not None:
            takers = listener.accept(names, plan.takers, plan.timeout_s)
            outlet = _shared(buffers, plan.manifest, me.root, takers, exposed)
            unless_joined.callback(outlet.close)
        inlets = {root: _opened(buffers, plan.manifest, root, peer) for root, peer in roots.items()}
        unless_joined.pop_all()
    return MemoryLine(plan, place, buffers, outlet, inlets)


def _shared(buffers: Buffers, manifest: Manifest, root: int, takers: Sequence[Peer], exposed: Exposed | None) -> Outlet:
    """Make memory for some buckets, and give it to everybody who takes, after what is exposed."""
    stay = {} if exposed is None else _staying(manifest, root, exposed)
    num, size = _slots(manifest, root, stay)
    memory, told, descriptors = buffers.make(num * size)
    with closing_descriptors(descriptors):
        for taker in takers:
            taker.give(*((b"", ()) if exposed is None else (exposed.told(manifest.shapes), [exposed.descriptor])))
            taker.give(told, descriptors)
    return Outlet(memory.split(size), takers, stay, {} if exposed is None else exposed.addresses())


def _opened(buffers: Buffers, manifest: Manifest, root: int, peer: Peer) -> Inlet:
    """Open what `_shared` gave."""
    told, descriptors = peer.given()
    with closing_descriptors(descriptors):
        exposed = Exposed.opened(told, manifest.shapes, descriptors[0]) if descriptors else None
        stay = {} if exposed is None else _staying(manifest, root, exposed)
    num, size = _slots(manifest, root, stay)
    told, descriptors = peer.given()
    with closing_descriptors(descriptors):
        return Inlet(buffers.open(num * size, told, descriptors).split(size), peer, stay)


def _staying(manifest: Manifest, root: int, exposed: Exposed) -> dict[int, Runs]:
    """Return the rectangles of the buckets of a root that are read from where they are."""
    buckets = ((index, bucket) for index, bucket in enumerate(manifest.buckets) if bucket.root == root)
    return {index: runs for index, bucket in buckets if (runs := exposed.runs(bucket)) is not None}


def _slots(manifest: Manifest, root: int, stay: Mapping[int, Runs]) -> tuple[int, int]:
    """Return for how many buckets of a root there is memory, and how much for each."""
    num_buckets = sum(bucket.root == root for bucket in manifest.buckets)
    if len(stay) == num_buckets:
        return min(num_buckets, NUM_HEADERS), HEADER_BYTES
    return NUM_SLOTS, manifest.bucket_bytes
