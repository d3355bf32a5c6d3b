"""Memory that processes of one node share, for buckets of weights: that of the machine. See `ipc` for that of devices.

Owns: how such memory is made, and opened by another process. Must not know: what is in it.
"""

from __future__ import annotations

import ast
import mmap
import os
import secrets
import sys
import tempfile
from collections.abc import Sequence
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

Handle: TypeAlias = tuple[bytes, Sequence[int]]
"""What another process opens memory by: some bytes, and open files."""


class Buffers(Protocol):
    """Memory that processes can share; errors of torch and of the system say that they cannot."""

    def make(self, num_bytes: int, count: int) -> tuple[Tensor, list[Handle]]:
        """Return memory, and a handle of it for each of so many processes."""
        ...

    def open(self, num_bytes: int, handle: Handle) -> Tensor:
        """Return the memory that another process made."""
        ...

    def near(self, memory: Tensor) -> Tensor:
        """Return opened memory, or a copy of it where to read it more than once takes longer."""
        ...

    def settle(self) -> None:
        """Return when everything that was copied by this thread is where it should be."""
        ...


class HostMemory:
    """Memory of the machine; see `Buffers`."""

    def make(self, num_bytes: int, count: int) -> tuple[Tensor, list[Handle]]:
        """See `Buffers.make`."""
        if sys.platform == "linux":
            descriptor = os.memfd_create("rallypoint weights")
        else:
            with tempfile.TemporaryFile() as file:
                descriptor = os.dup(file.fileno())
        os.ftruncate(descriptor, num_bytes)
        handle = b"", [descriptor]
        return self.open(num_bytes, handle), [handle] * count

    def open(self, num_bytes: int, handle: Handle) -> Tensor:
        """See `Buffers.open`."""
        _, (descriptor,) = handle
        return torch.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=torch.uint8)

    def near(self, memory: Tensor) -> Tensor:
        """See `Buffers.near`."""
        return memory

    def settle(self) -> None:
        """See `Buffers.settle`; a processor is done when it says so."""


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
