"""The same seed and layout give the same weights, bit for bit, however a run is carried out."""

import collections
import shutil

import pytest
from metrics_file import read_metrics
from tiny_runs import Runs

from rallypoint.journal import GroupScored, read_journal
from rallypoint.run.folder import RunFolder

pytestmark = pytest.mark.lasting_ray

ONE, TWO = "cluster.pools={main: [1]}", "cluster.pools={main: [2]}"
RAY, INLINE = "cluster.runtime=ray", "cluster.runtime=inline"


def digests_of(run):
    """Return the digest of the weights that each step published, which are those that its ranks loaded."""
    state = run.state()
    published = {step: event.digest for step, event in state.published.items()}
    assert published == {step: event.digest for step, event in state.loaded.items()}
    assert list(published) == [0, 1, 2, 3, 4]
    assert len({*published.values()}) == 5, "each step changes the weights"
    return published


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of one rank, in this process, with a checkpoint of its middle."""
    return Runs(tmp_path_factory.mktemp("alone")).run("alone", INLINE, ONE, "checkpoint={every_steps: 2, keep: 9}")


@pytest.fixture(scope="module")
def alone(whole, weights_of):
    """Its weights."""
    return weights_of(whole)


# GRPO is the same in both in test_own_algorithms.py and, with groups that are aborted, below.
@pytest.mark.parametrize(("recipe", "ranks"), [("ppo", TWO), pytest.param("grpo", ONE, marks=pytest.mark.slow)])
def test_ray_and_inline_give_the_same_weights_bit_for_bit(runs, weights_of, recipe, ranks):
    on_ray = runs.run("ray", RAY, ranks, f"recipe={recipe}")
    inline = runs.run("inline", INLINE, ranks, f"recipe={recipe}")
    assert weights_of(on_ray) == weights_of(inline)
    assert digests_of(on_ray) == digests_of(inline)
    expected = {"model.safetensors", "training/actor.safetensors"}
    expected |= {"critic/model.safetensors", "training/critic.safetensors"} if recipe == "ppo" else set()
    assert set(weights_of(on_ray)) == expected


@pytest.mark.slow  # test_diff.py compares a run with the same one again, and with one of another seed
def test_the_same_seed_repeats_and_another_seed_does_not(runs, weights_of, alone):
    again, other = runs.run("again", INLINE, ONE), runs.run("other", INLINE, ONE, "seed=1")
    assert weights_of(again) == alone
    assert weights_of(other) != alone


def test_roles_on_pools_of_their_own_give_the_same_weights_as_colocated_ones(runs, weights_of, alone):
    split = runs.run(
        "split",
        RAY,
        "cluster.pools={main: [1], second: [1]}",
        "rollout.placement.pool=second",
        "critic.placement.pool=second",
    )
    assert weights_of(split) == alone
    assert digests_of(split), "also of weights that have travelled"


def test_a_resumed_run_ends_with_the_weights_of_one_that_was_never_stopped(runs, weights_of, whole, alone):
    halved = RunFolder(shutil.copytree(whole.path, runs.folder / "halved"))
    for later in sorted(halved.checkpoints.iterdir())[1:]:
        later.rename(halved.path / later.name)
    published = digests_of(halved)
    resumed = runs.resume("halved")
    assert weights_of(resumed) == alone
    assert digests_of(resumed) == published
    scored = [one.event for one in read_journal(resumed.journal) if isinstance(one.event, GroupScored)]
    assert collections.Counter(one.validation for one in scored) == {None: 6 * 8, 0: 16, 2: 16, 4: 2 * 16}
    steps = [line.split('"step": ')[1].split(",")[0] for line in resumed.metrics.read_text().splitlines()]
    assert sorted(set(steps)) == ["0", "1", "2", "3", "4"]


def test_an_over_sampled_run_trains_on_the_same_prompts_on_ray_inline_and_after_a_kill(runs, weights_of):
    keys = (
        "recipe=grpo",
        "rollout={max_response_tokens: 60, over_sampling: 12, dynamic_sampling: 5}",
        "checkpoint={every_steps: 1, keep: 9}",
        ONE,
    )
    inline = runs.run("inline", INLINE, *keys)
    counts = [each["rollout/num_aborted"] for each in read_metrics(inline.metrics) if "rollout/num_aborted" in each]
    assert len(counts) == 4
    assert max(counts) > 0
    on_ray = runs.run("ray", RAY, *keys)
    assert weights_of(on_ray) == weights_of(inline)
    for later in sorted(on_ray.checkpoints.iterdir())[1:]:
        later.rename(on_ray.path / later.name)
    assert weights_of(runs.resume("ray", INLINE)) == weights_of(inline)
