"""Worker groups, the same on Ray and inline."""

import asyncio
import copy
import dataclasses
import os
from typing import Self

import numpy as np
import pytest

from rallypoint.cluster import (
    DispatchRule,
    Layout,
    Mesh,
    RankArguments,
    ResourcePool,
    WorkerContext,
    WorkerGroup,
    broadcast,
    collect,
    dispatched,
    first_rank,
    merge,
    scatter,
    shard,
)
from rallypoint.errors import WorkerError

PAIR = ResourcePool([2], name="pair", num_cpus=0.1)
GRID = ResourcePool([4], name="grid", num_cpus=0.1)


@dataclasses.dataclass(frozen=True)
class Rows:
    """The smallest carrier."""

    values: np.ndarray

    def __len__(self) -> int:
        return len(self.values)

    def split(self, num_parts: int) -> list[Self]:
        borders = [len(self) * part // num_parts for part in range(num_parts + 1)]
        return [type(self)(self.values[borders[part] : borders[part + 1]]) for part in range(num_parts)]

    @classmethod
    def join(cls, parts: list[Self]) -> Self:
        return cls(np.concatenate([part.values for part in parts]))


def backwards(mesh, args, kwargs):
    return [RankArguments((args[0][-1 - rank],), kwargs) for rank in range(mesh.size)]


class Worker:
    """Counts and echoes."""

    def __init__(self, context: WorkerContext, start: int = 0) -> None:
        self.context, self.total = context, start
        context.shared[f"{context.role}/start"] = start

    @broadcast
    def add(self, number: int) -> int:
        self.total += number
        return self.total + self.context.rank

    @collect
    def metrics(self, *, scale: float = 1.0) -> dict[str, float]:
        return {"rank": scale * self.context.rank, "total": self.total}

    @shard
    def echo(self, items: list[int], *, factor: int = 1) -> list[tuple[int, int]]:
        return [(self.context.rank, factor * item) for item in items]

    @shard
    def doubled(self, *, batch: Rows) -> Rows:
        return Rows(2 * batch.values)

    @shard
    def by_name(self, items: list[int]) -> dict[str, list[int]]:
        return {"items": items, "ranks": [self.context.rank]}

    @shard
    def silent(self, items: list[int]) -> None:
        self.total += len(items)

    @shard
    def mixed(self, items: list[int]) -> list[int] | None:
        return items if self.context.rank else None

    @shard
    def number(self, items: list[int]) -> int:
        return len(items)

    @scatter
    def take(self, item: str, suffix: str = "") -> str:
        return f"{self.context.rank}{item}{suffix}"

    @first_rank
    def who(self) -> tuple[str, int, int]:
        return self.context.role, self.context.rank, self.context.num_ranks

    @collect
    def seen(self) -> list[str]:
        return sorted(self.context.shared)

    @collect
    def place(self) -> tuple[int, dict[str, int]]:
        return os.getpid(), self.context.mesh.coordinates(self.context.rank)

    @dispatched(DispatchRule("backwards", backwards, list))
    def mirrored(self, item: str) -> str:
        return f"{self.context.rank}{item}"

    @dispatched(DispatchRule("nobody", lambda mesh, args, kwargs: [None] * mesh.size, list))
    def nobody(self) -> int:
        return 0

    @dispatched(DispatchRule("too few", lambda mesh, args, kwargs: [RankArguments((), {})], list))
    def too_few(self) -> int:
        return 0

    @broadcast
    def size(self, array: np.ndarray) -> int:
        return int(array.nbytes)

    def undecorated(self) -> int:
        return 1


class Rollout:
    """Another class, whose methods are named like those of `Worker`."""

    def __init__(self, context: WorkerContext) -> None:
        self.context = context

    @first_rank
    def who(self) -> str:
        return f"rollout {self.context.role}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.context.shared["closed"] = self.context.role


@pytest.fixture(scope="module")
def group(runtime, run):
    async def make():
        return await WorkerGroup.create(Layout("counter", await runtime.processes(PAIR)), Worker, 10)

    return run(make())


@pytest.fixture(scope="module")
def grid(runtime, run):
    async def make():
        layout = Layout("grid", await runtime.processes(GRID), Mesh({"dp": 2, "tp": 2}))
        return await WorkerGroup.create(layout, Worker, start=1)

    return run(make())


def test_broadcast_calls_all_and_returns_the_first_ranks_result(group, run):
    assert run(group.call(Worker.add, 5)) == 15
    assert run(group.call(Worker.add, number=-5)) == 10
    assert [metrics["total"] for metrics in run(group.call(Worker.metrics))] == [10, 10]


def test_one_rank_can_be_called_without_the_others(group, run):
    assert run(group.call_ranks([1], Worker.echo, [7, 8], factor=10)) == [(1, 70), (1, 80)]


def test_some_ranks_can_be_called_together_and_the_first_answers(grid, run):
    before = [run(grid.call_ranks([rank], Worker.add, 0)) for rank in range(4)]
    assert run(grid.call_ranks([2, 3], Worker.add, 5)) == before[2] + 5
    after = [run(grid.call_ranks([rank], Worker.add, 0)) for rank in range(4)]
    assert [new - old for new, old in zip(after, before, strict=True)] == [0, 0, 5, 5]
    run(grid.call_ranks([2, 3], Worker.add, -5))


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        ([1, 2, 3, 4], [(0, 10), (0, 20), (1, 30), (1, 40)]),
        ([1, 2, 3], [(0, 10), (1, 20), (1, 30)]),
        ([1], [(1, 10)]),
        ([], []),
    ],
)
def test_shard_splits_unevenly_if_it_must_and_joins_in_order(group, run, items, expected):
    assert run(group.call(Worker.echo, items, factor=10)) == expected
    assert run(group.call(Worker.echo, items=items, factor=10)) == expected
    assert run(group.call(Worker.doubled, batch=Rows(np.array(items, dtype=int)))).values.tolist() == [
        2 * item for item in items
    ]


def test_results_may_be_dicts_lists_none_and_metrics_of_every_rank(group, run):
    assert run(group.call(Worker.by_name, [1, 2, 3])) == {"items": [1, 2, 3], "ranks": [0, 1]}
    assert run(group.call(Worker.silent, [])) is None
    assert [metrics["rank"] for metrics in run(group.call(Worker.metrics, scale=0.5))] == [0.0, 0.5]


def test_results_that_have_no_whole_are_an_error_that_names_the_call(group, run):
    with pytest.raises(TypeError, match=r"counter.mixed: .* some are NoneType and others list"):
        run(group.call(Worker.mixed, [1, 2]))
    with pytest.raises(
        TypeError, match=r"counter.number: .* int has no `join`; return a list or a carrier, or use @col"
    ):
        group.call(Worker.number, [1, 2]).result()


def test_nothing_that_is_passed_is_modified(group, run):
    items, batch = [3, 1, 2], Rows(np.arange(3))
    before = copy.deepcopy((items, batch.values))
    run(group.call(Worker.silent, items))
    run(group.call(Worker.echo, items=items))
    run(group.call(Worker.doubled, batch=batch))
    run(group.call(Worker.add, 0))
    assert items == before[0]
    assert np.array_equal(batch.values, before[1])


def test_scatter_first_rank_and_a_rule_of_ones_own(group, grid, run):
    assert run(group.call(Worker.take, ["a", "b"], suffix="!")) == ["0a!", "1b!"]
    assert run(grid.call(Worker.take, "abcd", "!")) == ["0a!", "1b!", "2c!", "3d!"]
    assert run(group.call(Worker.who)) == ("counter", 0, 2)
    assert run(group.call(Worker.mirrored, "ab")) == ["0b", "1a"]


def test_a_call_that_fits_no_rank_is_refused_before_anything_is_sent(group):
    with pytest.raises(ValueError, match="one item per rank: 2 ranks, found 3 items"):
        group.call(Worker.take, ["a", "b", "c"])
    with pytest.raises(TypeError, match="at least one argument that can be split"):
        group.call(Worker.doubled, batch=np.arange(3))
    with pytest.raises(
        ValueError, match=r"counter.nobody: rule 'nobody' must make a part, or None, for each of 2 ranks"
    ):
        group.call(Worker.nobody)
    with pytest.raises(ValueError, match=r"rule 'too few' .* found \[RankArguments"):
        group.call(Worker.too_few)
    with pytest.raises(TypeError, match="undecorated has no dispatch rule; decorate it"):
        group.call(Worker.undecorated)


def test_a_mesh_gives_each_part_to_all_peers_and_takes_the_leaders_results_in_order(grid, run):
    assert [at for _, at in run(grid.call(Worker.place))] == [
        {"dp": 0, "tp": 0},
        {"dp": 0, "tp": 1},
        {"dp": 1, "tp": 0},
        {"dp": 1, "tp": 1},
    ]
    assert run(grid.call(Worker.echo, [1, 2, 3])) == [(0, 1), (2, 2), (2, 3)]
    before = [metrics["total"] for metrics in run(grid.call(Worker.metrics))]
    run(grid.call(Worker.silent, [1, 2, 3]))
    after = [metrics["total"] for metrics in run(grid.call(Worker.metrics))]
    assert [b - a for a, b in zip(before, after, strict=True)] == [1, 1, 2, 2], "peers saw what their leader saw"


def test_a_mesh_of_another_size_and_a_process_twice_are_refused(runtime, run):
    processes = run(runtime.processes(PAIR))
    with pytest.raises(ValueError, match="wrong: dp=2 x tp=2 makes 4 ranks, but there are 2"):
        Layout("wrong", processes, Mesh({"dp": 2, "tp": 2}))
    with pytest.raises(ValueError, match="wrong: a process cannot be two ranks of one role"):
        Layout("wrong", [processes[0], processes[0]])


def test_roles_on_one_pool_share_processes_and_leak_nothing_into_each_other(runtime, group, run):
    async def second():
        return await WorkerGroup.create(Layout("counter_rollout", await runtime.processes(PAIR)), Rollout)

    other = run(second())
    assert other.processes == group.processes
    assert run(group.call(Worker.who)) == ("counter", 0, 2)
    assert run(other.call(Rollout.who)) == "rollout counter_rollout"
    run(other.shutdown())
    assert run(group.call(Worker.seen)) == [["closed", "counter/start"]] * 2, "it was closed in every process"
    assert run(group.call(Worker.who)) == ("counter", 0, 2)
    with pytest.raises(WorkerError, match="there is no counter_rollout here any more: its group was shut down"):
        run(other.call(Rollout.who))


def test_a_second_group_of_the_same_role_in_the_same_processes_is_refused(runtime, group, run):
    with pytest.raises(ValueError, match="counter is in these processes already: shut that group down, or use another"):
        run(WorkerGroup.create(Layout("counter", group.processes[:1]), Worker))
    assert run(group.call(Worker.who)) == ("counter", 0, 2)


def test_a_constructor_that_raises_is_an_error_and_leaves_no_role_behind(runtime, group, run):
    for _ in range(2):
        with pytest.raises(WorkerError, match=r"wrong rank \d .*in __init__.* takes from 2 to 3 positional arguments"):
            run(WorkerGroup.create(Layout("wrong", group.processes), Worker, *[1, 2]))
    assert set(group.processes[0].roles) == {"counter"}
    assert run(group.call(Worker.who)) == ("counter", 0, 2)


def test_views_of_a_pool_are_groups_of_their_own_in_its_processes(runtime, grid, run):
    first, rest = GRID.split([1, 3])

    async def make():
        single = await WorkerGroup.create(Layout("single", await runtime.processes(first)), Worker)
        three = await WorkerGroup.create(Layout("three", await runtime.processes(rest)), Worker)
        both = await WorkerGroup.create(Layout("both", await runtime.processes(merge(PAIR, rest))), Worker)
        return single, three, both

    single, three, both = run(make())
    pids = [pid for pid, _ in run(grid.call(Worker.place))]
    assert [pid for pid, _ in run(single.call(Worker.place))] == pids[:1]
    assert [pid for pid, _ in run(three.call(Worker.place))] == pids[1:]
    assert [pid for pid, _ in run(both.call(Worker.place))][2:] == pids[1:]
    assert run(both.call(Worker.echo, list(range(5)))) == [(rank, rank) for rank in range(5)]
    for group in (single, three, both):
        run(group.shutdown())
        run(group.shutdown())
    assert run(grid.call(Worker.who)) == ("grid", 0, 4)


def test_a_process_that_ended_with_its_last_role_is_started_anew_when_the_pool_is_asked_for(runtime, run):
    pool = ResourcePool([2], name="again", num_cpus=0.1)
    first, second = pool.split([1, 1])

    async def scenario():
        stays = await WorkerGroup.create(Layout("stays", await runtime.processes(first)), Worker, 3)
        goes = await WorkerGroup.create(Layout("goes", await runtime.processes(second)), Worker)
        await goes.shutdown()
        again = await WorkerGroup.create(Layout("goes", await runtime.processes(second)), Worker, 4)
        totals = await asyncio.gather(stays.call(Worker.add, 0), again.call(Worker.add, 0))
        await asyncio.gather(stays.shutdown(), again.shutdown())
        whole = await WorkerGroup.create(Layout("whole", await runtime.processes(pool)), Worker, 5)
        shared = await whole.call(Worker.seen)
        await whole.shutdown()
        return totals, shared

    assert run(scenario()) == ([3, 4], [["whole/start"]] * 2)


def test_large_arrays_arrive_whole(group, run):
    assert run(group.call(Worker.size, np.ones(3_000_000))) == 24_000_000
