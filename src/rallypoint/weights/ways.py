"""The ways that weights take between processes, by name."""

from __future__ import annotations

import torch

from rallypoint.cluster.rendezvous import Rendezvous
from rallypoint.parallel import Device
from rallypoint.weights import broadcast, ipc, memory
from rallypoint.weights.line import Line, Plan
from rallypoint.weights.shared import Exposed

BUCKET_BYTES = {"memory": 2 * 2**20, "ipc": 16 * 2**20, "broadcast": 4 * 2**20}
"""What a bucket can have: where it is copied twice, it stays in a processor's cache in between."""


def join(
    way: str, rendezvous: Rendezvous, plan: Plan, place: int, *, device: Device, exposed: Exposed | None = None
) -> Line:
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
        return memory.join(rendezvous, plan, place, exposed=exposed)
    if way == "ipc":
        return ipc.join(rendezvous, plan, place, torch.device(device, torch.accelerator.current_device_index()))
    return broadcast.join(rendezvous, plan, place, device)
