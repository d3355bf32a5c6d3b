"""How evenly rows are dealt out to ranks and micro-batches, and how long that takes: the ways side by side.

    python benchmarks/balance.py

Lengths are lognormal (median 400 tokens, sigma 0.5 or 0.8, at most 16,384), a row costs L + L^2 / 24,576 (attention
as in a model of width 4,096), and numbers are means over ten seeds. Compared are the way that rows lie (consecutive),
longest first onto the least loaded (ours), the same with equally many rows for each rank, Karmarkar-Karp's largest
differencing, and Karmarkar-Karp with equally many rows, as other frameworks have it.
"""

from __future__ import annotations

import heapq
import itertools
import random
import statistics
import time
from collections.abc import Callable, Sequence

from rallypoint.data.packing import balance, pack_rows, row_costs

Costs = Sequence[float]
Parts = list[list[int]]
NUM_SEEDS = 10


def consecutive(costs: Costs, num_parts: int) -> Parts:
    """Rows as they lie, equally many for each part."""
    borders = [len(costs) * part // num_parts for part in range(num_parts + 1)]
    return [list(range(*border)) for border in itertools.pairwise(borders)]


def longest_first_even(costs: Costs, num_parts: int) -> Parts:
    """Longest first onto the least loaded part that does not have its number of rows yet."""
    numbers = [len(part) for part in consecutive(costs, num_parts)]
    parts: Parts = [[] for _ in range(num_parts)]
    loads = [(0.0, part) for part in range(num_parts) if numbers[part]]
    for row in sorted(range(len(costs)), key=lambda row: (-costs[row], row)):
        load, part = heapq.heappop(loads)
        parts[part].append(row)
        if len(parts[part]) < numbers[part]:
            heapq.heappush(loads, (load + costs[row], part))
    return parts


def karmarkar_karp(costs: Costs, num_parts: int) -> Parts:
    """Join the two partitions with the largest differences, heavy parts with light ones, until one is left."""
    return _differencing([[row] for row in range(len(costs))], costs, num_parts)


def karmarkar_karp_even(costs: Costs, num_parts: int) -> Parts:
    """Start from partitions of one row a part, of neighbours in length, so that all parts get equally many rows."""
    if len(costs) % num_parts:
        raise ValueError(f"{len(costs)} rows do not divide into {num_parts} parts")
    rising = sorted(range(len(costs)), key=lambda row: (costs[row], row))
    return _differencing([rising[at : at + num_parts] for at in range(0, len(rising), num_parts)], costs, num_parts)


def _differencing(starts: Parts, costs: Costs, num_parts: int) -> Parts:
    ticket = itertools.count()
    heap: list[tuple[float, int, list[tuple[float, list[int]]]]] = []

    def push(parts: list[tuple[float, list[int]]]) -> None:
        parts.sort(key=lambda part: -part[0])
        heapq.heappush(heap, (parts[-1][0] - parts[0][0], next(ticket), parts))

    for rows in starts:
        push([(costs[row], [row]) for row in rows] + [(0.0, [])] * (num_parts - len(rows)))
    while len(heap) > 1:
        (_, _, one), (_, _, other) = heapq.heappop(heap), heapq.heappop(heap)
        push([(x + y, rows + more) for (x, rows), (y, more) in zip(one, reversed(other), strict=True)])
    return [rows for _, rows in heap[0][2]]


WAYS: dict[str, Callable[[Costs, int], Parts]] = {
    "consecutive": consecutive,
    "longest first (ours)": balance,
    "longest first, even": longest_first_even,
    "Karmarkar-Karp": karmarkar_karp,
    "Karmarkar-Karp, even": karmarkar_karp_even,
}


def lengths_of(num_rows: int, sigma: float, seed: int) -> list[int]:
    """Return lognormal lengths in tokens."""
    generator = random.Random(seed)
    return [min(16_384, max(1, round(400 * generator.lognormvariate(0, sigma)))) for _ in range(num_rows)]


def unevenness(parts: Parts, costs: Costs) -> float:
    """Return the costliest part over the mean part."""
    loads = [sum(costs[row] for row in part) for part in parts]
    return max(loads) * len(loads) / sum(loads)


def compare_ranks(num_rows: int, num_parts: int, sigma: float) -> None:
    """Print one line for each way of dealing rows out to ranks."""
    for name, way in WAYS.items():
        found, took_ms = [], []
        for seed in range(NUM_SEEDS):
            costs = row_costs(lengths_of(num_rows, sigma, seed), 1 / 24_576)
            began = time.perf_counter()
            parts = way(costs, num_parts)
            took_ms.append(1e3 * (time.perf_counter() - began))
            found.append(unevenness(parts, costs))
        ratio, ms = statistics.mean(found), statistics.median(took_ms)
        print(f"{num_rows:5} rows  {num_parts:3} ranks  sigma {sigma}  {name:22} max/mean {ratio:.3f}  {ms:8.2f} ms")


def before(lengths: Sequence[int], cap: int) -> Parts:
    """Longest first onto the least loaded, and one micro-batch more whenever that overflows: what we had."""
    for num_parts in itertools.count(-(-sum(lengths) // cap)):
        parts = balance(lengths, num_parts)
        if all(sum(lengths[row] for row in part) <= cap for part in parts):
            return parts
    raise AssertionError("a micro-batch for every row is enough")


def compare_micro_batches(num_rows: int, cap: int, sigma: float) -> None:
    """Print how many micro-batches there are, the least that there can be, and how even they are."""
    for name, way in (("before", before), ("ours", pack_rows)):
        numbers, least, found = [], [], []
        for seed in range(NUM_SEEDS):
            lengths = [min(length, cap) for length in lengths_of(num_rows, sigma, seed)]
            parts = way(lengths, cap)
            numbers.append(len(parts))
            least.append(-(-sum(lengths) // cap))
            found.append(unevenness(parts, lengths))
        number, bound, ratio = (statistics.mean(measured) for measured in (numbers, least, found))
        print(
            f"{num_rows:5} rows  cap {cap:5}  sigma {sigma}  {name:8} {number:6.1f} parts of at least {bound:6.1f}"
            f"  max/mean {ratio:.3f}"
        )


def main() -> None:
    """Print both tables."""
    for num_rows, num_parts in ((1024, 64), (1024, 8), (128, 8), (128, 2)):
        for sigma in (0.5, 0.8):
            compare_ranks(num_rows, num_parts, sigma)
    for num_rows, cap in ((512, 4096), (128, 2048), (64, 2048)):
        for sigma in (0.5, 0.8):
            compare_micro_batches(num_rows, cap, sigma)


if __name__ == "__main__":
    main()
