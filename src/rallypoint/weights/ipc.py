"""Weights between processes of one node that have accelerators: buckets in device memory that they share.

The same line as through the machine's memory (`memory`), with other buffers: a handle of the memory goes over the
socket, and each side waits for its copies before it says that they are done.

What CUDA says of handles (and torch's own, of which this is a thin wrapper): no process can open one that it made
itself; each is counted for one process that opens it, so that there is one for every taker; and where a device cannot
reach the other's memory, or processes may not share any (containers, slices of a device), it cannot be opened at all.
Then the host's memory takes its place, and the log says so.
"""

from __future__ import annotations

import ast
import secrets
from typing import Protocol

import torch
from torch import Tensor

from rallypoint.cluster.rendezvous import Rendezvous
from rallypoint.weights import memory
from rallypoint.weights.buffers import Handle, HostMemory
from rallypoint.weights.line import Plan

_MARK_BYTES = 16
"""At the beginning of memory, by which who opens it knows that it is the one."""


class Handles(Protocol):
    """What makes memory of a device known to other processes, and opens theirs."""

    def export(self, memory: Tensor) -> bytes:
        """Return a handle of memory, for one process.

        Raises:
            RuntimeError: this kind of memory has none.
        """
        ...

    def open(self, handle: bytes, device: torch.device) -> Tensor:
        """Return memory of another process, as bytes that this process reaches from a device.

        Raises:
            RuntimeError: it cannot be reached.
        """
        ...


class TorchHandles:
    """Those of CUDA and of ROCm; see `Handles`."""

    def export(self, memory: Tensor) -> bytes:
        """See `Handles.export`; torch counts who opened it."""
        # The number of the device first, which is another one where processes see one device each.
        return repr(memory.untyped_storage()._share_cuda_()[1:]).encode()

    def open(self, handle: bytes, device: torch.device) -> Tensor:
        """See `Handles.open`."""
        storage = torch.UntypedStorage._new_shared_cuda(device.index, *ast.literal_eval(handle.decode()))
        return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


class DeviceMemory:
    """See `Buffers`."""

    def __init__(self, device: torch.device, handles: Handles) -> None:
        """Share memory of a device."""
        self._device, self._handles = device, handles
        self._near: Tensor | None = None

    def make(self, num_bytes: int, count: int) -> tuple[Tensor, list[Handle]]:
        """See `Buffers.make`."""
        made = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        mark = secrets.token_bytes(_MARK_BYTES)
        made[:_MARK_BYTES].copy_(torch.frombuffer(bytearray(mark), dtype=torch.uint8))
        self.settle()
        return made, [(mark + self._handles.export(made), ()) for _ in range(count)]

    def open(self, num_bytes: int, handle: Handle) -> Tensor:
        """See `Buffers.open`."""
        told, _ = handle
        opened = self._handles.open(told[_MARK_BYTES:], self._device)
        if opened.numel() < num_bytes or bytes(opened[:_MARK_BYTES].tolist()) != told[:_MARK_BYTES]:
            raise RuntimeError("what it opens is other memory")
        return opened[:num_bytes]

    def near(self, memory: Tensor) -> Tensor:
        """See `Buffers.near`; it may be another device's."""
        if self._near is None or self._near.numel() < memory.numel():
            self._near = torch.empty_like(memory, device=self._device)
        return self._near[: memory.numel()].copy_(memory)

    def settle(self) -> None:
        """See `Buffers.settle`."""
        torch.accelerator.current_stream(self._device).synchronize()


def join(
    rendezvous: Rendezvous, plan: Plan, place: int, device: torch.device, handles: Handles | None = None
) -> memory.MemoryLine:
    """See `Join`; buckets are on the device, or on the host where that cannot be shared."""
    kinds = DeviceMemory(device, handles or TorchHandles()), HostMemory()
    return memory.join(rendezvous, plan, place, buffers=kinds)
