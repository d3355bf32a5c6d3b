"""The kinds of transport that carry weights from the actor to the rollout role, and what is known of each.

Owns: their names. Must not know: how any of them works (`weights`), and which one a run takes (`config.transport`).
Servers in an environment of their own import this, so it needs nothing.
"""

import dataclasses
from typing import Literal, TypeAlias

TransportName: TypeAlias = Literal["shared", "memory", "ipc", "broadcast", "folder"]
WantedTransport: TypeAlias = Literal["auto", "memory", "ipc", "broadcast", "folder"]
"""What a config may ask for; auto: what fits the placement."""
NUM_SLOTS = 4
"""Buckets that a sender has memory for, for receivers on its node."""


@dataclasses.dataclass(frozen=True, slots=True)
class TransportKind:
    """A kind of transport."""

    name: TransportName
    words: str
    """What it does, for a person."""
    bucket_mib: tuple[int, int] = (0, 0)
    """Size of a bucket where processors send, and where accelerators do, which like large messages; 0: none are sent.

    One that a processor copies twice stays in its cache in between.
    """
    within_node: bool = False
    """Whether it leads from process to process of one node only."""
    of_devices: bool = False
    """Whether it shares the memory of accelerators."""

    @property
    def is_streamed(self) -> bool:
        """Whether ranks of both roles meet, and one sends while the other one receives."""
        return self.bucket_mib[0] > 0


SHARED = TransportKind("shared", "rollouts are sampled from the actor's own")
MEMORY = TransportKind("memory", "shared by the processes of a node", (2, 2), within_node=True)
IPC = TransportKind(
    "ipc", "device memory, shared by the processes of a node", (16, 16), within_node=True, of_devices=True
)
BROADCAST = TransportKind("broadcast", "to all ranks at once, over the network", (4, 64))
FOLDER = TransportKind("folder", "safetensors in the run's folder")
TRANSPORT_KINDS = {kind.name: kind for kind in (SHARED, MEMORY, IPC, BROADCAST, FOLDER)}


def within_a_node(device: str) -> TransportKind:
    """Return what is best between processes of one node whose weights are on a device, as "cpu"."""
    return MEMORY if device == "cpu" else IPC
