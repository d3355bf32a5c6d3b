"""The transports that carry weights between processes: what they have in common, and the choice by name.

All members of a transfer run the same publish at the same time. Each sends its own buckets, and receives all buckets if
it has a model to fill.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from rallypoint.cluster.rendezvous import Rendezvous
from rallypoint.parallel import Device
from rallypoint.weights import broadcast, same_node
from rallypoint.weights.buffers import DeviceMemory, HostMemory, TorchHandles
from rallypoint.weights.endpoints import Receiver, Sender
from rallypoint.weights.shared import Exposed
from rallypoint.weights.transfer import TransferPlan

BUCKET_BYTES = {"memory": 2 * 2**20, "ipc": 16 * 2**20, "broadcast": 4 * 2**20}
"""Size of a bucket. One that is copied twice by a processor stays in its cache in between."""


class Transport(Protocol):
    """One member's end of a transfer."""

    def run(self, version: int, source: Sender | None, sink: Receiver | None, tick: Callable[[], None]) -> None:
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


def join(
    way: str, rendezvous: Rendezvous, plan: TransferPlan, place: int, *, device: Device, exposed: Exposed | None = None
) -> Transport:
    """Meet the other members of a transfer.

    Args:
        way: "memory", "ipc" or "broadcast".
        rendezvous: where to meet.
        plan: the members and the manifest.
        place: index of this member.
        device: where the weights are.
        exposed: weights of this member that others read in place; only "memory" uses them.

    Raises:
        PublishError: some members did not come; they are named.
        PeerFailedError: another member went away.
    """
    if way == "memory":
        return same_node.join(rendezvous, plan, place, exposed=exposed)
    if way == "ipc":
        device_memory = DeviceMemory(torch.device(device, torch.accelerator.current_device_index()), TorchHandles())
        return same_node.join(rendezvous, plan, place, buffers=(device_memory, HostMemory()))
    return broadcast.join(rendezvous, plan, place, device)
