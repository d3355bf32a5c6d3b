"""Which sizes of a device mesh fit a model: arithmetic with its sizes, asked before anything starts."""

from __future__ import annotations

import math
from collections.abc import Mapping


def tensor_parallel_misfit(tp: int, sizes: Mapping[str, int]) -> str | None:
    """Return why `tp` ranks cannot share a model, and how many could; None when they can.

    >>> tensor_parallel_misfit(3, {"attention heads": 18, "key/value heads": 8})
    '3 does not divide 8 key/value heads; choose 1 or 2'

    Args:
        tp: ranks that share it.
        sizes: what is dealt out to them in equal parts -> how many of it there are.
    """
    left_over = [f"{size} {what}" for what, size in sizes.items() if size % tp]
    if not left_over:
        return None
    common = math.gcd(*sizes.values())
    choices = [str(size) for size in range(1, common + 1) if common % size == 0]
    listed = f"{', '.join(choices[:-1])} or {choices[-1]}" if len(choices) > 1 else "1"
    return f"{tp} does not divide {' and '.join(left_over)}; choose {listed}"
