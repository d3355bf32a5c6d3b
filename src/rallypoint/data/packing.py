"""Rows into micro-batches under a hard token cap, evenly loaded."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from rallypoint.errors import RowTooLongError


def pack_rows(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Cut rows into micro-batches of at most `max_tokens` tokens each, as few and as even as possible.

    The longest row goes first, always onto the least loaded micro-batch; when that overflows, the same
    is tried with one micro-batch more. Within a micro-batch the rows keep their order.

    Args:
        lengths: tokens of each row.
        max_tokens: the cap; never exceeded.

    Returns:
        Row indices of each micro-batch; every row occurs exactly once. No rows give no micro-batch.

    Raises:
        RowTooLongError: one row alone exceeds the cap.

    >>> pack_rows([5, 9, 4, 3, 6, 3], max_tokens=10)
    [[1], [4], [0, 5], [2, 3]]
    >>> pack_rows([4, 4, 4, 4], max_tokens=8)
    [[0, 2], [1, 3]]
    """
    if not lengths:
        return []
    longest = max(range(len(lengths)), key=lambda row: lengths[row])
    if lengths[longest] > max_tokens:
        raise RowTooLongError(longest, lengths[longest], max_tokens)
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    num_parts = -(-sum(lengths) // max_tokens) or 1
    while True:
        parts = _spread(order, lengths, num_parts, max_tokens)
        if parts is not None:
            return [sorted(part) for part in parts if part]
        num_parts += 1


def _spread(order: Sequence[int], lengths: Sequence[int], num_parts: int, max_tokens: int) -> list[list[int]] | None:
    """Put each row onto the least loaded part; None when a part would overflow."""
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    loads = [(0, part) for part in range(num_parts)]
    for row in order:
        load, part = heapq.heappop(loads)
        if load + lengths[row] > max_tokens:
            return None
        parts[part].append(row)
        heapq.heappush(loads, (load + lengths[row], part))
    return parts
