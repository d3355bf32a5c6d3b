"""Strips of rows for chains of operations on single numbers: so small that on a CPU their results stay in its cache.

Each operation of such a chain is bound by memory when it runs over all rows, and several times faster when the chain
runs over a strip before the next one begins. Elsewhere a strip is everything: there, many small kernels cost more.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from rallypoint.cpu.forms import computes_in_pieces

_STRIP_ELEMENTS = 2**18
"""Of one tensor; in float32 a chain of four has 4 MiB. Smaller strips lose more to the calls than caches give."""


def in_strips(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the same rows of some tensors until all rows are through.

    >>> import torch
    >>> [(a.tolist(), b.tolist()) for a, b in in_strips(torch.arange(2), torch.arange(2))]
    [([0, 1], [0, 1])]

    Args:
        tensors: with the same first dimension; the first of them is the widest.
    """
    first = tensors[0]
    num_rows = len(first)
    width = first.numel() // max(1, num_rows)
    num_strips = -(-num_rows * width // _STRIP_ELEMENTS) if computes_in_pieces(first.device) else 1
    # Of equal size: reductions of a single row, which could be left over, may add up in another order.
    step = max(1, -(-num_rows // max(1, num_strips)))
    for start in range(0, num_rows, step):
        rows = slice(start, start + step)
        yield tuple(tensor[rows] for tensor in tensors)
