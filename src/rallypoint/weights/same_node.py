"""The transport between processes of one node: buckets in memory that they share.

Owns: that memory, and who may touch which bucket when. Must not know: what is in a bucket.

Each sender has memory for a few buckets and fills them in turn; receivers copy each bucket into their models and say
so, and once all have, it is filled again. Copies into and out of different buckets overlap, so that a publish takes
hardly longer than the slower of the two, and buckets stay in the processor's cache. Weights that lie in shared memory
themselves (`shared`) are copied only once: their sender fills in the headers, and receivers check and copy every
rectangle in place.

The memory has no name in the file system: its descriptor is passed over a socket, so that nothing is left behind, even
after `kill -9`. A member that both sends and receives copies its own part directly from one model to the other. If
device memory cannot be shared after all (`DeviceMemory`), its sender uses host memory for all of its receivers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from threading import Event

from torch import Tensor

from rallypoint.cluster.rendezvous import Rendezvous
from rallypoint.errors import PeerFailedError, WeightsMismatchError
from rallypoint.transport_kinds import NUM_SLOTS
from rallypoint.weights.buffers import Buffers, HostMemory
from rallypoint.weights.endpoints import Runs, Sender, Sink, seal
from rallypoint.weights.exposed import Exposed
from rallypoint.weights.manifest import HEADER_BYTES, Manifest
from rallypoint.weights.sockets import Listener, Peer, closing_descriptors, connect
from rallypoint.weights.transfer import TransferPlan, naming_absentees

NUM_HEADERS = 3
"""Headers that a sender has memory for where rectangles are read in place. With few of them it is only so far ahead of
receivers that the rectangles it has just summed are still in the cache."""

_LOG = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class InPlace:
    """What receivers read in place of one sender's weights."""

    runs: Mapping[int, Runs] = dataclasses.field(default_factory=dict[int, Runs])
    """Index of a bucket -> its rectangles."""
    addresses: Mapping[str, int] = dataclasses.field(default_factory=dict[str, int])
    """Name of a tensor -> its address when receivers were told of it."""

    @classmethod
    def of(cls, exposed: Exposed | None, manifest: Manifest, sender: int) -> InPlace:
        """Find the buckets of a sender all of whose rectangles are exposed."""
        if exposed is None:
            return cls()
        buckets = ((index, bucket) for index, bucket in enumerate(manifest.buckets) if bucket.sender == sender)
        found = {index: runs for index, bucket in buckets if (runs := exposed.runs(bucket)) is not None}
        return cls(found, exposed.addresses())

    def slots(self, manifest: Manifest, sender: int) -> tuple[int, int]:
        """Return the number of slots of a sender, and the bytes of each."""
        num_buckets = sum(bucket.sender == sender for bucket in manifest.buckets)
        if len(self.runs) == num_buckets:
            return min(num_buckets, NUM_HEADERS), HEADER_BYTES
        return NUM_SLOTS, manifest.bucket_bytes


class Outlet:
    """A sender's slots, and its connections to the receivers."""

    def __init__(self, slots: Sequence[Tensor], buffers: Buffers, receivers: Sequence[Peer], in_place: InPlace) -> None:
        self._slots, self._receivers, self.buffers, self.in_place = slots, receivers, buffers, in_place
        self._num_shown = 0

    def free_slot(self) -> Tensor:
        """Return the memory for the next bucket, once every receiver has taken what was in it."""
        self._wait(self._num_shown + 1 - len(self._slots))
        return self._slots[self._num_shown % len(self._slots)]

    def show(self) -> None:
        """Tell every receiver that the slot is filled."""
        self._num_shown += 1
        for receiver in self._receivers:
            receiver.tell()

    def settle(self) -> None:
        """Return once every receiver has taken everything."""
        self._wait(self._num_shown)

    def close(self) -> None:
        """Close the connections."""
        for receiver in self._receivers:
            receiver.close()

    def _wait(self, count: int) -> None:
        for receiver in self._receivers:
            receiver.hear(count)


class Inlet:
    """A receiver's view of the slots of one sender, and its connection to it."""

    def __init__(self, slots: Sequence[Tensor], buffers: Buffers, sender: Peer, in_place: InPlace) -> None:
        self._slots, self._sender, self.buffers, self.in_place = slots, sender, buffers, in_place
        self._num_taken = 0

    def next_slot(self) -> Tensor:
        """Return the memory of the next bucket, once it is filled."""
        self._sender.hear(self._num_taken + 1)
        return self._slots[self._num_taken % len(self._slots)]

    def taken(self) -> None:
        """Allow the slot to be filled again."""
        self._num_taken += 1
        self._sender.tell()

    def close(self) -> None:
        """Close the connection."""
        self._sender.close()


class SameNodeTransport:
    """See `Transport`."""

    def __init__(self, plan: TransferPlan, place: int, outlet: Outlet | None, inlets: dict[int, Inlet]) -> None:
        """See `join`, which makes them; `inlets` are by the rank of the other senders."""
        self._plan, self._outlet, self._inlets = plan, outlet, inlets
        self._rank = plan.members[place].sender

    def run(self, version: int, source: Sender | None, sink: Sink | None, tick: Callable[[], None]) -> None:
        """See `Transport.run`; a member that sends and receives has a thread for each."""
        with contextlib.ExitStack() as unless_done:
            unless_done.callback(self.close)
            if source is not None and sink is not None and self._outlet is not None:
                self._do_both(version, source, sink, tick)
            elif sink is not None:
                self._receive(sink, source, tick)
            elif source is not None:
                self._send(version, source, tick)
            unless_done.pop_all()

    def close(self) -> None:
        """See `Transport.close`."""
        for end in (*self._inlets.values(), *([self._outlet] if self._outlet else [])):
            end.close()

    def _do_both(self, version: int, source: Sender, sink: Sink, tick: Callable[[], None]) -> None:
        with ThreadPoolExecutor(2, thread_name_prefix="publish") as threads, contextlib.ExitStack() as unless_done:
            unless_done.callback(self.close)  # which ends the other thread
            doing = threads.submit(self._send, version, source, tick), threads.submit(self._receive, sink, source, tick)
            for done in wait(doing, return_when=FIRST_EXCEPTION).done:
                done.result()
            unless_done.pop_all()

    def _send(self, version: int, source: Sender, tick: Callable[[], None]) -> None:
        assert self._outlet is not None, "a member that sends has receivers"
        manifest, in_place = self._plan.manifest, self._outlet.in_place
        if in_place.addresses and not source.lie_at(in_place.addresses):
            raise WeightsMismatchError("weights were moved after receivers were told where they are")
        for index, bucket in enumerate(manifest.buckets):
            if bucket.sender == self._rank:
                slot = self._outlet.free_slot()
                if index in in_place.runs:
                    seal(slot, index, version, in_place.runs[index])
                else:
                    source.pack(manifest, index, version, slot)
                self._outlet.buffers.settle()
                self._outlet.show()
                tick()
        self._outlet.settle()

    def _receive(self, sink: Sink, source: Sender | None, tick: Callable[[], None]) -> None:
        for _ in self.received(sink, source):
            tick()

    def received(self, sink: Sink, source: Sender | None = None) -> Iterator[None]:
        """Hand every bucket to the sink, and yield after each, so that the caller can use it at once."""
        for index, bucket in enumerate(self._plan.manifest.buckets):
            if source is not None and bucket.sender == self._rank:
                sink.take(index, source)
            else:
                inlet = self._inlets[bucket.sender]
                memory = inlet.buffers.near(inlet.next_slot()[: bucket.num_bytes])
                sink.unpack(index, memory, inlet.in_place.runs.get(index))
                inlet.buffers.settle()
                inlet.taken()
            yield


def join(
    rendezvous: Rendezvous,
    plan: TransferPlan,
    place: int,
    *,
    exposed: Exposed | None = None,
    buffers: Sequence[Buffers] = (HostMemory(),),
) -> SameNodeTransport:
    """See `transports.join`.

    Args:
        rendezvous: where to meet.
        plan: the members and the manifest.
        place: index of this member.
        exposed: weights of this member that others read in place.
        buffers: kinds of memory, the best one first and the same in all members. One that a receiver cannot open is not
            used.
    """
    me, names = plan.members[place], [member.name for member in plan.members]
    with contextlib.ExitStack() as unless_joined:
        with Listener() as listener:
            addresses = meet_members(rendezvous, plan, place, listener.address)
            senders = _senders(plan, place, addresses, unless_joined) if place in plan.receivers else {}
            others = [other for other in plan.receivers if other != place] if me.sender is not None else []
            receivers = listener.accept(names, others, plan.timeout_s)
            for receiver in receivers:
                unless_joined.callback(receiver.close)
        outlet, inlets = _Handshake(plan, place, senders, receivers).agree(buffers, exposed)
        unless_joined.pop_all()
    return SameNodeTransport(plan, place, outlet, inlets)


def meet_members(
    rendezvous: Rendezvous, plan: TransferPlan, place: int, address: bytes = b"", given_up: Event | None = None
) -> list[bytes]:
    """Meet the other members, and return where each of them listens, by place.

    The rendezvous is left at once: from here on, the sockets tell who is there.

    Args:
        rendezvous: where to meet.
        plan: the members.
        place: index of this member, or of a process that cannot come itself: see `join_as_receiver`.
        address: where it listens; empty if it only receives.
        given_up: set by another thread to end the wait soon.

    Raises:
        PublishError: some members did not come; they are named.
    """
    size = len(plan.members)
    with (
        naming_absentees(plan),
        rendezvous.join(
            plan.name, rank=place, world_size=size, payload=address, timeout_s=plan.timeout_s, given_up=given_up
        ) as membership,
    ):
        return [member.payload for member in membership.members]


def join_as_receiver(
    plan: TransferPlan, place: int, addresses: Sequence[bytes], buffers: Sequence[Buffers]
) -> SameNodeTransport:
    """Join as a member that only receives, from a process without a rendezvous: another one has met the members for it.

    Args:
        plan: the members and the manifest.
        place: index of this member.
        addresses: where members listen, by place.
        buffers: see `join`.
    """
    with contextlib.ExitStack() as unless_joined:
        senders = _senders(plan, place, addresses, unless_joined)
        _, inlets = _Handshake(plan, place, senders, ()).agree(buffers, None)
        unless_joined.pop_all()
    return SameNodeTransport(plan, place, None, inlets)


def relay(plan: TransferPlan, listener: Listener, buffers: Sequence[Buffers], timeout_s: float) -> Outlet:
    """Join as the only sender, the first member; receivers, told where it listens, come within `timeout_s`.

    Raises:
        PublishError, PeerFailedError: some receivers did not come; they are named.
    """
    with contextlib.ExitStack() as unless_joined:
        names = [member.name for member in plan.members]
        receivers = listener.accept(names, plan.receivers, timeout_s, message_s=plan.timeout_s)
        for receiver in receivers:
            unless_joined.callback(receiver.close)
        outlet, _ = _Handshake(plan, 0, {}, receivers).agree(buffers, None)
        assert outlet is not None, "it has receivers"
        unless_joined.pop_all()
    return outlet


def leave_out(plan: TransferPlan, places: Sequence[int], addresses: Sequence[bytes]) -> None:
    """Tell senders that some receivers will not come, so that they do not wait: these connections end at once."""
    for place in places:
        with contextlib.ExitStack() as at_once, contextlib.suppress(PeerFailedError):
            _senders(plan, place, addresses, at_once)


def _senders(
    plan: TransferPlan, place: int, addresses: Sequence[bytes], until: contextlib.ExitStack
) -> dict[int, Peer]:
    """Connect to all other senders, by rank."""
    senders: dict[int, Peer] = {}
    for other, member in enumerate(plan.members):
        if member.sender is not None and other != place:
            senders[member.sender] = connect(addresses[other], member.name, place, plan.timeout_s)
            until.callback(senders[member.sender].close)
    return senders


class _Handshake:
    """What members tell each other before the first bucket: where weights lie, and which memory buckets go through.

    At every step a member says all it has to say before it listens, so that no two wait for each other.
    """

    def __init__(self, plan: TransferPlan, place: int, senders: Mapping[int, Peer], receivers: Sequence[Peer]) -> None:
        self._manifest, self._me, self._senders, self._receivers = (
            plan.manifest, plan.members[place], senders, receivers,
        )  # fmt: skip

    def agree(self, kinds: Sequence[Buffers], exposed: Exposed | None) -> tuple[Outlet | None, dict[int, Inlet]]:
        """Return this member's outlet, and its inlets by sender; a sender has one kind of memory for all receivers."""
        for receiver in self._receivers:
            receiver.give(
                *((b"", ()) if exposed is None else (exposed.told(self._manifest.shapes), [exposed.descriptor]))
            )
        in_place = {rank: self._in_place(rank, peer) for rank, peer in self._senders.items()}
        outlet: Outlet | None = None
        inlets: dict[int, Inlet] = {}
        for kind in kinds:
            is_last, is_open = kind is kinds[-1], self._receivers and outlet is None
            offered = self._offer(kind, exposed, is_last) if is_open else ""
            waiting = [rank for rank in self._senders if rank not in inlets]
            found = {rank: self._open(kind, rank, in_place[rank], is_last) for rank in waiting}
            if not is_last:
                for rank, one in found.items():
                    self._senders[rank].give(one.encode() if isinstance(one, str) else b"", ())
                if is_open:
                    offered = self._decided(offered)
                found = {rank: one for rank, one in found.items() if not self._senders[rank].given()[0]}
            outlet = offered if isinstance(offered, Outlet) else outlet
            inlets |= {rank: one for rank, one in found.items() if isinstance(one, Inlet)}
        return outlet, inlets

    def _in_place(self, rank: int, peer: Peer) -> InPlace:
        told, descriptors = peer.given()
        with closing_descriptors(descriptors):
            exposed = Exposed.opened(told, self._manifest.shapes, descriptors[0]) if descriptors else None
        return InPlace.of(exposed, self._manifest, rank)

    def _offer(self, kind: Buffers, exposed: Exposed | None, is_last: bool) -> Outlet | str:
        """Make memory for slots and give it to all receivers; if that fails and another kind is left, say why."""
        rank = self._me.sender
        assert rank is not None, "only members that send have receivers"
        in_place = InPlace.of(exposed, self._manifest, rank)
        num, size = in_place.slots(self._manifest, rank)
        try:
            memory, handles = kind.make(num * size, len(self._receivers))
        except (RuntimeError, OSError) as error:
            if is_last:
                raise
            for receiver in self._receivers:
                receiver.give(b"", ())
            return _in_a_line(error)
        with closing_descriptors({descriptor for _, descriptors in handles for descriptor in descriptors}):
            for receiver, handle in zip(self._receivers, handles, strict=True):
                receiver.give(*handle)
        return Outlet(memory.split(size), kind, self._receivers, in_place)

    def _open(self, kind: Buffers, rank: int, in_place: InPlace, is_last: bool) -> Inlet | str:
        """Open the memory that a sender has made; if that fails and another kind is left, say why."""
        num, size = in_place.slots(self._manifest, rank)
        told, descriptors = self._senders[rank].given()
        with closing_descriptors(descriptors):
            if not told and not descriptors:
                return ""  # the sender could not make it, and logs why
            try:
                slots = kind.open(num * size, (told, descriptors)).split(size)
                return Inlet(slots, kind, self._senders[rank], in_place)
            except (RuntimeError, OSError) as error:
                if is_last:
                    raise
                return _in_a_line(error)

    def _decided(self, offered: Outlet | str) -> Outlet | str:
        """Hear which receivers could open what was offered, and tell all of them whether it is used."""
        answers = {receiver.name: receiver.given()[0].decode() for receiver in self._receivers}
        reasons = [f"{name} cannot open it ({why})" for name, why in answers.items() if why]
        if isinstance(offered, str):
            reasons = [f"it cannot be shared ({offered})"]
        for receiver in self._receivers:
            receiver.give(b"another" if reasons else b"", ())
        if not reasons:
            return offered
        _LOG.warning(
            "weights of %s go through the host's memory instead of the device's: %s", self._me.name, "; ".join(reasons)
        )
        return ""


def _in_a_line(error: Exception) -> str:
    """Return the first line of an error, without what torch adds to it."""
    return (str(error) or type(error).__name__).partition("\n")[0][:200]
