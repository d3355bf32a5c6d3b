"""Runs whose pull to the reference changes: a coefficient that adapts, and a reference that is refreshed."""

import pytest
from metrics_file import read_metrics

pytestmark = pytest.mark.lasting_ray

INLINE, ONE = "cluster.runtime=inline", "cluster.pools={main: [1]}"
MOVING = ("reference.refresh_every_steps=3", "kl.adaptive={target: 1e-4, horizon: 64}", "actor.optimizer.lr=0.03")
LAYOUTS = {
    "whole model": (ONE,),
    "adapters of one base": (ONE, "model.lora={rank: 4, alpha: 8}"),
    "adapters on pools of their own": (
        "cluster.pools={main: [1], second: [1]}",
        "reference.placement.pool=second",
        "model.lora={rank: 4, alpha: 8}",
    ),
}


def column(run, name):
    return {record["step"]: record[name] for record in read_metrics(run.metrics) if name in record}


# On a pool of its own a reference is a model of its own, as without adapters; test_lora.py has adapters on two pools.
@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=pytest.mark.slow) if "pools" in name else name for name in LAYOUTS]
)
def test_a_resumed_run_goes_on_with_the_reference_and_the_coefficient_that_it_had(runs, weights_of, layout):
    """Refreshed after step 3, saved and resumed after step 4."""
    how = (INLINE, "recipe=grpo", *LAYOUTS[layout], *MOVING, "trainer.num_steps=6", "checkpoint={every_steps: 2}")
    run = runs.run("halved", *how)
    whole = weights_of(run)
    assert column(run, "reference/version") == {1: 0, 2: 0, 3: 6, 4: 6, 5: 6, 6: 12}
    drift, coef = column(run, "kl/reference_mean"), column(run, "kl/coef")
    assert drift[3] > 1e-6 > drift[4], "the actor begins step 4 as the reference is"
    assert len(set(coef.values())) == 6

    step_6 = run.checkpoints / "step_000006"
    at_4 = {path.name for path in (run.checkpoints / "step_000004" / "reference").iterdir()}
    assert at_4 == {"version_000006"}
    step_6.rename(run.path / "gone")
    resumed = runs.resume("halved")
    assert weights_of(resumed) == whole
    assert any(name.startswith("reference/version_000012/") for name in whole)
    assert column(resumed, "kl/coef") == coef
    assert not resumed.published.exists(), "nothing stays behind"


def test_a_sharded_reference_is_refreshed_from_a_sharded_actor(runs, weights_of):
    meshes = ("cluster.pools={main: [2]}", "actor.mesh.dp_shard=2", "reference.mesh.dp_shard=2")
    run = runs.run("sharded", "cluster.runtime=ray", "recipe=grpo", *meshes, *MOVING)
    drift = column(run, "kl/reference_mean")
    assert drift[3] > 1e-6 > drift[4]
    assert any(name.startswith("reference/version_000006/") for name in weights_of(run))


def test_a_run_without_these_keys_shows_none_of_it(runs, weights_of):
    run = runs.run("usual", INLINE, ONE, "recipe=grpo")
    assert not column(run, "kl/coef")
    assert not column(run, "reference/version")
    assert not any(name.startswith("reference") for name in weights_of(run))
