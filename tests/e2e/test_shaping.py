"""What is done to scores and rows before they train, in whole runs of one process."""

import pytest
import torch
from metrics_file import read_metrics
from safetensors.torch import load_file

INLINE = ("cluster.runtime=inline", "cluster.pools={main: [1]}")


def test_while_the_critic_warms_up_the_actor_stays_as_it_is_and_a_resumed_run_ends_with_the_same_bits(runs, weights_of):
    warm = ("critic.warmup_steps=2", "checkpoint={every_steps: 1, keep: 9}", *INLINE)
    run = runs.run("halved", *warm)
    whole = weights_of(run)
    made = load_file(run.path / "model" / "model.safetensors")
    steps = sorted(run.checkpoints.iterdir())
    policies = [load_file(step / "model.safetensors") for step in steps]
    is_new = [any(not torch.equal(policy[name], made[name]) for name in made) for policy in policies]
    assert is_new == [False, False, True, True]
    assert len({(step / "critic" / "model.safetensors").read_bytes() for step in steps}) == 4
    trained = [each["actor/num_tokens"] for each in read_metrics(run.metrics) if "actor/num_tokens" in each]
    assert trained[:2] == [0, 0]
    assert trained[2] > 0
    for later in steps[1:]:
        later.rename(run.path / later.name)
    assert weights_of(runs.resume("halved")) == whole


@pytest.mark.parametrize("recipe", ["ppo", "grpo"])
def test_a_run_whose_rollouts_are_all_truncated_trains_nothing_and_says_so(runs, recipe):
    masked = ("rollout.mask_truncated=true", "rollout.max_response_tokens=3", "rollout.min_response_tokens=3")
    keys = ("validation.every_steps=99", "trainer.num_steps=1", "data.generate.num_digits=2", "rollout.temperature=10")
    run = runs.run("short", *INLINE, *masked, *keys, "reward.overlong={}", f"recipe={recipe}")
    step = next(each for each in read_metrics(run.metrics) if each.get("step") == 1)
    assert step["rollout/truncated"] > 0.5
    assert step["actor/num_tokens"] == 3 * 32 * (1 - step["rollout/truncated"])
    assert step["reward/overlong_penalty"] == 1.0
