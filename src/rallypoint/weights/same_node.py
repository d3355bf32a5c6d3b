"""Weights between processes of one node: buckets in memory that they share.

Owns: the memory, and who may touch which bucket of it when. Must not know: what is in a bucket.

Weights that lie in shared memory themselves (`shared`) are copied once: their sender fills the headers of buckets, and
those who take check and copy every rectangle from where it is. For others every member with a root has memory for a few
buckets and fills them one after another; those who take copy each out into their model and say so, and when all have,
it is filled again. While one bucket is copied out the next ones are copied in, so that a publish takes hardly longer
than the slower of the two, and the buckets stay in the processor's cache.

Nothing of it has a name in the file system: the memory is a file that was never in a folder, and its descriptor goes
over a socket. So there is nothing to sweep, also after `kill -9` of anybody.

A member that both sends and takes goes without any of this for its own part, which it copies from one model to the
other. Memory of a device may turn out not to be shared after all (`ipc`): whoever cannot open it says so, and its
sender goes through the host's instead, for all who take from it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait

from torch import Tensor

from rallypoint.cluster.rendezvous import Rendezvous
from rallypoint.errors import WeightsMismatchError
from rallypoint.weights.buffers import Buffers, HostMemory
from rallypoint.weights.endpoints import Receiver, Runs, Sender, seal
from rallypoint.weights.manifest import HEADER_BYTES, Manifest
from rallypoint.weights.shared import Exposed
from rallypoint.weights.sockets import Listener, Peer, closing_descriptors, connect
from rallypoint.weights.transfer import TransferPlan, at_meeting

NUM_SLOTS = 4
"""Buckets that a member with a root has memory for."""
NUM_HEADERS = 3
"""The same, where that is of headers alone: so far the sender is ahead, whose checks leave rectangles in the cache."""


_LOG = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class Stay:
    """What takers read from where it is, of what one member sends."""

    runs: Mapping[int, Runs] = dataclasses.field(default_factory=dict[int, Runs])
    """Number of a bucket -> its rectangles."""
    addresses: Mapping[str, int] = dataclasses.field(default_factory=dict[str, int])
    """Name of a tensor -> where it was when takers were told of it."""

    @classmethod
    def of(cls, exposed: Exposed | None, manifest: Manifest, root: int) -> Stay:
        """Find the buckets of a root that are exposed as a whole."""
        if exposed is None:
            return cls()
        buckets = ((index, bucket) for index, bucket in enumerate(manifest.buckets) if bucket.root == root)
        found = {index: runs for index, bucket in buckets if (runs := exposed.runs(bucket)) is not None}
        return cls(found, exposed.addresses())

    def slots(self, manifest: Manifest, root: int) -> tuple[int, int]:
        """Return for how many buckets of the root there is memory, and how much for each."""
        num_buckets = sum(bucket.root == root for bucket in manifest.buckets)
        if len(self.runs) == num_buckets:
            return min(num_buckets, NUM_HEADERS), HEADER_BYTES
        return NUM_SLOTS, manifest.bucket_bytes


class Outlet:
    """What a member sends from: its memory, and those who take from it."""

    def __init__(self, slots: Sequence[Tensor], buffers: Buffers, takers: Sequence[Peer], stay: Stay) -> None:
        """Take over memory of a bucket each, and the connections to everybody who takes."""
        self._slots, self._takers, self.buffers, self.stay = slots, takers, buffers, stay
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
    """What a member takes from: the memory of another one."""

    def __init__(self, slots: Sequence[Tensor], buffers: Buffers, root: Peer, stay: Stay) -> None:
        """Take over memory and the connection to the member that fills it; see `Outlet`."""
        self._slots, self._root, self.buffers, self.stay = slots, root, buffers, stay
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


class SameNodeTransport:
    """See `Transport`."""

    def __init__(self, plan: TransferPlan, place: int, outlet: Outlet | None, inlets: dict[int, Inlet]) -> None:
        """See `join`, which makes them; `inlets` are by root, of others."""
        self._plan, self._outlet, self._inlets = plan, outlet, inlets
        self._root = plan.members[place].root

    def run(self, version: int, source: Sender | None, sink: Receiver | None, tick: Callable[[], None]) -> None:
        """See `Transport.run`; who both sends and takes has a thread for each."""
        with contextlib.ExitStack() as unless_done:
            unless_done.callback(self.close)
            if source is not None and sink is not None and self._outlet is not None:
                self._do_both(version, source, sink, tick)
            elif sink is not None:
                self._take(sink, source, tick)
            elif source is not None:
                self._send(version, source, tick)
            unless_done.pop_all()

    def close(self) -> None:
        """See `Transport.close`."""
        for inlet in self._inlets.values():
            inlet.close()
        if self._outlet is not None:
            self._outlet.close()

    def _do_both(self, version: int, source: Sender, sink: Receiver, tick: Callable[[], None]) -> None:
        with ThreadPoolExecutor(2, thread_name_prefix="publish") as threads, contextlib.ExitStack() as unless_done:
            unless_done.callback(self.close)  # which ends the other thread
            doing = threads.submit(self._send, version, source, tick), threads.submit(self._take, sink, source, tick)
            for done in wait(doing, return_when=FIRST_EXCEPTION).done:
                done.result()
            unless_done.pop_all()

    def _send(self, version: int, source: Sender, tick: Callable[[], None]) -> None:
        assert self._outlet is not None, "somebody else takes what a member sends"
        manifest, stay = self._plan.manifest, self._outlet.stay
        if stay.addresses and not source.lie_at(stay.addresses):
            raise WeightsMismatchError("weights were moved since those who take them were told where they are")
        for index, bucket in enumerate(manifest.buckets):
            if bucket.root == self._root:
                slot = self._outlet.free_slot()
                if index in stay.runs:
                    seal(slot, index, version, stay.runs[index])
                else:
                    source.pack(manifest, index, version, slot)
                self._outlet.buffers.settle()
                self._outlet.show()
                tick()
        self._outlet.settle()

    def _take(self, sink: Receiver, source: Sender | None, tick: Callable[[], None]) -> None:
        for index, bucket in enumerate(self._plan.manifest.buckets):
            if source is not None and bucket.root == self._root:
                sink.take(index, source)
            else:
                inlet = self._inlets[bucket.root]
                memory = inlet.buffers.near(inlet.next_slot()[: bucket.num_bytes])
                sink.unpack(index, memory, inlet.stay.runs.get(index))
                inlet.buffers.settle()
                inlet.taken()
            tick()


def join(
    rendezvous: Rendezvous,
    plan: TransferPlan,
    place: int,
    *,
    exposed: Exposed | None = None,
    buffers: Sequence[Buffers] = (HostMemory(),),
) -> SameNodeTransport:
    """See `Join`.

    Args:
        rendezvous: where to meet.
        plan: who takes part.
        place: of this member.
        exposed: what this member sends from where it is.
        buffers: kinds of memory, the best one first; all members have the same. What somebody cannot open is not used.
    """
    with contextlib.ExitStack() as unless_joined:
        roots, takers = _connected(rendezvous, plan, place, unless_joined)
        outlet, inlets = _Meeting(plan, place, roots, takers).agree(buffers, exposed)
        unless_joined.pop_all()
    return SameNodeTransport(plan, place, outlet, inlets)


def _connected(
    rendezvous: Rendezvous, plan: TransferPlan, place: int, until: contextlib.ExitStack
) -> tuple[dict[int, Peer], list[Peer]]:
    """Connect to all others that send, by root, if this member takes; and to all others that take, if it sends."""
    me, names = plan.members[place], [member.name for member in plan.members]
    with Listener() as listener:
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
            if me.taker is not None and member.root is not None and other != place:
                roots[member.root] = connect(addresses[other], names[other], place, plan.timeout_s)
                until.callback(roots[member.root].close)
        others = [other for other in plan.takers if other != place] if me.root is not None else []
        takers = listener.accept(names, others, plan.timeout_s)
        for taker in takers:
            until.callback(taker.close)
        return roots, takers


class _Meeting:
    """What members tell each other before the first bucket: where weights are, and through which memory they go.

    At every point everybody says what it has to say before it listens, so that no two wait for each other.
    """

    def __init__(self, plan: TransferPlan, place: int, roots: Mapping[int, Peer], takers: Sequence[Peer]) -> None:
        self._manifest, self._me, self._roots, self._takers = plan.manifest, plan.members[place], roots, takers

    def agree(self, kinds: Sequence[Buffers], exposed: Exposed | None) -> tuple[Outlet | None, dict[int, Inlet]]:
        """Return what this member sends through, and what it takes from; a sender has one kind for all who take."""
        for taker in self._takers:
            taker.give(*((b"", ()) if exposed is None else (exposed.told(self._manifest.shapes), [exposed.descriptor])))
        stays = {root: self._stay(root, peer) for root, peer in self._roots.items()}
        outlet: Outlet | None = None
        inlets: dict[int, Inlet] = {}
        for kind in kinds:
            is_last, is_open = kind is kinds[-1], self._takers and outlet is None
            offered = self._offer(kind, exposed, is_last) if is_open else ""
            waiting = [root for root in self._roots if root not in inlets]
            found = {root: self._open(kind, root, stays[root], is_last) for root in waiting}
            if not is_last:
                for root, one in found.items():
                    self._roots[root].give(one.encode() if isinstance(one, str) else b"", ())
                if is_open:
                    offered = self._decided(offered)
                found = {root: one for root, one in found.items() if not self._roots[root].given()[0]}
            outlet = offered if isinstance(offered, Outlet) else outlet
            inlets |= {root: one for root, one in found.items() if isinstance(one, Inlet)}
        return outlet, inlets

    def _stay(self, root: int, peer: Peer) -> Stay:
        told, descriptors = peer.given()
        with closing_descriptors(descriptors):
            exposed = Exposed.opened(told, self._manifest.shapes, descriptors[0]) if descriptors else None
        return Stay.of(exposed, self._manifest, root)

    def _offer(self, kind: Buffers, exposed: Exposed | None, is_last: bool) -> Outlet | str:
        """Make memory for some buckets, and give it to all who take; return why not, if there is another kind."""
        root = self._me.root
        assert root is not None, "nobody takes from who has nothing to send"
        stay = Stay.of(exposed, self._manifest, root)
        num, size = stay.slots(self._manifest, root)
        try:
            memory, handles = kind.make(num * size, len(self._takers))
        except (RuntimeError, OSError) as error:
            if is_last:
                raise
            for taker in self._takers:
                taker.give(b"", ())
            return _in_a_line(error)
        with closing_descriptors({descriptor for _, descriptors in handles for descriptor in descriptors}):
            for taker, handle in zip(self._takers, handles, strict=True):
                taker.give(*handle)
        return Outlet(memory.split(size), kind, self._takers, stay)

    def _open(self, kind: Buffers, root: int, stay: Stay, is_last: bool) -> Inlet | str:
        """Open what another one has made; return why that cannot be, if there is another kind."""
        num, size = stay.slots(self._manifest, root)
        told, descriptors = self._roots[root].given()
        with closing_descriptors(descriptors):
            if not told and not descriptors:
                return ""  # whoever could not make it knows why
            try:
                return Inlet(kind.open(num * size, (told, descriptors)).split(size), kind, self._roots[root], stay)
            except (RuntimeError, OSError) as error:
                if is_last:
                    raise
                return _in_a_line(error)

    def _decided(self, offered: Outlet | str) -> Outlet | str:
        """Hear who could open what was offered, and tell everybody whether it is used."""
        answers = {taker.name: taker.given()[0].decode() for taker in self._takers}
        reasons = [f"{name} cannot open it ({why})" for name, why in answers.items() if why]
        if isinstance(offered, str):
            reasons = [f"it cannot be shared ({offered})"]
        for taker in self._takers:
            taker.give(b"another" if reasons else b"", ())
        if not reasons:
            return offered
        _LOG.warning(
            "weights of %s go through the host's memory instead of the device's: %s", self._me.name, "; ".join(reasons)
        )
        return ""


def _in_a_line(error: Exception) -> str:
    """Return what an error says, without what torch adds to it."""
    return (str(error) or type(error).__name__).partition("\n")[0][:200]
