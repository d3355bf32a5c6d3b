"""Rows into micro-batches under a hard token cap: packed end to end, few and evenly loaded, or padded to one length."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from rallypoint.errors import RowTooLongError


def pack_rows(lengths: Sequence[int], max_tokens: int, costs: Sequence[float] | None = None) -> list[list[int]]:
    """Cut rows into micro-batches of at most `max_tokens` tokens each: first as few, then as even as possible.

    The costliest row goes first, onto the micro-batch with the least cost that has room. The number of micro-batches
    is the least that could do, or what first-fit needs; where even those overflow, first-fit's own are taken.

    Args:
        lengths: tokens of each row.
        max_tokens: the cap; never exceeded.
        costs: of each row, what micro-batches are balanced by; None balances tokens.

    Returns:
        Row numbers of each micro-batch, rising; every row occurs exactly once. No rows give no micro-batch.

    Raises:
        RowTooLongError: one row alone exceeds the cap.

    >>> pack_rows([5, 9, 4, 3, 6, 3], max_tokens=10)
    [[1], [4], [0, 5], [2, 3]]
    >>> pack_rows([4, 4, 4, 4], max_tokens=8)
    [[0, 2], [1, 3]]
    """
    if not lengths:
        return []
    _check_longest(lengths, max_tokens)
    costs = lengths if costs is None else costs
    order = sorted(range(len(lengths)), key=lambda row: (-costs[row], -lengths[row], row))
    # No packing has fewer: the tokens need the room, and of rows over half the cap no two share a micro-batch.
    least = max(1, -(-sum(lengths) // max_tokens), sum(2 * length > max_tokens for length in lengths))
    parts = _spread(order, lengths, costs, least, max_tokens)
    if parts is None:
        few = _first_fit(lengths, max_tokens)
        parts = _spread(order, lengths, costs, len(few), max_tokens) or few
    return [sorted(part) for part in parts if part]


def pack_groups(lengths: Sequence[int], groups: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Cut rows into micro-batches as `pack_rows` does, with the rows of a group together where the cap allows it.

    Args:
        lengths: tokens of each row.
        groups: of each row, any number.
        max_tokens: the cap; never exceeded.

    Returns:
        As `pack_rows`.

    Raises:
        RowTooLongError: one row alone exceeds the cap.

    >>> pack_groups([4, 4, 4, 4], groups=[1, 2, 2, 1], max_tokens=8)
    [[0, 3], [1, 2]]
    >>> pack_groups([4, 4, 4, 1], groups=[1, 1, 1, 2], max_tokens=8)
    [[0, 2], [1, 3]]
    """
    _check_longest(lengths, max_tokens)
    of_group: dict[int, list[int]] = {}
    for row, group in enumerate(groups):
        of_group.setdefault(group, []).append(row)
    together = [
        [rows[index] for index in part]
        for rows in of_group.values()
        for part in pack_rows([lengths[row] for row in rows], max_tokens)
    ]
    packed = pack_rows([sum(lengths[row] for row in rows) for rows in together], max_tokens)
    return [sorted(row for index in part for row in together[index]) for part in packed]


def pad_rows(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Cut rows into micro-batches of at most `max_tokens` tokens where each row takes as many as the longest beside it.

    Rows of similar length meet, so that little is padding: longest first, as many as the cap allows. Training packs;
    this is for the other side of the parity table, see `TrainingEngine`.

    Returns:
        Row numbers of each micro-batch, rising; every row occurs exactly once.

    Raises:
        RowTooLongError: one row alone exceeds the cap.

    >>> pad_rows([5, 9, 4, 3], max_tokens=10)
    [[1], [0, 2], [3]]
    """
    parts: list[list[int]] = []
    room = 0
    for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        if lengths[row] > max_tokens:
            raise RowTooLongError(row, lengths[row], max_tokens)
        if room == 0:
            parts.append([])
            room = max_tokens // max(1, lengths[row])
        parts[-1].append(row)
        room -= 1
    return [sorted(part) for part in parts]


def _check_longest(lengths: Sequence[int], max_tokens: int) -> None:
    longest = max(range(len(lengths)), key=lambda row: lengths[row], default=None)
    if longest is not None and lengths[longest] > max_tokens:
        raise RowTooLongError(longest, lengths[longest], max_tokens)


def _spread(
    order: Sequence[int], lengths: Sequence[int], costs: Sequence[float], num_parts: int, max_tokens: int
) -> list[list[int]] | None:
    """Put each row onto the cheapest part that has room; None when a row finds none."""
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    room = [max_tokens] * num_parts
    loads = [(0.0, part) for part in range(num_parts)]
    for row in order:
        passed: list[tuple[float, int]] = []
        while loads and lengths[row] > room[loads[0][1]]:
            passed.append(heapq.heappop(loads))
        if not loads:
            return None
        load, part = loads[0]
        heapq.heapreplace(loads, (load + costs[row], part))
        parts[part].append(row)
        room[part] -= lengths[row]
        for entry in passed:
            heapq.heappush(loads, entry)
    return parts


def _first_fit(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Put each row onto the first part that has room, or onto a new one: longest first or as given, what is fewer."""
    longest_first = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    packings: list[list[list[int]]] = []
    for rows in (longest_first, range(len(lengths))):
        parts: list[list[int]] = []
        room: list[int] = []
        for row in rows:
            part = next((part for part, free in enumerate(room) if lengths[row] <= free), len(parts))
            if part == len(parts):
                parts.append([])
                room.append(max_tokens)
            parts[part].append(row)
            room[part] -= lengths[row]
        packings.append(parts)
    return min(packings, key=len)
