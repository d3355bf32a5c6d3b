"""Rows dealt out: into micro-batches under a hard token cap, and to ranks in parts of equal cost.

Owns: the cost of a row and who gets which rows. Must not know: what a part is for, or what is in a row.
Invariant: pure functions of their arguments, so that any process computes the same partition.
"""

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


def pack_groups(
    lengths: Sequence[int], groups: Sequence[int], max_tokens: int, *, whole: bool = False
) -> list[list[int]]:
    """Cut rows into micro-batches as `pack_rows` does, with the rows of a group together where the cap allows it.

    Args:
        lengths: tokens of each row.
        groups: of each row, any number.
        max_tokens: the cap; never exceeded.
        whole: whether the rows of a group must be together.

    Returns:
        As `pack_rows`.

    Raises:
        RowTooLongError: one row alone exceeds the cap; with `whole`, one group.

    >>> pack_groups([4, 4, 4, 4], groups=[1, 2, 2, 1], max_tokens=8)
    [[0, 3], [1, 2]]
    >>> pack_groups([4, 4, 4, 1], groups=[1, 1, 1, 2], max_tokens=8)
    [[0, 2], [1, 3]]
    >>> pack_groups([4, 1, 1, 4], groups=[1, 1, 2, 2], max_tokens=8, whole=True)
    [[0, 1], [2, 3]]
    """
    _check_longest(lengths, max_tokens)
    of_group: dict[int, list[int]] = {}
    for row, group in enumerate(groups):
        of_group.setdefault(group, []).append(row)
    together = list(of_group.values())
    if whole:
        for rows in together:
            if (length := sum(lengths[row] for row in rows)) > max_tokens:
                raise RowTooLongError(rows[0], length, max_tokens)
    else:
        together = [
            [rows[index] for index in part]
            for rows in together
            for part in pack_rows([lengths[row] for row in rows], max_tokens)
        ]
    packed = pack_rows([sum(lengths[row] for row in rows) for rows in together], max_tokens)
    return [sorted(row for index in part for row in together[index]) for part in packed]


def pad_rows(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Cut rows into micro-batches of at most `max_tokens` tokens, each row padded to the longest one of its own.

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


def row_costs(lengths: Sequence[int], attention_cost: float) -> list[float]:
    """Return the work of each row, in units of one token's matrix products with weights.

    Every token passes through the weights, and every pair of tokens of a row through the attention.

    Args:
        lengths: tokens of each row.
        attention_cost: work of one pair of tokens in the same unit; 0 counts tokens only.

    >>> row_costs([10, 20], attention_cost=0.01)
    [11.0, 24.0]
    """
    return [length + attention_cost * length**2 for length in lengths]


def balance(costs: Sequence[float], num_parts: int) -> list[list[int]]:
    """Assign rows to parts so that the costliest part is as cheap as possible.

    The costliest row goes first, always to the part with the least so far; of equal rows and parts the first.
    Not the optimum, but within 1.5 % of equal parts for 1,024 lognormal lengths and 64 parts, in 0.6 ms;
    Karmarkar-Karp's differencing comes 0.2 to 0.6 % nearer, in 17 ms (`benchmarks/balance.py`).

    Args:
        costs: of each row, none negative.
        num_parts: at least 1.

    Returns:
        Row numbers of each part, rising; every row occurs exactly once, and a part may be empty.

    >>> balance([8, 1, 6, 3, 2, 4], num_parts=2)
    [[0, 1, 3], [2, 4, 5]]
    >>> balance([7], num_parts=2)
    [[0], []]
    """
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    loads = [(0.0, part) for part in range(num_parts)]
    for row in sorted(range(len(costs)), key=lambda row: (-costs[row], row)):
        load, part = loads[0]
        parts[part].append(row)
        heapq.heapreplace(loads, (load + costs[row], part))
    return [sorted(part) for part in parts]


def balance_groups(
    costs: Sequence[float],
    groups: Sequence[int],
    shared: Sequence[float],
    num_parts: int,
    *,
    whole: bool = False,
) -> list[list[int]]:
    """Assign rows as `balance` does, if rows of a group cost less together.

    Whole groups are assigned if the costliest part is then at most as costly; otherwise single rows, for example if
    there are fewer groups than parts.

    Args:
        costs: of each row by itself.
        groups: of each row, any number.
        shared: tokens that each row saves if another row of its group is in the micro-batch.
        num_parts: at least 1.
        whole: whether the rows of a group must be together.

    Returns:
        As `balance`.

    >>> balance_groups([5, 5, 5, 5], groups=[1, 2, 1, 2], shared=[2, 2, 2, 2], num_parts=2)
    [[0, 2], [1, 3]]
    >>> balance_groups([5, 5], groups=[1, 1], shared=[2, 2], num_parts=2)
    [[0], [1]]
    """
    of_group: dict[int, list[int]] = {}
    for row, group in enumerate(groups):
        of_group.setdefault(group, []).append(row)

    def together(rows: Sequence[int]) -> float:
        return cost_together(rows, costs, groups, shared)

    units = list(of_group.values())
    in_groups = [
        sorted(row for unit in part for row in units[unit])
        for part in balance([together(rows) for rows in units], num_parts)
    ]
    if whole:
        return in_groups
    return min((in_groups, balance(costs, num_parts)), key=lambda parts: max(together(rows) for rows in parts))


def cost_together(rows: Sequence[int], costs: Sequence[float], groups: Sequence[int], shared: Sequence[float]) -> float:
    """Return what some rows cost in one part; the other arguments are those of `balance_groups`.

    >>> cost_together([0, 1, 2], costs=[5, 5, 5], groups=[1, 2, 1], shared=[2, 2, 2])
    13.0
    """
    met: set[int] = set()
    total = 0.0
    for row in rows:
        total += costs[row] - (shared[row] if groups[row] in met else 0.0)
        met.add(groups[row])
    return total
