"""Which sizes of a device mesh fit a model: arithmetic with its sizes, asked before anything starts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence


def misfit_of(num_ranks: int, sizes: Mapping[str, int]) -> str | None:
    """Return why some ranks cannot share a model, and how many could; None when they can.

    >>> misfit_of(3, {"attention heads": 18, "key/value heads": 8})
    '3 does not divide 8 key/value heads; choose 1 or 2'

    Args:
        num_ranks: that share it, along tp or sp.
        sizes: what is dealt out to them in equal parts -> how many of it there are.
    """
    left_over = [f"{size} {what}" for what, size in sizes.items() if size % num_ranks]
    if not left_over:
        return None
    common = math.gcd(*sizes.values())
    choices = [str(size) for size in range(1, common + 1) if common % size == 0]
    return f"{num_ranks} does not divide {_listed(left_over, 'and')}; choose {_listed(choices, 'or')}"


def _listed(items: Sequence[str], word: str) -> str:
    return f" {word} ".join([", ".join(items[:-1]), items[-1]] if len(items) > 1 else items)
