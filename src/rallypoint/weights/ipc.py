"""Weights between processes of one node that have accelerators: buckets in device memory that they share.

The same line as through the machine's memory (`memory`), with other buffers: a handle of the memory goes over the
socket, and each side waits for its copies before it says that they are done. Checksums are taken on the host, for which
a bucket is copied there.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from multiprocessing.reduction import ForkingPickler

import torch
import torch.multiprocessing  # which teaches the pickler handles of device memory
from torch import Tensor

from rallypoint.cluster.rendezvous import Rendezvous
from rallypoint.weights import memory
from rallypoint.weights.line import Plan


class DeviceMemory:
    """See `Buffers`."""

    def __init__(self, device: str) -> None:
        """Share memory of the current device of that type."""
        self._device = device

    def make(self, num_bytes: int) -> tuple[Tensor, bytes, Sequence[int]]:
        """See `Buffers.make`."""
        made = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        return made, bytes(ForkingPickler.dumps(made)), []

    def open(self, num_bytes: int, told: bytes, descriptors: Sequence[int]) -> Tensor:
        """See `Buffers.open`; what is told comes from a process of the same user and run."""
        del descriptors
        opened: Tensor = pickle.loads(told)
        assert opened.numel() == num_bytes, "both sides have the same manifest"
        return opened

    def settle(self) -> None:
        """See `Buffers.settle`."""
        torch.accelerator.synchronize()


def join(rendezvous: Rendezvous, plan: Plan, place: int, device: str) -> memory.MemoryLine:
    """See `Join`; buckets are on the device."""
    return memory.join(rendezvous, plan, place, DeviceMemory(device))
