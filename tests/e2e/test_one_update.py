"""Runs that take one optimizer step for a batch: its own pass judges it."""

import signal

import pytest
from metrics_file import read_metrics
from tiny_runs import Runs

from rallypoint.prepare.preflight import load_checked
from rallypoint.recipes.ending import summarise
from rallypoint.run.rollouts import read_rollouts

INLINE = ("cluster.runtime=inline", "cluster.pools={main: [1]}")
ONE_UPDATE = ("actor.num_mini_batches=1", "model.dtype=bfloat16")


def steps_of(run):
    return [record for record in read_metrics(run.metrics) if "reward/mean" in record]


@pytest.mark.parametrize("recipe", ["grpo", "ppo"])
def test_every_step_is_compared_with_its_rollouts_and_the_first_two_with_a_pass_of_their_own(runs, recipe):
    run = runs.run("one", *INLINE, *ONE_UPDATE, f"recipe={recipe}")
    steps = steps_of(run)
    assert ["actor/ratio_error" in record for record in steps] == [True, True, False, False]
    for name in ("rollout/logprob_gap_mean", "rollout/logprob_gap_max", "rollout/worst_token", "kl/reference_mean"):
        assert all(name in record for record in steps), name
    assert all(0 < record["rollout/logprob_gap_mean"] < 0.02 for record in steps)
    assert steps[0]["kl/reference_mean"] < 1e-4 < steps[-1]["kl/reference_mean"]
    agreement = summarise(run, load_checked(str(run.path)).config).agreement
    assert agreement is not None
    assert agreement.largest == max(record["rollout/logprob_gap_max"] for record in steps)


def test_a_resumed_run_judges_again_and_ends_with_the_same_weights(runs, weights_of):
    long = (*INLINE, *ONE_UPDATE, "recipe=grpo", "trainer.num_steps=8", "checkpoint={every_steps: 1, keep: 99}")
    whole = runs.run("whole", *long)
    process = runs.start("train", "digits", *runs.overrides("killed", *long))
    assert any("step 4/8" in line for line in process.stdout)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    resumed = runs.resume("killed")
    assert weights_of(whole) == weights_of(resumed)
    assert sum("actor/ratio_error" in record for record in steps_of(resumed)) == 4


def entropies_of(run):
    """Return the entropies of the tokens that a step's rollouts sampled, step by step."""
    found = []
    for step in range(1, 5):
        rows = read_rollouts(run.path, step)
        tokens = [zip(row["entropies"], row["loss_mask"], strict=True) for row in rows]
        found.append([entropy for row in tokens for entropy, is_sampled in row if is_sampled])
    return found


ALIKE = (INLINE[0], "actor.num_mini_batches=1", "recipe=grpo", "model.create.num_key_value_heads=2")


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The steps of one rank, and the entropies that it computed."""
    run = Runs(tmp_path_factory.mktemp("alone")).run("alone", INLINE[1], *ALIKE)
    return steps_of(run), entropies_of(run)


MESHES = {
    "dp": (),
    "sp": ("actor.mesh.sp=2",),
    "tp": ("actor.mesh.tp=2",),
    "tp of rollouts": ("rollout.mesh.tp=2",),
    "dp and tp of all": ("cluster.pools={main: [4]}", "actor.mesh.tp=2", "rollout.mesh.tp=2"),
}


ALWAYS = ("sp", "dp and tp of all")
"""Those that have every axis."""


@pytest.mark.parametrize(
    "mesh",
    [pytest.param(mesh, id=name, marks=() if name in ALWAYS else pytest.mark.slow) for name, mesh in MESHES.items()],
)
def test_ranks_compare_their_rows_together(runs, alone, mesh):
    run, (of_one, expected) = runs.run("together", "cluster.pools={main: [2]}", *mesh, *ALIKE), alone
    for one, two, entropies, same in zip(of_one, steps_of(run), entropies_of(run), expected, strict=True):
        assert entropies == pytest.approx(same, abs=1e-5)
        assert two["actor/entropy"] == pytest.approx(sum(entropies) / len(entropies), rel=1e-5)
        assert two["kl/reference_mean"] == pytest.approx(one["kl/reference_mean"], abs=1e-6)
        assert 0 < two["rollout/logprob_gap_mean"] <= two["rollout/logprob_gap_max"] < 1e-5
        assert ("actor/ratio_error" in two) == ("actor/ratio_error" in one)
