"""Weights between processes of one node: buckets in memory that they share.

Owns: the memory, and who may touch which bucket of it when. Must not know: what is in a bucket.

Every member with a root has memory for a few buckets and fills them one after another; those who take copy each out
into their model and say so, and when all have, it is filled again. While one bucket is copied out the next ones are
copied in, so that a publish takes hardly longer than the slower of the two, and the buckets stay in the processor's
cache.

Nothing of it has a name in the file system: the memory is a file that was never in a folder, and its descriptor goes
over a socket. So there is nothing to sweep, also after `kill -9` of anybody.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Protocol

import torch
from torch import Tensor

from rallypoint.cluster.rendezvous import Rendezvous
from rallypoint.weights.line import Plan, at_meeting
from rallypoint.weights.sockets import Listener, Peer, closing_descriptors, connect
from rallypoint.weights.stream import Sink, Source

NUM_SLOTS = 4
"""Buckets that a member with a root has memory for."""


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

    def __init__(self, slots: Sequence[Tensor], takers: Sequence[Peer]) -> None:
        """Take over `slots`, memory of a bucket each, and the connections to all `takers`."""
        self._slots, self._takers = slots, takers
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

    def __init__(self, slots: Sequence[Tensor], root: Peer) -> None:
        """Take over `slots`, memory of a bucket each, and the connection to the member that fills them."""
        self._slots, self._root = slots, root
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
        for index, bucket in enumerate(self._plan.manifest.buckets):
            if bucket.root == self._root:
                source.pack(bucket, index, version, self._outlet.free_slot())
                self._buffers.settle()
                self._outlet.show()
                tick()
        self._outlet.settle()

    def _take(self, sink: Sink | None, tick: Callable[[], None]) -> None:
        assert sink is not None, "a member sends, or takes, or both"
        for index, bucket in enumerate(self._plan.manifest.buckets):
            inlet = self._inlets[bucket.root]
            sink.unpack(index, inlet.next_slot())
            self._buffers.settle()
            inlet.taken()
            tick()


def join(rendezvous: Rendezvous, plan: Plan, place: int, buffers: Buffers | None = None) -> MemoryLine:
    """See `Join`; `buffers` are the machine's memory by default."""
    buffers = buffers or HostMemory()
    me, names, size = plan.members[place], [member.name for member in plan.members], plan.manifest.bucket_bytes
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
            outlet = Outlet(*_shared(buffers, size, listener.accept(names, plan.takers, plan.timeout_s)))
            unless_joined.callback(outlet.close)
        inlets = {root: Inlet(_opened(buffers, size, peer), peer) for root, peer in roots.items()}
        unless_joined.pop_all()
    return MemoryLine(plan, place, buffers, outlet, inlets)


def _shared(buffers: Buffers, size: int, takers: list[Peer]) -> tuple[list[Tensor], list[Peer]]:
    """Make memory for some buckets and give it to everybody who takes."""
    memory, told, descriptors = buffers.make(NUM_SLOTS * size)
    with closing_descriptors(descriptors):
        for taker in takers:
            taker.give(told, descriptors)
    return list(memory.split(size)), takers


def _opened(buffers: Buffers, size: int, root: Peer) -> list[Tensor]:
    told, descriptors = root.given()
    with closing_descriptors(descriptors):
        return list(buffers.open(NUM_SLOTS * size, told, descriptors).split(size))
