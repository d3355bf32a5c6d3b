"""The transports that carry weights from process to process, by name: what all of them are, and which there are."""

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
"""Size of a bucket: small enough to stay in a processor's cache where it is copied twice."""


class Transport(Protocol):
    """One process's end of it."""

    def run(self, version: int, source: Sender | None, sink: Receiver | None, tick: Callable[[], None]) -> None:
        """Send what is this member's own, and hand every bucket to the sink, if there is one.

        Args:
            version: of the weights.
            source: of a member with a root.
            sink: of a member that takes.
            tick: called at every bucket.

        Raises:
            PeerFailedError: another member went away.
            MembershipLostError: likewise, and the rendezvous knows who.
            PublishError: another member was silent for `timeout_s`.
        """

    def close(self) -> None:
        """Leave; whoever still waits for this member gets an error."""


def join(
    way: str, rendezvous: Rendezvous, plan: TransferPlan, place: int, *, device: Device, exposed: Exposed | None = None
) -> Transport:
    """Meet the other members of a line; this is the one at `place`.

    Args:
        way: "memory", "ipc" or "broadcast".
        rendezvous: where to meet.
        plan: who takes part.
        place: of this member.
        device: where the weights are.
        exposed: those that this member sends from where they are; other ways than "memory" copy them.

    Raises:
        PublishError: some did not come; they are named.
        PeerFailedError: another member went away.
    """
    if way == "memory":
        return same_node.join(rendezvous, plan, place, exposed=exposed)
    if way == "ipc":
        device_memory = DeviceMemory(torch.device(device, torch.accelerator.current_device_index()), TorchHandles())
        return same_node.join(rendezvous, plan, place, buffers=(device_memory, HostMemory()))
    return broadcast.join(rendezvous, plan, place, device)
