"""The config chooses where the ranks of a run meet."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from rallypoint.cluster import InlineRuntime, Mesh, WorkerContext
from rallypoint.cluster.rendezvous import open_rendezvous
from rallypoint.config import load_config
from rallypoint.roles.placement import SharedFolder, WorkerSpec, rendezvous_of


class OnRay(InlineRuntime):
    """Threads, with the rendezvous of the runtime on Ray."""

    def open_rendezvous(self, scope):
        return open_rendezvous("ray", scope)


@pytest.mark.parametrize("kind", ["auto", "tcp", "etcd", "ray"])
def test_ranks_meet_where_the_config_says(kind, request, tmp_path):
    chosen = request.getfixturevalue("etcd_url") if kind == "etcd" else kind
    overrides = [f"cluster.rendezvous={chosen}", "cluster.pools={main: [2]}"]
    overrides += ["cluster.runtime=inline"] if kind != "ray" else []
    if kind == "ray":
        request.getfixturevalue("local_ray")
    config = load_config("digits", overrides).config
    runtime = (OnRay if kind == "ray" else InlineRuntime)(log_folder=tmp_path)
    rendezvous = rendezvous_of(config, runtime)
    assert rendezvous is not None
    expected = {"auto": "Memory", "tcp": "Tcp", "etcd": "Etcd", "ray": "Ray"}[kind]
    assert type(rendezvous.rooms).__name__ == f"{expected}Rooms"
    spec = WorkerSpec(config, "unused", SharedFolder.marked(tmp_path), rendezvous)

    def total(rank: int) -> float:
        tensor = torch.tensor([10.0**rank])
        with spec.meeting(WorkerContext("actor", rank, Mesh({"dp_replicate": 2}), 1, "cpu", {})) as mesh:
            mesh.everyone.all_reduce_sum([tensor])
        return tensor.item()

    with rendezvous, ThreadPoolExecutor(2) as pool:
        assert list(pool.map(total, range(2))) == [11.0, 11.0]


def test_nobody_opens_a_rendezvous_that_no_rank_needs(tmp_path):
    config = load_config("digits", ["cluster.pools={main: [1]}"]).config
    assert rendezvous_of(config, InlineRuntime(log_folder=tmp_path)) is None
