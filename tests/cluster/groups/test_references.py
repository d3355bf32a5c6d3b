"""Results that go from group to group before they are there, and never through the driver."""

import asyncio
import gc
import os
import time
from pathlib import Path

import numpy as np
import pytest

from rallypoint.cluster import (
    DispatchRule,
    Layout,
    Mesh,
    ResourcePool,
    WorkerContext,
    WorkerGroup,
    broadcast,
    collect,
    dispatched,
    first_rank,
    scatter,
    shard,
)
from rallypoint.cluster.dispatch import rule_of
from rallypoint.errors import WorkerDiedError, WorkerError

MIB = 2**20

on_ray = pytest.mark.parametrize("runtime", ["ray"], indirect=True)


class Flat:
    """A batch of numbers in one buffer."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def split(self, num_parts: int) -> "list[Flat]":
        borders = [len(self) * part // num_parts for part in range(num_parts + 1)]
        return [Flat(self.values[borders[part] : borders[part + 1]]) for part in range(num_parts)]

    @classmethod
    def join(cls, parts: "list[Flat]") -> "Flat":
        return cls(np.concatenate([part.values for part in parts]))


def place_in_store(array: np.ndarray) -> int:
    """Where in Ray's shared memory an array lies: processes map it at different addresses."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, offset, *_ = line.split()
        start, stop = (int(end, 16) for end in span.split("-"))
        if start <= array.ctypes.data < stop and "plasma" in line:
            return int(offset, 16) + array.ctypes.data - start
    raise LookupError("the array is no view of the store")


class Worker:
    """Makes, changes and measures rows."""

    def __init__(self, context: WorkerContext) -> None:
        self.context, self.calls = context, []

    @shard
    def plus(self, rows: list[int], number: int) -> list[int]:
        self.calls.append("plus")
        return [row + number for row in rows]

    @shard
    def slowly(self, rows: list[int], seconds: float) -> list[int]:
        time.sleep(seconds)
        return rows

    @shard
    def pairs(self, left: list[int], right: list[int]) -> list[tuple[int, int]]:
        return list(zip(left, right, strict=True))

    @shard
    def named(self, rows: list[int]) -> dict[str, list[int]]:
        return {"rows": rows}

    @shard
    def keys(self, batch: dict[str, list[int]], rows: list[int]) -> list[str]:
        return sorted(batch)

    @collect
    def whole(self, rows: object, *, more: object = None) -> tuple[object, object]:
        return rows, more

    @collect
    def ranks(self) -> int:
        return self.context.rank

    @scatter
    def take(self, item: int) -> int:
        return 10 * item

    @broadcast
    def answer(self) -> list[int]:
        return [self.context.rank] * 4

    @shard
    def fails(self, rows: list[int], rank: int) -> list[int]:
        if self.context.rank == rank:
            raise ValueError(f"rank {rank} has nothing to give")
        return rows

    @shard
    def dies(self, rows: list[int]) -> list[int]:
        os._exit(1)

    @first_rank
    def log(self) -> list[str]:
        return self.calls

    @shard
    def scaled(self, batch: Flat) -> Flat:
        return Flat(batch.values * 2)

    @shard
    def total(self, batch: Flat) -> list[float]:
        return [float(batch.values.sum())]

    @collect
    def where(self, array: np.ndarray) -> int:
        return place_in_store(array)

    @dispatched(DispatchRule("shard, and hear all", rule_of(plus).split, list))
    def where_part(self, batch: Flat) -> int:
        return place_in_store(batch.values)


def made(runtime, run, role, size, mesh=None):
    async def make():
        processes = await runtime.processes(ResourcePool([size], name=role, num_cpus=0.1))
        return await WorkerGroup.create(Layout(role, processes, mesh), Worker)

    return run(make())


@pytest.fixture(scope="module")
def two(runtime, run):
    return made(runtime, run, "two", 2)


@pytest.fixture(scope="module")
def three(runtime, run):
    return made(runtime, run, "three", 3)


@pytest.fixture(scope="module")
def grid(runtime, run):
    return made(runtime, run, "grid", 4, Mesh({"dp": 2, "tp": 2}))


def test_a_result_that_is_not_there_yet_is_passed_on_to_groups_of_any_size(two, three, grid, run):
    rows = list(range(7))
    first = two.call(Worker.slowly, rows, 0.2)
    same = grid.call(Worker.plus, first.reference, 1)
    other = three.call(Worker.plus, rows=first.reference, number=2)
    back = two.call(Worker.plus, other.reference, number=10)
    assert run(back) == [row + 12 for row in rows]
    assert run(same) == [row + 1 for row in rows]
    assert run(first) == rows, "what was passed on can be awaited as well"
    assert run(first) == rows, "and twice"


def test_rows_that_stay_on_their_rank_meet_rows_that_are_sent(two, run):
    rows = list(range(5))
    left = two.call(Worker.plus, rows, 1)
    right = two.call(Worker.plus, left.reference, 1)
    assert run(two.call(Worker.pairs, rows, right.reference)) == [(row, row + 2) for row in rows]
    assert run(two.call(Worker.pairs, left.reference, right=right.reference)) == [(row + 1, row + 2) for row in rows]


def test_broadcast_and_collect_see_the_whole_and_scatter_its_items(two, three, run):
    sharded, every = two.call(Worker.plus, [1, 2, 3], 0), three.call(Worker.ranks)
    assert run(three.call(Worker.whole, sharded.reference, more=every.reference)) == [([1, 2, 3], [0, 1, 2])] * 3
    assert run(three.call(Worker.take, every.reference)) == [0, 10, 20]
    with pytest.raises(WorkerError, match="one item per rank: 2 ranks, found 3 items"):
        run(two.call(Worker.take, every.reference))
    assert run(three.call(Worker.plus, two.call(Worker.answer).reference, 0)) == [0, 0, 0, 0], "of the first rank"


def test_a_part_that_cannot_be_split_is_never_taken_for_the_whole(two, three, run):
    named = two.call(Worker.named, [1, 2])
    with pytest.raises(WorkerError, match="a dict that is passed on to a sharded call cannot be split: wait for it"):
        run(two.call(Worker.keys, named.reference, [1, 2]))
    assert run(two.call(Worker.keys, run(named), [1, 2])) == ["rows", "rows"]
    assert run(three.call(Worker.keys, named.reference, [1, 2, 3])) == ["rows"] * 3


@pytest.mark.parametrize("failing", [0, 1])
def test_the_error_of_who_failed_arrives_where_its_result_was_to_go(two, three, run, failing):
    bad = two.call(Worker.fails, [1, 2, 3], failing)
    chain = three.call(Worker.plus, two.call(Worker.plus, bad.reference, 1).reference, 1)
    with pytest.raises(WorkerError) as caught:
        run(chain)
    error = caught.value
    assert (error.role, error.rank, error.call) == ("two", failing, "fails")
    assert f"ValueError: rank {failing} has nothing to give" in str(error)
    with pytest.raises(WorkerError, match=rf"two rank {failing} .* failed in fails.*: ValueError"):
        run(bad)
    assert run(three.call(Worker.ranks)) == [0, 1, 2], "everybody lives on"


def test_calls_keep_their_order_even_if_an_argument_is_late(two, three, run):
    before = len(run(three.call(Worker.log)))
    late = three.call(Worker.plus, two.call(Worker.slowly, [1, 2], 0.3).reference, 1)
    log = three.call(Worker.log)
    run(late)
    assert len(run(log)) == before + 1, "the later call was executed later"


def test_a_result_is_waited_for_from_plain_code_and_beside_a_running_loop(two, run):
    call = two.call(Worker.slowly, [1, 2], 0.3)
    with pytest.raises(TimeoutError, match=r"two.slowly has no result after 0.05 s; it goes on"):
        call.result(timeout_s=0.05)
    assert call.result(timeout_s=60) == call.result() == [1, 2]

    async def beside():
        one, other = two.call(Worker.plus, [1], 1), two.call(Worker.plus, [1], 2)
        in_thread, awaited = await asyncio.gather(asyncio.to_thread(one.result), other)
        return in_thread, awaited, two.call(Worker.plus, [1], 3).result()

    assert run(beside()) == ([2], [3], [4])


def own_bytes():
    """Memory that this process holds for itself; what it maps of Ray's store is the node's."""
    gc.collect()
    rollup = Path("/proc/self/smaps_rollup").read_text().splitlines()
    anonymous = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    private = next(line for line in rollup if line.startswith("Private_Dirty"))
    return 1024 * max(int(anonymous.split()[1]), int(private.split()[1]))


@on_ray
def test_a_large_batch_passes_through_two_groups_and_not_through_the_driver(two, grid, run):
    run(grid.call(Worker.total, two.call(Worker.scaled, Flat(np.ones(8))).reference))
    batch = Flat(np.ones(256 * MIB // 8))
    before = own_bytes()
    result = grid.call(Worker.total, two.call(Worker.scaled, batch).reference)
    assert run(result) == [2.0 * len(batch) / 2] * 2
    assert own_bytes() - before <= 32 * MIB


@on_ray
def test_what_several_ranks_get_is_sent_once(grid, run):
    """All ranks of a call that is not split, and the peers of a part, look at the same memory."""
    array = np.ones(2 * MIB)
    assert len(set(run(grid.call(Worker.where, array)))) == 1
    first, its_peer, second, peer_of_second = run(grid.call(Worker.where_part, Flat(array)))
    assert first == its_peer != second == peer_of_second


@on_ray
def test_a_process_that_dies_is_named_and_not_the_one_that_waits_for_it(runtime, two, run):
    mortal = made(runtime, run, "mortal", 2)
    with pytest.raises(
        WorkerDiedError, match=r"mortal rank \d \(pid \d+, node .*\) died during work that two.plus waits"
    ):
        run(two.call(Worker.plus, mortal.call(Worker.dies, [1, 2]).reference, 1))
    assert run(two.call(Worker.ranks)) == [0, 1]
    run(mortal.shutdown())
