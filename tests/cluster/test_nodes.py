"""Pools on several nodes, simulated on this machine."""

import asyncio
import contextlib
import os
import re
import signal
import time
from pathlib import Path

import pytest
from ray_forks import forked_workers

from rallypoint.cluster import Layout, ResourcePool, ResourcePoolManager, WorkerContext, WorkerGroup, collect, merge
from rallypoint.cluster.ray_cluster import RayCluster, asking_for_forks
from rallypoint.cluster.ray_daemons import only_needed
from rallypoint.cluster.ray_runtime import RayRuntime, ray
from rallypoint.errors import PlacementError, WorkerHungError

# isort: split
from ray._private.node import Node
from ray.cluster_utils import Cluster

STORE = {"object_store_memory": 100 * 2**20, "include_dashboard": False}


VARIABLES = {"NCCL_OF_THE_TEST": "from the driver", "CLOUD_PASSWORD_OF_THE_TEST": "nobody's business"}


class Joined(RayCluster):
    """The simulated cluster, as one that somebody else started."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(address=str(cluster.address), namespace="nodes", own=None, silence_s=10, say=print)


class Worker:
    """Says where it is."""

    def __init__(self, context: WorkerContext) -> None:
        self.context = context

    @collect
    def node(self) -> str:
        return ray.get_runtime_context().get_node_id()

    @collect
    def variables(self) -> list[str | None]:
        return [os.environ.get(name) for name in VARIABLES]

    @collect
    def pid(self) -> int:
        return os.getpid()

    @collect
    def freeze(self) -> None:
        if self.context.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        self.wait_for_peers()

    def wait_for_peers(self) -> None:
        time.sleep(60)


class Nodes:
    """A node of two CPUs and one of one, and a runtime on both that waits briefly and speaks often."""

    def __init__(self, folder: Path) -> None:
        with forked_workers(), asking_for_forks(True), only_needed(Node):
            self.cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "num_gpus": 2, **STORE})
            self.small = self.cluster.add_node(num_cpus=1, labels={"zone": "b"}, **STORE)
        ray.init(address=self.cluster.address, namespace="nodes", log_to_driver=False)
        self.said: list[str] = []
        os.environ.update(VARIABLES)  # the nodes are there already, without them
        self.runtime = RayRuntime(
            Joined(self.cluster),
            log_folder=folder,
            placement_timeout_s=120,
            silence_s=10,
            preload=(),
            say=self.said.append,
            voice_every_s=0.5,
        )
        for name in VARIABLES:
            del os.environ[name]

    @property
    def names(self) -> dict[str, str]:
        """Node id -> "large" with two CPUs, "small" with one, or "late"."""
        kinds = {2.0: "large", 1.0: "small"}
        return {node["NodeID"]: kinds.get(node["Resources"].get("CPU"), "late") for node in ray.nodes()}

    def open_groups(self) -> list[str]:
        """Placement groups that are there or wanted."""
        table = ray.util.placement_group_table()
        return [group["state"] for group in table.values() if group["state"] != "REMOVED"]

    async def group(self, role, pool):
        return await WorkerGroup.create(Layout(role, await self.runtime.processes(pool)), Worker)

    async def places(self, group):
        return [self.names[node] for node in await group.call(Worker.node)]

    def close(self) -> None:
        self.cluster.shutdown()


@pytest.fixture(scope="module")
def nodes(tmp_path_factory, run):
    nodes = Nodes(tmp_path_factory.mktemp("logs"))
    yield nodes
    run(nodes.runtime.shutdown())
    nodes.close()


@contextlib.asynccontextmanager
async def on(nodes, role, pool):
    group = await nodes.group(role, pool)
    yield group
    await group.shutdown()


@pytest.mark.parametrize(
    ("counts", "expected"), [([2, 1], ["large", "large", "small"]), ([1, 2], ["small", "large", "large"])]
)
def test_uneven_nodes_get_what_fits_them_in_the_order_of_the_spec(nodes, run, counts, expected):
    """Each fills the cluster, so the second finds the place that the first one gave back."""
    pool = ResourcePool(counts, name="main")

    async def scenario():
        first, second = await asyncio.gather(nodes.runtime.processes(pool), nodes.runtime.processes(pool))
        assert list(first) == list(second), "two who ask at the same time get the same processes"
        async with on(nodes, "actor", pool) as group:
            return await nodes.places(group)

    assert run(scenario()) == expected
    assert nodes.open_groups() == []


def test_a_label_chooses_the_node(nodes, run):
    async def scenario():
        async with on(nodes, "reward", ResourcePool([2], num_cpus=0.1, labels={"zone": "b"})) as group:
            return await nodes.places(group)

    assert run(scenario()) == ["small", "small"]


def test_what_configures_libraries_goes_from_the_driver_to_its_workers_and_nothing_else(nodes, run):
    async def scenario():
        async with on(nodes, "actor", ResourcePool([1, 1], num_cpus=0.1)) as group:
            return await group.call(Worker.variables)

    assert run(scenario()) == [["from the driver", None]] * 2


def test_processes_share_devices_and_their_ranks_follow_the_device_numbers(nodes, run):
    async def scenario():
        async with on(nodes, "rollout", ResourcePool([4], num_cpus=0.1, num_gpus=0.5)) as group:
            return [process.info.devices for process in group.processes]

    assert run(scenario()) == [("0",), ("0",), ("1",), ("1",)]


def test_a_merged_pool_keeps_the_processes_of_a_node_together(nodes, run):
    both = ResourcePool([1, 1], name="both", num_cpus=0.4)
    large = ResourcePool([1], name="large", num_cpus=0.4, num_gpus=0.1)
    manager = ResourcePoolManager({"both": both, "all": merge(both, large)}, {"actor": "both", "critic": "all"})

    async def scenario():
        await manager.open(nodes.runtime)
        actor = await nodes.group("actor", manager.pool("actor"))
        critic = await nodes.group("critic", manager.pool("critic"))
        places = await nodes.places(actor), await nodes.places(critic)
        shared = set(actor.processes) & set(critic.processes)
        await actor.shutdown()
        still = await nodes.places(critic)
        await critic.shutdown()
        return places, shared == set(actor.processes), still

    (two, three), is_shared, still = run(scenario())
    assert sorted(two) == ["large", "small"]
    assert three == still
    assert sorted(three) == ["large", "large", "small"]
    assert three != ["large", "small", "large"]
    assert is_shared
    assert nodes.open_groups() == []


@pytest.mark.parametrize(
    ("pool", "row"),
    [
        (ResourcePool([3], name="odd"), r"1 \(127.0.0.1\) +3 CPU +2 CPU +too little"),
        (ResourcePool([1, 2], name="odd", num_cpus=1.5), r"1 \(127.0.0.1\) +3 CPU +2 CPU +too little"),
        (ResourcePool([1], name="odd", memory_gib=5000), r"1 CPU, 5000 GiB memory +\d CPU, .* GiB memory +too little"),
        (ResourcePool([3], name="odd", num_cpus=0, num_gpus=1), r"3 GPU +2 GPU +too little"),
    ],
)
def test_what_can_never_fit_is_said_at_once_with_a_table_and_nothing_is_asked_for(nodes, run, pool, row):
    with pytest.raises(PlacementError, match=rf"pool 'odd' cannot fit on this cluster:\n(.*\n)*.*{row}"):
        run(nodes.runtime.processes(pool))
    assert nodes.open_groups() == []


def test_what_does_not_fit_now_is_waited_for_with_a_voice_then_given_up_and_leaves_nothing(nodes, run, tmp_path):
    hurried = RayRuntime(
        Joined(nodes.cluster),
        log_folder=tmp_path,
        placement_timeout_s=1.3,
        silence_s=60,
        preload=(),
        say=nodes.said.append,
        voice_every_s=0.5,
    )

    async def scenario():
        async with on(nodes, "first", ResourcePool([2, 1], name="first")):
            nodes.said.clear()
            with pytest.raises(PlacementError) as caught:
                await hurried.processes(ResourcePool([1, 1], name="second"))
            said = str(caught.value)
        async with on(nodes, "third", ResourcePool([1, 1], name="third")) as third:
            return said, await nodes.places(third)

    said, places = run(scenario())
    hurried.watch.stop()
    assert len(nodes.said) >= 2
    for line in nodes.said[:2]:
        wanted = r"missing 1 x \(1 CPU\) \+ 1 x \(1 CPU\); free now:\n"
        assert re.match(rf"waiting for a place for pool 'second' for \d s of 1.3; {wanted}", line)
    assert "1 (127.0.0.1)  1 CPU   0 CPU      too little" in nodes.said[0], "the table shows what is free"
    assert said.startswith("gave up after cluster.placement_timeout_s=1.3: waiting for a place for pool 'second' for ")
    assert sorted(places) == ["large", "small"], "the pool that gave up does not stand in the way of another"
    assert nodes.open_groups() == []


def test_a_node_that_joins_late_is_used(nodes, run):
    async def scenario():
        nodes.said.clear()
        waiting = asyncio.create_task(nodes.group("late", ResourcePool([1], num_cpus=0, resources={"late": 1})))
        while not nodes.said:
            await asyncio.sleep(0.05)
        with forked_workers(), asking_for_forks(True), only_needed(Node):
            nodes.cluster.add_node(num_cpus=0, resources={"late": 1}, **STORE)  # Ray wants the main thread
        group = await waiting
        places = await nodes.places(group)
        await group.shutdown()
        return places

    assert run(scenario()) == ["late"]
    assert "missing 1 x (1 late); free now:" in nodes.said[0]


def test_a_process_that_is_stopped_on_another_node_is_found_and_ended_there(nodes, run):
    async def scenario():
        group = await nodes.group("actor", ResourcePool([1, 1], num_cpus=0.1))
        pids = await group.call(Worker.pid)
        with pytest.raises(WorkerHungError) as caught:
            await group.call(Worker.freeze)
        await group.shutdown()
        return pids, caught.value

    pids, error = run(scenario())
    assert (error.rank, error.pid) == (1, pids[1])
    text = Path(error.detail.rpartition(" are in ")[2]).read_text()
    assert all(f"=== pid {pid} on " in text for pid in pids)
    assert "wait_for_peers" in text
    until = time.monotonic() + 30
    while Path(f"/proc/{pids[1]}").exists() and time.monotonic() < until:
        time.sleep(0.05)
    assert not Path(f"/proc/{pids[1]}").exists()


def test_a_run_that_starts_again_keeps_its_places_until_it_asks_for_others(nodes, run, tmp_path):
    runtime = RayRuntime(
        Joined(nodes.cluster), log_folder=tmp_path, placement_timeout_s=60, silence_s=60, preload=(), say=print
    )
    pool = ResourcePool([1, 1], num_cpus=0.1, name="kept")

    async def pids():
        group = await WorkerGroup.create(Layout("actor", await runtime.processes(pool)), Worker)
        found = await group.call(Worker.pid)
        await group.shutdown()
        return found

    async def scenario():
        runtime.keep_places()
        first = await pids()
        kept = nodes.open_groups()
        again = await pids()
        await runtime.give_back_places()
        return first, kept, again

    first, kept, again = run(scenario())
    runtime.watch.stop()
    assert kept == ["CREATED"]
    assert not set(first) & set(again), "they are other processes in the same places"
    assert nodes.open_groups() == []


def test_the_cluster_is_left_as_it_was_found(nodes, run):
    """The last one: everything of the tests before has been given back."""

    async def scenario():
        async with on(nodes, "actor", ResourcePool([1, 1], num_cpus=0.1)):
            pass

    run(scenario())
    assert nodes.open_groups() == []
    assert ray.util.list_named_actors(all_namespaces=True) == []
    total, until = ray.cluster_resources(), time.monotonic() + 30
    while ray.available_resources().get("CPU") != total["CPU"] and time.monotonic() < until:
        time.sleep(0.05)
    free = ray.available_resources()
    assert {name: free.get(name) for name in ("CPU", "GPU")} == {name: total[name] for name in ("CPU", "GPU")}
