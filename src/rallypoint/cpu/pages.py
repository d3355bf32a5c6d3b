"""Pages of memory: what glibc's heaps keep of freed tensors, and large pages for large buffers."""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap

import torch
from torch import Tensor

_LARGE_BYTES = 2**27
"""Size from which a buffer lies in large pages (2 MiB each on most systems)."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Constants of glibc's malloc.h."""
_MAX_MMAP_THRESHOLD = 32 * 2**20
"""Size from which tensors have pages of their own; a heap keeps twice as much free memory at its end. glibc arrives at
these numbers by itself after the first tensor of that size, but stops adapting them once it is told any."""
_TRIMMING_BYTES = 100 * 2**10
"""Size of a piece whose release makes glibc look at the end of its heap: at least 64 KiB."""


def give_back(device: torch.device) -> None:
    """Give freed memory that the C library holds back to the system, for the next role's turn.

    On accelerators this does nothing: torch's allocator serves all roles of a process.
    """
    if device.type == "cpu":
        with contextlib.suppress(OSError, AttributeError):  # another C library than glibc
            _trim_heaps(ctypes.CDLL(None))


def _trim_heaps(library: ctypes.CDLL) -> None:
    """Have glibc return free pages of all heaps, and the end of the heap of this thread.

    `malloc_trim` leaves the end of a thread's heap alone, up to twice the largest tensor that was ever freed. It is
    returned when a larger piece is freed while the threshold is low.
    """
    library.mallopt(_M_MMAP_THRESHOLD, _MAX_MMAP_THRESHOLD)
    library.mallopt(_M_TRIM_THRESHOLD, 0)
    library.malloc.restype, library.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    library.free(library.malloc(_TRIMMING_BYTES))
    library.malloc_trim(0)
    library.mallopt(_M_TRIM_THRESHOLD, 2 * _MAX_MMAP_THRESHOLD)


def reserve(*shape: int, like: Tensor) -> Tensor:
    """Return an uninitialized tensor; on a CPU its pages take no memory until they are written to.

    A large tensor uses large pages where the system has them: blocks of a row are far from each other, and each page
    costs an address lookup. A small one does not, because a large page takes all of its memory at the first write.

    Args:
        shape: of the tensor.
        like: a tensor of its type, on its device.

    Raises:
        OSError: the system refuses the memory; torch's own errors on accelerators.
    """
    if like.device.type != "cpu":
        return like.new_empty(shape)
    num_bytes = math.prod(shape) * like.itemsize
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if num_bytes >= _LARGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without large pages
            pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=like.dtype).view(shape)
