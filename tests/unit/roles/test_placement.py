"""What a worker checks before it begins."""

import dataclasses
import os
import pickle

import pytest
import torch

from rallypoint.cluster import Mesh, WorkerContext, merge
from rallypoint.cluster.process import ProcessInfo
from rallypoint.config import load_config
from rallypoint.config.transport import transport_kind
from rallypoint.errors import PlacementError
from rallypoint.prepare.pools import pools_of
from rallypoint.roles.placement import SharedFolder, WorkerSpec
from rallypoint.roles.publishing import transport_between


@dataclasses.dataclass(frozen=True)
class Somewhere:
    """A process of which nothing is asked but where it is."""

    info: ProcessInfo


@pytest.fixture
def host_on():
    return lambda node: Somewhere(ProcessInfo(node, f"id of {node}", 1))


def test_a_node_that_sees_the_run_folder_is_content(tmp_path):
    pickle.loads(pickle.dumps(SharedFolder.marked(tmp_path))).check()


def test_a_node_that_does_not_see_the_run_folder_is_named_with_the_remedy(tmp_path):
    folder = SharedFolder.marked(tmp_path)
    (tmp_path / ".shared").unlink()
    with pytest.raises(PlacementError, match=r"node .+ does not see the run folder .*: set trainer.runs_dir"):
        folder.check()


def test_another_folder_of_the_same_name_is_not_taken_for_the_run_folder(tmp_path):
    folder = SharedFolder.marked(tmp_path)
    SharedFolder.marked(tmp_path)  # as if this node had a folder of its own there
    with pytest.raises(PlacementError, match="does not see the run folder"):
        folder.check()


def test_pools_are_as_the_config_says_and_every_role_has_its_own():
    config = load_config(
        "digits",
        [
            "cluster.pools={main: [2, 1], side: [4]}",
            "rollout.placement.pool=side",
            "cluster.device=cuda",
            "cluster.num_cpus_per_process=3",
            "cluster.num_gpus_per_process=2",
            "cluster.memory_gib_per_process=2",
            "cluster.labels={zone: west}",
        ],
    ).config
    pools = pools_of(config)
    main, side = pools.pool("actor"), pools.pool("rollout")
    assert pools.pool("critic") is pools.pool("reference") is main
    assert [pool.num_processes for pool in (main, side)] == [3, 4]
    (source,) = main.sources
    assert source.bundle == {"CPU": 3, "GPU": 2, "memory": 2 * 2**30}
    assert (source.labels, source.device, source.num_threads) == ({"zone": "west"}, "cuda", 3)
    assert merge(main, side).num_processes == 7


def test_processes_take_no_gpu_on_a_cpu():
    (source,) = pools_of(load_config("digits").config).pool("actor").sources
    assert (source.bundle, source.device) == ({"CPU": 1}, "cpu")


def test_an_accelerator_that_torch_does_not_find_is_named_with_what_there_is(tmp_path):
    config = load_config("digits", ["cluster.device=warp"]).config
    spec = WorkerSpec(config, "model", SharedFolder.marked(tmp_path), None)
    with pytest.raises(
        PlacementError, match=r"cluster\.device=warp, but on node .* finds (no accelerator|one of type)"
    ):
        spec.prepare(WorkerContext("actor", 0, Mesh({"dp_replicate": 1}), 1, config.cluster.device, {}))


@pytest.mark.parametrize("num_cpus", [1, 2, 16])
def test_compiled_kernels_are_bounded_for_a_process_and_for_each_of_its_threads(tmp_path, monkeypatch, num_cpus):
    spec = WorkerSpec(load_config("digits").config, "model", SharedFolder.marked(tmp_path), None)
    before = torch.get_num_threads()
    for cache in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        monkeypatch.setenv(cache, "")  # so that what is set from here on is taken back
        monkeypatch.delenv(cache)
    try:
        spec.prepare(WorkerContext("actor", 0, Mesh({"dp_replicate": 1}), num_cpus, "cpu", {}))
    finally:
        torch.set_num_threads(before)
    assert (os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"], os.environ["LRU_CACHE_CAPACITY"]) == ("128", "128")


def test_weights_take_a_way_that_fits_where_the_roles_are(host_on):
    split = ("cluster.pools={main: [1], second: [1]}", "rollout.placement.pool=second")
    here, there = [host_on("a")], [host_on("b")]
    for overrides, nodes, way in (
        ((), (here, here), "shared"),
        (split, (here, here), "memory"),
        (split, (here, there), "broadcast"),
        ((*split, "cluster.device=cuda"), (here, here), "ipc"),
        ((*split, "rollout.weights=folder"), (here, here), "folder"),
        (("rollout.engine=vllm",), (here, here), "memory"),
        ((*split, "rollout.engine=vllm"), (here, there), "broadcast"),
        (("rollout.engine=vllm", "model.lora={rank: 4}"), (here, here), "folder"),
        ((*split, "rollout.engine=vllm", "model.lora={rank: 4}"), (here, there), "folder"),
    ):
        assert transport_between(load_config("digits", overrides).config, *nodes).kind.name == way
    forced = load_config("digits", (*split, "rollout.weights=memory", "cluster.address=auto")).config
    with pytest.raises(PlacementError, match=r"rollout.weights=memory leads .* of one node, but .* are on 2 \(a, b\)"):
        transport_between(forced, here, there)


def test_the_way_of_weights_is_known_before_the_placement_where_the_config_says_enough():
    split, there = ("cluster.pools={main: [1], second: [1]}", "rollout.placement.pool=second"), "cluster.address=auto"
    for overrides, way in (
        ((), "shared"),
        (split, "memory"),
        ((*split, there), None),
        (("cluster.pools={main: [1, 1]}", "actor.mesh.dp_shard=2", "critic.mesh.dp_shard=2", there), "broadcast"),
        (("cluster.pools={main: [2]}", "actor.mesh.tp=2", there), "memory"),
    ):
        kind = transport_kind(load_config("digits", overrides).config)
        assert (kind and kind.name) == way
