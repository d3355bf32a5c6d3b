"""Memory for buckets that processes of one node share: of the host, or of an accelerator.

Owns: how such memory is made, and how another process opens it. Must not know: what is in it.

Handles of device memory are torch's, and have CUDA's rules. A process cannot open a handle that it made itself. A
handle is for one receiver, so each needs its own. It cannot be opened where one device does not reach the other's
memory, or where processes may not share memory (containers, slices of a device). Then host memory is used, and the log
says so.
"""

from __future__ import annotations

import ast
import mmap
import os
import secrets
import sys
import tempfile
from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from rallypoint.transport_kinds import TransportKind

Handle: TypeAlias = tuple[bytes, Sequence[int]]
"""What another process needs to open the memory: bytes, and open files."""


class HostMemory:
    """Memory of the host that processes can share; if they cannot, torch or the system raises."""

    def make(self, num_bytes: int, count: int) -> tuple[Tensor, list[Handle]]:
        """Return memory, and one handle of it for each of `count` processes."""
        if sys.platform == "linux":
            descriptor = os.memfd_create("rallypoint weights")
        else:
            with tempfile.TemporaryFile() as file:
                descriptor = os.dup(file.fileno())
        os.ftruncate(descriptor, num_bytes)
        handle = b"", [descriptor]
        return self.open(num_bytes, handle), [handle] * count

    def open(self, num_bytes: int, handle: Handle) -> Tensor:
        """Return the memory that another process made."""
        _, (descriptor,) = handle
        return torch.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=torch.uint8)

    def near(self, memory: Tensor) -> Tensor:
        """Return opened memory, or a copy of it where reading it twice takes longer than copying it."""
        return memory

    def settle(self) -> None:
        """Return once all copies of this thread are done, as those on a host are."""


_MARK_BYTES = 16
"""Random bytes at the beginning of memory, by which a process that opens it knows that it is the right one."""


class TorchHandles:
    """How memory of CUDA and ROCm is exported to other processes, and theirs is opened."""

    def export(self, memory: Tensor) -> bytes:
        """Return a handle for one other process.

        Raises:
            RuntimeError: this kind of memory has none.
        """
        # Without the number of the device, which differs where each process sees one device.
        return repr(memory.untyped_storage()._share_cuda_()[1:]).encode()

    def open(self, handle: bytes, device: torch.device) -> Tensor:
        """Return the memory of another process, as bytes that a device of this one reaches.

        Raises:
            RuntimeError: it cannot be reached.
        """
        storage = torch.UntypedStorage._new_shared_cuda(device.index, *ast.literal_eval(handle.decode()))
        return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


class DeviceMemory:
    """Memory of an accelerator; see `HostMemory`."""

    def __init__(self, device: torch.device, handles: TorchHandles) -> None:
        self._device, self._handles = device, handles
        self._near: Tensor | None = None

    def make(self, num_bytes: int, count: int) -> tuple[Tensor, list[Handle]]:
        """See `HostMemory.make`."""
        made = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        mark = secrets.token_bytes(_MARK_BYTES)
        made[:_MARK_BYTES].copy_(torch.frombuffer(bytearray(mark), dtype=torch.uint8))
        self.settle()
        return made, [(mark + self._handles.export(made), ()) for _ in range(count)]

    def open(self, num_bytes: int, handle: Handle) -> Tensor:
        """See `HostMemory.open`."""
        told, _ = handle
        opened = self._handles.open(told[_MARK_BYTES:], self._device)
        if opened.numel() < num_bytes or bytes(opened[:_MARK_BYTES].tolist()) != told[:_MARK_BYTES]:
            raise RuntimeError("what it opens is other memory")
        return opened[:num_bytes]

    def near(self, memory: Tensor) -> Tensor:
        """See `HostMemory.near`; the memory may be on another device."""
        if self._near is None or self._near.numel() < memory.numel():
            self._near = torch.empty_like(memory, device=self._device)
        return self._near[: memory.numel()].copy_(memory)

    def settle(self) -> None:
        """See `HostMemory.settle`."""
        torch.accelerator.current_stream(self._device).synchronize()


Buffers: TypeAlias = HostMemory | DeviceMemory
"""Memory that processes can share."""


def kinds_of_memory(kind: TransportKind, device: torch.device) -> tuple[Buffers, ...]:
    """Return the kinds of memory that a transport of one node can go through, the best one first.

    Args:
        kind: of the transport.
        device: of this process.
    """
    return (DeviceMemory(device, TorchHandles()), HostMemory()) if kind.of_devices else (HostMemory(),)
