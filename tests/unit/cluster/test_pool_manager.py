"""Which role is placed on which pool."""

import asyncio

import pytest

from rallypoint.cluster import InlineRuntime, ResourcePool, ResourcePoolManager, merge
from rallypoint.errors import NoPlaceError, PlacementError


def test_one_entry_of_the_mapping_moves_a_role(tmp_path):
    pools = {"main": [2], "side": [1, 1]}
    colocated = ResourcePoolManager(pools, {"actor": "main", "actor_rollout": "main"})
    split = ResourcePoolManager(pools, {"actor": "main", "actor_rollout": "side"})

    async def processes(manager):
        runtime = InlineRuntime(log_folder=tmp_path)
        await manager.open(runtime)
        found = [await manager.processes(runtime, role) for role in ("actor", "actor_rollout")]
        await runtime.shutdown()
        return found

    actor, rollout = asyncio.run(processes(colocated))
    assert actor == rollout, "the same processes"
    actor, rollout = asyncio.run(processes(split))
    assert (len(actor), len(rollout), set(actor) & set(rollout)) == (2, 2, set())


def test_pools_and_views_can_be_given_as_they_are():
    main = ResourcePool([2, 2], name="main", num_gpus=1)
    first, rest = main.split([1, 3])
    manager = ResourcePoolManager(
        {"first": first, "rest": rest, "all": merge(first, rest)}, {"reward": "first", "actor": "rest", "all": "all"}
    )
    assert [manager.pool(role).num_processes for role in ("reward", "actor", "all")] == [1, 3, 4]
    assert manager.pool("actor").sources == (main,)


def test_what_is_placed_nowhere_is_refused_by_name():
    with pytest.raises(PlacementError, match="critic is placed on pool 'sid', but the pools are main, side"):
        ResourcePoolManager({"main": [1], "side": [1]}, {"critic": "sid"})
    manager = ResourcePoolManager({"main": [1]}, {"actor": "main", "actor_rollout": "main"})
    with pytest.raises(PlacementError, match="act has no pool; the roles that have one are actor, actor_rollout"):
        manager.pool("act")


class Full:
    """A runtime in which nothing fits."""

    head = None

    def __init__(self):
        self.asked = []

    async def reserve(self, pools):
        self.asked += [pool.name for pool in pools]
        raise PlacementError("full")

    async def processes(self, pool):
        raise AssertionError("nothing is started")

    async def shutdown(self):
        pass


def test_all_pools_in_use_are_checked_together_before_any_is_started():
    runtime = Full()
    manager = ResourcePoolManager({"main": [1], "side": [1], "spare": [1]}, {"actor": "main", "rollout": "side"})
    with pytest.raises(PlacementError, match="full"):
        asyncio.run(manager.open(runtime))
    assert runtime.asked == ["main", "side"]


def test_a_pool_of_which_several_views_are_in_use_is_asked_for_once():
    runtime = Full()
    first, rest = ResourcePool([3], name="main").split([1, 2])
    manager = ResourcePoolManager({"first": first, "rest": rest}, {"actor": "first", "rollout": "rest"})
    with pytest.raises(PlacementError, match="full"):
        asyncio.run(manager.open(runtime))
    assert runtime.asked == ["main"]


def test_pools_start_at_the_same_time_and_what_has_no_role_yet_ends_if_one_has_no_place(tmp_path):
    class Full(InlineRuntime):
        """Has no place for the pool `side`."""

        async def processes(self, pool):
            if pool.name == "side":
                raise NoPlaceError("none")
            return await super().processes(pool)

    async def started():
        manager = ResourcePoolManager({"main": [2], "side": [1]}, {"actor": "main", "rollout": "side"})
        runtime = Full(log_folder=tmp_path)
        with pytest.raises(NoPlaceError):
            await manager.start(runtime)
        ended = runtime._all()
        again = await manager.processes(runtime, "actor")
        await runtime.shutdown()
        return ended, again

    ended, again = asyncio.run(started())
    assert ended == []
    assert len(again) == 2
