"""Numbers of tokens for which matrix products have kernels.

On CPUs torch has products of half precision made by oneDNN, which compiles a kernel for each shape that it meets: that
takes longer than many a product, and every kernel stays in memory as long as there is room for so many. Packed rows
have another number of tokens every time. So that they meet few shapes, they are filled up to one of these numbers.
"""

from __future__ import annotations

import torch

from rallypoint.cpu.forms import computes_in_pieces

_SIZES_PER_OCTAVE = 32
"""From a power of two to the next, of many tokens: filler is at most a thirty-third, and half of that on average."""

_QUANTUM = 8
"""Of few tokens. Fewer than that are filled up to a power of two."""


def filled_up(num: int, dtype: torch.dtype, device: torch.device, *, at_most: int | None = None) -> int:
    """Return how many tokens a product should have that needs `num`.

    >>> cpu = torch.device("cpu")
    >>> [filled_up(num, torch.bfloat16, cpu) for num in (0, 1, 3, 5, 100, 1_000, 1_025, 5_000)]
    [0, 1, 4, 8, 104, 1008, 1056, 5120]
    >>> filled_up(1_025, torch.bfloat16, cpu, at_most=1_040), filled_up(1_025, torch.float32, cpu)
    (1025, 1025)

    Args:
        num: tokens that there are.
        dtype: of the factors.
        device: of the product.
        at_most: a bound; `num` itself is returned where filler would exceed it.
    """
    if not computes_in_pieces(device) or dtype.itemsize != 2:
        return num
    if num < _QUANTUM:
        size = 1 << (num - 1).bit_length() if num else 0
    else:
        quantum = max(_QUANTUM, (1 << num.bit_length() - 1) // _SIZES_PER_OCTAVE)
        size = -(-num // quantum) * quantum
    return num if at_most is not None and size > at_most else size
