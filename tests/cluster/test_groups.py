"""Worker groups, the same on Ray and inline."""

import os

import numpy as np
import pytest

from rallypoint.cluster import ResourcePool, Rule, WorkerContext, WorkerGroup, broadcast, dispatched, first_rank, shard
from rallypoint.cluster.dispatch import Part
from rallypoint.errors import WorkerError


class Worker:
    """Counts and echoes."""

    def __init__(self, context: WorkerContext, start: int) -> None:
        self.context, self.total = context, start
        context.shared[f"{context.role}/start"] = start

    @broadcast
    def add(self, number: int) -> int:
        self.total += number
        return self.total + self.context.rank

    @shard
    def echo(self, items: list[int], *, factor: int = 1) -> list[tuple[int, int]]:
        return [(self.context.rank, factor * item) for item in items]

    @shard
    def silent(self, items: list[int]) -> None:
        self.total += len(items)

    @first_rank
    def who(self) -> tuple[str, int, int]:
        return self.context.role, self.context.rank, self.context.num_ranks

    @first_rank
    def neighbours(self) -> list[str]:
        return sorted(self.context.shared)

    @first_rank
    def pid(self) -> int:
        return os.getpid()

    @broadcast
    def fail_on(self, rank: int) -> None:
        if self.context.rank == rank:
            raise ValueError(f"rank {rank} does not like this")

    @dispatched(
        Rule("mirror", lambda ranks, args, kwargs: [Part((args[0][-1 - r],), kwargs) for r in range(ranks)], list)
    )
    def mirrored(self, item: str) -> str:
        return f"{self.context.rank}{item}"

    @broadcast
    def size(self, array: np.ndarray) -> int:
        return int(array.nbytes)

    def undecorated(self) -> int:
        return 1


@pytest.fixture(scope="module")
def group(runtime, loop):
    async def make():
        hosts = await runtime.hosts(ResourcePool("main", (2,)))
        return await WorkerGroup.create("counter", Worker, hosts, 10)

    return loop.run_until_complete(make())


def test_broadcast_calls_all_and_returns_the_first_ranks_result(group, loop):
    assert loop.run_until_complete(group.call(Worker.add, 5)) == 15
    assert loop.run_until_complete(group.call(Worker.add, number=-5)) == 10


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        ([1, 2, 3, 4], [(0, 10), (0, 20), (1, 30), (1, 40)]),
        ([1, 2, 3], [(0, 10), (1, 20), (1, 30)]),
        ([1], [(1, 10)]),
        ([], []),
    ],
)
def test_shard_splits_unevenly_if_it_must_and_joins_in_order(group, loop, items, expected):
    assert loop.run_until_complete(group.call(Worker.echo, items, factor=10)) == expected
    assert loop.run_until_complete(group.call(Worker.echo, items=items, factor=10)) == expected


def test_what_is_passed_is_not_modified_and_nothing_comes_back_as_none(group, loop):
    items = [3, 1, 2]
    assert loop.run_until_complete(group.call(Worker.silent, items)) is None
    assert items == [3, 1, 2]


def test_first_rank_and_a_rule_of_ones_own(group, loop):
    assert loop.run_until_complete(group.call(Worker.who)) == ("counter", 0, 2)
    assert loop.run_until_complete(group.call(Worker.mirrored, "ab")) == ["0b", "1a"]


def test_roles_on_one_pool_share_their_processes(runtime, group, loop):
    async def second():
        hosts = await runtime.hosts(ResourcePool("main", (2,)))
        return await WorkerGroup.create("counter_two", Worker, hosts, 20)

    other = loop.run_until_complete(second())
    assert loop.run_until_complete(other.call(Worker.pid)) == loop.run_until_complete(group.call(Worker.pid))
    assert loop.run_until_complete(other.call(Worker.neighbours)) == ["counter/start", "counter_two/start"]


def test_an_exception_names_role_rank_pid_call_and_shows_the_workers_own_traceback(group, loop):
    with pytest.raises(WorkerError) as caught:
        loop.run_until_complete(group.call(Worker.fail_on, 1))
    error = caught.value
    assert (error.role, error.rank, error.call) == ("counter", 1, "fail_on")
    assert error.pid > 0
    assert "ValueError: rank 1 does not like this" in str(error)
    assert "in fail_on" in error.remote_traceback
    assert loop.run_until_complete(group.call(Worker.who))[0] == "counter", "the group lives on"


def test_a_constructor_that_raises_is_a_worker_error(runtime, loop):
    async def make():
        hosts = await runtime.hosts(ResourcePool("main", (2,)))
        await WorkerGroup.create("wrong", Worker, hosts, *["one", "too many"])

    with pytest.raises(WorkerError, match="takes 3 positional arguments"):
        loop.run_until_complete(make())


def test_a_method_without_a_rule_cannot_be_called_on_a_group(group, loop):
    with pytest.raises(TypeError, match="undecorated has no dispatch rule; decorate it"):
        loop.run_until_complete(group.call(Worker.undecorated))


def test_large_arrays_arrive_whole(group, loop):
    assert loop.run_until_complete(group.call(Worker.size, np.ones(3_000_000))) == 24_000_000
