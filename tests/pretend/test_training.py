"""Whole runs on the pretend device: they end with the bits of the same run on the CPU, and nothing else does."""

import contextlib
import functools
import shutil

import pytest
from accelerator_forms import accelerator_forms
from metrics_file import read_metrics
from tiny_models import make_tiny_reward_model
from tiny_runs import Runs, weights_of

from rallypoint.config import load_config
from rallypoint.errors import WorkerError
from rallypoint.prepare.role_memory import reserved_tokens

INLINE = ("cluster.runtime=inline", "cluster.pools={main: [1]}")
GRPO = "recipe=grpo"
UNWATCHED = "validation.every_steps=99"
"""For runs that differ in how they train: PPO's validate."""
NUM_STEPS = 2
CUT = "engine.max_tokens_per_micro_batch=256"
"""What two runs on the device have in common, so that they are compared with one on the CPU."""
OF_MACHINES = ("time/", "memory", "mfu", "per_s", "/s", "seconds", "_s")
"""Parts of the names of metrics that a machine decides."""


def steps_of(run):
    """Return what was measured of each step, besides seconds and memory."""
    steps = [record for record in read_metrics(run.metrics) if "reward/mean" in record]
    return [
        {name: value for name, value in step.items() if not any(map(name.__contains__, OF_MACHINES))} for step in steps
    ]


def run_on(runs, device, name, *more):
    """Run on a device, in the forms that accelerators take."""
    alike = ("model.dtype=float32", "engine.activations=keep")  # which have other defaults there
    more = (f"trainer.num_steps={NUM_STEPS}", *alike, *more)
    with accelerator_forms() if device == "cpu" else contextlib.nullcontext():
        return runs.run(f"{name}-{device}", *INLINE, f"cluster.device={device}", *more)


@pytest.fixture(autouse=True)
def without_all_scores(pretend):
    """No run has a pass whose attention keeps all scores on a GPU."""
    yield
    assert not pretend.kernels["attention by math"]


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory):
    """Returns steps and weights of a run on the CPU; several tests compare with the same one."""
    runs = Runs(tmp_path_factory.mktemp("cpu"))

    @functools.cache
    def outcome(*more):
        run = run_on(runs, "cpu", f"run{outcome.cache_info().misses}", *more)
        return steps_of(run), weights_of(run)

    return outcome


@pytest.fixture
def check_same(runs, on_cpu):
    """Runs on both, and compares all that comes out."""

    def check(name, *more, only_there=()):
        there = run_on(runs, "pretend", name, *more, *only_there)
        steps = steps_of(there)
        assert len(steps) == NUM_STEPS
        assert "actor/grad_norm" in steps[0]
        assert (steps, weights_of(there)) == on_cpu(*more)
        return there

    return check


def test_ppo_has_the_bits_of_the_cpu(check_same, pretend):
    there = check_same("ppo", CUT)
    assert pretend.peak() > 0
    # What the device held at most was measured, and is what the page shows.
    assert max(step["actor/memory_gib"] for step in read_metrics(there.metrics) if "actor/memory_gib" in step) > 0


def test_grpo_in_bfloat16_has_the_bits_of_the_cpu(check_same):
    check_same("half", GRPO, UNWATCHED, "model.dtype=bfloat16")


@pytest.mark.parametrize(
    ("activations", "offload"),
    [pytest.param("checkpoint", "optimizer", marks=pytest.mark.slow), ("offload", "optimizer_and_gradients")],
)
def test_what_is_kept_for_the_backward_pass_and_where_the_optimizer_is_changes_no_bit(check_same, activations, offload):
    there = [f"engine.activations={activations}", f"engine.offload={offload}"]
    check_same("kept", GRPO, UNWATCHED, "model.dtype=bfloat16", only_there=there)


def test_a_run_whose_roles_sleep_between_their_turns_has_the_same_bits_also_after_a_resume(runs, check_same):
    saves = "checkpoint={every_steps: 1, keep: 99}"
    whole = check_same("whole", CUT, only_there=[saves, "engine.sleep=true"])
    wanted, (newest, *_) = weights_of(whole), sorted(whole.checkpoints.iterdir(), reverse=True)
    shutil.rmtree(newest)
    resumed = runs.resume(whole.path.name)
    assert weights_of(resumed) == wanted


def test_adapters_have_the_same_bits(check_same):
    check_same("lora", GRPO, UNWATCHED, "model.lora={rank: 4, alpha: 8}", only_there=["engine.sleep=true"])


def test_a_reward_model_scores_with_the_same_bits(check_same, tmp_path):
    scorer = make_tiny_reward_model(tmp_path / "scorer")
    reward = ("advantage.token_discount=null", "reward.function=null", f"reward.path={scorer}")
    check_same("scored", GRPO, UNWATCHED, *reward)


def test_where_not_all_rows_have_room_in_the_cache_they_wait_and_have_the_same_bits(runs, pretend):
    rows = ("rollout={num_prompts: 2, group_size: 16, max_response_tokens: 5}", "data.max_prompt_tokens=256")
    once = (GRPO, UNWATCHED, *rows, "trainer.num_steps=1")
    reserved = reserved_tokens(load_config("digits", runs.overrides("any", *once)).config)
    whole = run_on(runs, "pretend", "whole", *once, f"rollout.cache_tokens={reserved}")
    with pretend.limited(600_000):
        with pytest.raises(WorkerError, match="out of memory"):
            run_on(runs, "pretend", "large", *once, f"rollout.cache_tokens={reserved}")
        small = run_on(runs, "pretend", "small", *once)
    assert weights_of(small) == weights_of(whole)
    assert steps_of(small) == steps_of(whole)
