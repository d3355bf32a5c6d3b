"""The kernels that oneDNN compiles: one for each shape of a product in half precision.

Compiling a kernel takes longer than many products, and every kernel stays in memory while its cache has room. So passes
are padded to a few numbers of tokens, and the caches are bounded.
"""

from __future__ import annotations

import os

import torch

from rallypoint.cpu.forms import computes_in_pieces

_SIZES_PER_OCTAVE = 32
"""Sizes between one power of two and the next: filler is at most a thirty-third of the tokens."""
_QUANTUM = 8
"""Step between sizes of few tokens. Fewer than this are filled up to a power of two."""

_NUM_KERNELS = 128
"""Number of kernels that each cache keeps: more than a layer needs, forward and backward. The default is 1,024."""
KERNEL_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
"""oneDNN's own cache, and that of the library through which torch calls it, which every thread has for itself."""


def bound_kernel_caches() -> None:
    """Bound the caches of this process; to be called before its first product, when oneDNN reads the bounds."""
    for cache in KERNEL_CACHES:
        os.environ.setdefault(cache, str(_NUM_KERNELS))


def filled_up(num: int, dtype: torch.dtype, device: torch.device, *, at_most: int | None = None) -> int:
    """Return the number of tokens to compute where `num` are needed.

    >>> cpu = torch.device("cpu")
    >>> [filled_up(num, torch.bfloat16, cpu) for num in (0, 1, 3, 5, 100, 1_000, 1_025, 5_000)]
    [0, 1, 4, 8, 104, 1008, 1056, 5120]
    >>> filled_up(1_025, torch.bfloat16, cpu, at_most=1_040), filled_up(1_025, torch.float32, cpu)
    (1025, 1025)

    Args:
        num: tokens needed.
        dtype: of the factors.
        device: of the product.
        at_most: bound on the result; `num` itself is returned where filler would exceed it.
    """
    if not computes_in_pieces(device) or dtype.itemsize != 2:
        return num
    if num < _QUANTUM:
        size = 1 << (num - 1).bit_length() if num else 0
    else:
        quantum = max(_QUANTUM, (1 << num.bit_length() - 1) // _SIZES_PER_OCTAVE)
        size = -(-num // quantum) * quantum
    return num if at_most is not None and size > at_most else size
