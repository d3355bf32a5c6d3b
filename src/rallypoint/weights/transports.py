"""The transports that carry weights between processes: what they have in common, and the choice by name.

All members of a transfer run the same publish at the same time. Each sends its own buckets, and receives all buckets if
it has a model to fill.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist

from rallypoint.cluster.rendezvous import Rendezvous
from rallypoint.parallel import Device, Group, meet
from rallypoint.transport_kinds import TransportKind
from rallypoint.weights import same_node
from rallypoint.weights.buffers import kinds_of_memory
from rallypoint.weights.endpoints import Sender, Sink
from rallypoint.weights.exposed import Exposed
from rallypoint.weights.transfer import TransferPlan, naming_absentees


class Transport(Protocol):
    """One member's end of a transfer."""

    def run(self, version: int, source: Sender | None, sink: Sink | None, tick: Callable[[], None]) -> None:
        """Publish one version: send this member's buckets, and hand every bucket to the sink.

        Args:
            version: of the weights.
            source: of a member that sends.
            sink: of a member that receives.
            tick: called after every bucket.

        Raises:
            PeerFailedError: another member went away.
            MembershipLostError: likewise, where the rendezvous knows which one.
            PublishError: another member was silent for `timeout_s`.
        """

    def close(self) -> None:
        """Leave; members that wait for this one get an error."""


class BroadcastTransport:
    """Across nodes: every bucket is broadcast by its sender, over gloo or the devices' own network.

    Two buckets are in flight: one travels while the next one is filled or the last one is copied out.
    """

    def __init__(self, plan: TransferPlan, place: int, group: Group) -> None:
        """See `join`, which makes them."""
        self._plan, self._rank, self._group = plan, plan.members[place].sender, group
        self._memory = [torch.empty(plan.manifest.bucket_bytes, dtype=torch.uint8, device=group.device) for _ in "ab"]

    def run(self, version: int, source: Sender | None, sink: Sink | None, tick: Callable[[], None]) -> None:
        """See `Transport.run`; an error ends the process group."""
        buckets = self._plan.manifest.buckets
        with contextlib.ExitStack() as unless_done, self._group.watched():
            unless_done.callback(self._group.abandon)
            in_flight: dist.Work | None = None
            for index in range(len(buckets) + 1):
                previous, in_flight = in_flight, None
                if index < len(buckets):
                    if source is not None and buckets[index].sender == self._rank:
                        source.pack(self._plan.manifest, index, version, self._memory[index % 2])
                    in_flight = self._broadcast(index)
                if previous is not None:
                    self._group.wait(previous)
                    if sink is not None and source is not None and buckets[index - 1].sender == self._rank:
                        sink.take(index - 1, source, self._memory[(index - 1) % 2])
                    elif sink is not None:
                        sink.unpack(index - 1, self._memory[(index - 1) % 2])
                    tick()
            unless_done.pop_all()

    def close(self) -> None:
        """See `Transport.close`."""
        self._group.close()

    def _broadcast(self, index: int) -> dist.Work:
        """Start the broadcast of a bucket, from either end."""
        bucket, options = self._plan.manifest.buckets[index], dist.BroadcastOptions()
        sender = self._plan.place_of_sender(bucket.sender)
        assert sender is not None, "the sender of a bucket is a member"
        options.rootRank = sender
        return self._group.torch_group.broadcast([self._memory[index % 2][: bucket.num_bytes]], options)


def join(
    kind: TransportKind,
    rendezvous: Rendezvous,
    plan: TransferPlan,
    place: int,
    *,
    device: Device,
    exposed: Exposed | None = None,
) -> Transport:
    """Meet the other members of a transfer.

    Args:
        kind: one whose members meet.
        rendezvous: where to meet.
        plan: the members and the manifest.
        place: index of this member.
        device: where the weights are.
        exposed: weights of this member that others read in place, where processors have both.

    Raises:
        PublishError: some members did not come; they are named.
        PeerFailedError: another member went away.
    """
    if kind.within_node:
        own = torch.device(device)
        if kind.of_devices:
            own = torch.device(device, torch.accelerator.current_device_index())
        return same_node.join(rendezvous, plan, place, exposed=exposed, buffers=kinds_of_memory(kind, own))
    return join_broadcast(rendezvous, plan, place, device)


def join_broadcast(
    rendezvous: Rendezvous, plan: TransferPlan, place: int, device: Device = "cpu"
) -> BroadcastTransport:
    """See `join`; buckets are on the device."""
    with naming_absentees(plan):
        group = meet(
            rendezvous, plan.name, rank=place, world_size=len(plan.members), timeout_s=plan.timeout_s, device=device
        )
    return BroadcastTransport(plan, place, group)
