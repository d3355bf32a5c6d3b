"""A run's weights are the same whichever way they take to the rollout role."""

import pytest

pytestmark = pytest.mark.lasting_ray

WAYS = ("memory", "broadcast", "folder")
SHORT, HEADS = "trainer.num_steps=2", "model.create.num_key_value_heads=2"


def sharded(size: str) -> list[str]:
    return [f"{role}.mesh.{size}" for role in ("actor", "critic", "reference")]


def test_ranks_that_share_matrices_publish_to_a_rank_elsewhere_by_every_way(runs, weights_of):
    """Two threads have a half of each matrix, a third one has all of them."""
    pools = ("cluster.pools={main: [2], second: [1]}", "rollout.placement.pool=second")
    common = ("cluster.runtime=inline", SHORT, HEADS, *sharded("tp=2"))
    beside = runs.run("beside", "cluster.pools={main: [2]}", *common)
    for way in WAYS:
        run = runs.run(way, *pools, *common, f"rollout.weights={way}")
        assert weights_of(run) == weights_of(beside), way
        assert not run.published.exists()


# test_two_to_one.py has two that shard a model publish by every way, to one with a process of its own.
@pytest.mark.slow
def test_processes_that_shard_a_model_publish_to_a_rank_beside_by_every_way(runs, weights_of):
    """Each of two processes sends a half of every tensor, and one of them takes over all."""
    common = (
        "cluster.runtime=ray",
        "cluster.pools={main: [2]}",
        "rollout.placement.num_ranks=1",
        SHORT,
    )
    found = [weights_of(runs.run(way, *common, *sharded("dp_shard=2"), f"rollout.weights={way}")) for way in WAYS]
    assert found[0] == found[1] == found[2]


def test_adapters_alone_take_the_way_to_a_rank_elsewhere(runs, weights_of):
    common = ("cluster.runtime=inline", SHORT, "model.lora={rank: 4, alpha: 8}")
    colocated = runs.run("colocated", "cluster.pools={main: [1]}", *common)
    for way in WAYS:
        split = ("cluster.pools={main: [1], second: [1]}", "rollout.placement.pool=second", f"rollout.weights={way}")
        assert weights_of(runs.run(way, *split, *common)) == weights_of(colocated), way
