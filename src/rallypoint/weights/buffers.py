"""Memory that processes of one node share, for buckets of weights: that of the machine. See `ipc` for that of devices.

Owns: how such memory is made, and opened by another process. Must not know: what is in it.
"""

from __future__ import annotations

import mmap
import os
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
