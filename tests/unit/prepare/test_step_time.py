"""How long a step takes: beside what was measured on one device, and by hand."""

import pytest

from rallypoint.config import load_config
from rallypoint.prepare.inventory import imagine
from rallypoint.prepare.machine import plan_on, time_on
from rallypoint.prepare.step_time import StepTime

MEASURED = ("model.path=Qwen/Qwen3-0.6B", "cluster={device: cuda, pools: {main: [1]}}", "engine.activations=keep")


def planned(*overrides: str, name: str = "gsm8k-grpo", on: str = "H200") -> StepTime:
    config = load_config(name, [*MEASURED, *overrides]).config
    machine = imagine(on)
    time = time_on(config, plan_on(config, machine), machine)
    assert time is not None
    return time


def phase(time: StepTime, name: str):
    [found] = [each for each in time.phases if each.name == name]
    return found


@pytest.mark.parametrize(("num_prompts", "tokens_per_s"), [(32, 32_000), (1, 5_170)])
def test_decoding_is_within_a_quarter_of_what_an_h200_was_measured_to_do(num_prompts: int, tokens_per_s: float):
    lengths = ("data.max_prompt_tokens=256", "rollout.max_response_tokens=256", "actor.num_mini_batches=1")
    time = planned(*lengths, f"rollout={{num_prompts: {num_prompts}, group_size: 8}}")
    expected = 8 * num_prompts * 256 / tokens_per_s
    assert phase(time, "rollout").most_s == pytest.approx(expected, rel=0.25)


def test_an_update_is_within_a_quarter_of_what_an_h100_was_measured_to_do():
    rows = ("data.max_prompt_tokens=8", "actor.num_mini_batches=1", "rollout={num_prompts: 32, group_size: 2}")
    update = phase(planned(*rows, "rollout.max_response_tokens=1016", on="H100"), "actor update")
    assert 64 * 1024 / update.most_s == pytest.approx(70_900, rel=0.25)
    update = phase(planned(*rows, "rollout.max_response_tokens=2032", on="H100"), "actor update")
    assert 64 * 1024 / update.least_s == pytest.approx(104_000, rel=0.25)


def test_what_follows_from_the_numbers_of_a_run():
    alone, eight = planned(on="H100"), planned("cluster.pools={main: [8]}", on="8xH100")
    for role in ("actor pass", "actor update", "reference pass"):
        assert phase(eight, role).most_s == pytest.approx(phase(alone, role).most_s / 8, rel=0.02)
    assert eight.num_devices == 8
    for bound, seconds in zip(("least_s", "most_s"), eight.seconds, strict=True):
        assert seconds == pytest.approx(sum(getattr(each, bound) for each in eight.phases))
    assert phase(planned("actor.num_epochs=2"), "actor update").most_s > 1.9 * phase(planned(), "actor update").most_s
    once = planned("actor.num_mini_batches=1", "kl=null")
    assert [each.name for each in once.phases] == ["actor update", "rollout"], "the update has the logprobs"


def test_pools_beside_each_other_take_as_long_as_the_slower_one():
    pools = "cluster.pools={main: [4], side: [4]}"
    time = planned(pools, "rollout.placement.pool=side", "rollout.max_staleness=1", on="8xH100")
    assert time.seconds[1] == pytest.approx(
        max(sum(e.most_s for e in time.phases if e.pool == p) for p in ("main", "side"))
    )


def test_what_limits_a_phase_is_said_and_a_faster_memory_helps_where_it_is_the_cache():
    assert phase(planned(), "rollout").limit == "reading the cache"
    assert phase(planned(), "actor update").limit == "arithmetic"
    few = planned("rollout={num_prompts: 1, group_size: 8}", "actor.num_mini_batches=1")
    assert phase(few, "rollout").limit in ("launches", "reading the cache")
    assert phase(planned(on="H100"), "rollout").most_s > phase(planned(), "rollout").most_s


def test_a_device_that_is_not_known_has_no_time():
    config = load_config("digits").config
    machine = imagine("H100")
    assert time_on(config, plan_on(config, machine), machine) is None, "on the CPU"
