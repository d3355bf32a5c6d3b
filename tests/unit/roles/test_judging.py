"""What every recipe compares before it learns: sampled logprobs with recomputed ones."""

import dataclasses
import math

import pytest
import torch

from rallypoint.config.sections.frame import CheckConfig
from rallypoint.errors import OffPolicyError
from rallypoint.roles.judging import check_judged
from rallypoint.run.agreement import Agreement
from rallypoint.types import JudgedBatch, offsets_from_lengths


@pytest.fixture
def batch() -> JudgedBatch:
    """Two rows of four tokens, the first two of each the prompt; one token is 0.3 nats off, one of a prompt 9."""
    old = torch.tensor([0.0, 0.0, -1.0, -2.0, 0.0, 0.0, -0.5, -1.5])
    gap = torch.tensor([0.0, 9.0, 0.0, 0.1, 0.0, 0.0, -0.3, 0.0])
    return JudgedBatch(
        offsets=offsets_from_lengths(torch.tensor([4, 4])),
        tokens=torch.arange(10, 18),
        loss_mask=torch.tensor([False, False, True, True] * 2),
        prompt_index=torch.tensor([40, 41]),
        sample_index=torch.tensor([0, 3]),
        rollout_logprobs=old + gap,
        sampled_logprobs=None,
        old_logprobs=old,
        reference_logprobs=None,
        token_rewards=torch.zeros(8),
        versions=torch.zeros(2, dtype=torch.int64),
        truncated=torch.zeros(2, dtype=torch.bool),
    )


def test_the_worst_token_is_named_by_prompt_sample_and_place(batch):
    scalars = check_judged(batch, CheckConfig()).scalars()
    found = Agreement.of([{"step": 5, "rollout/num_tokens": 4, **scalars}], lambda token: f"<{token}>")
    assert str(found) == "mean 0.100, largest 0.300 nats: token 2 of prompt 41 sample 3, '<16>' (id 16), step 5"
    with pytest.raises(OffPolicyError, match=r"differ by 0.1 nats .*; worst at prompt 41 sample 3, token 2 of its row"):
        check_judged(batch, CheckConfig(rollout_gap=0.05))


def behind(batch, *steps, repeat=1):
    """The batch, whose trained tokens are so many steps behind, several times."""
    field = torch.zeros(8, dtype=torch.int64)
    field[batch.loss_mask] = torch.tensor(steps)
    return JudgedBatch.join([dataclasses.replace(batch, steps_behind=field)] * repeat)


def test_tokens_of_older_weights_have_a_drift_beside_the_gap(batch):
    """Gaps of 0, 0.1, -0.3 and 0 nats, of which the second is one step behind and the third two."""
    found = check_judged(behind(batch, 0, 1, 2, 0), CheckConfig()).scalars()
    assert (found["rollout/logprob_gap_mean"], found["rollout/logprob_gap_max"]) == (0, 0)
    assert found["rollout/drift/1"] == pytest.approx(0.1)
    assert found["rollout/drift/2"] == pytest.approx(0.3)
    assert found["rollout/gap_log_ppl"] == pytest.approx((0.1 - 0.3) / 4)
    none_is_new = check_judged(behind(batch, 1, 1, 1, 1), CheckConfig()).scalars()
    assert not any("logprob_gap" in name or "worst" in name for name in none_is_new)
    assert not any("drift" in name for name in check_judged(batch, CheckConfig()).scalars())


def test_older_tokens_do_not_loosen_the_bound_of_those_that_the_actors_weights_have_sampled(batch):
    """The token that is 0.3 nats off and the first are new, 0.15 nats on average; two others are 64 steps behind."""
    many = behind(batch, 0, 64, 0, 64, repeat=16)
    check_judged(many, CheckConfig(rollout_gap=0.16))
    with pytest.raises(OffPolicyError, match=r"differ by 0.15 nats on average \(checks.rollout_gap=0.14\); worst at"):
        check_judged(many, CheckConfig(rollout_gap=0.14))
    check_judged(behind(batch, 0, 64, 0, 64), CheckConfig(rollout_gap=0.14))  # two tokens say too little


def test_the_drift_may_grow_with_the_mean_of_steps_that_tokens_are_behind(batch):
    """0.1 nats on average, one step behind on average."""
    older = behind(batch, 0, 1, 1, 2)
    check_judged(older, CheckConfig(rollout_gap=0.051))
    with pytest.raises(OffPolicyError, match=r"by 0.1 nats on average, of tokens that are 1.0 steps behind: expected"):
        check_judged(older, CheckConfig(rollout_gap=0.049))


def test_every_run_measures_how_far_sampler_and_trainer_are_apart(batch):
    """Gaps of 0, 0.1, 0 and -0.3 nats at the four trained tokens; that of a prompt does not count."""
    found = check_judged(batch, CheckConfig()).scalars()
    assert found["rollout/gap_log_ppl"] == pytest.approx((0.1 - 0.3) / 4)
    logs = [0.0, -0.1, 0.0, 0.3]
    assert found["rollout/gap_kl"] == pytest.approx(sum(math.expm1(x) - x for x in logs) / 4, rel=1e-5)
    assert found["rollout/gap_chi2"] == pytest.approx(sum(math.exp(2 * x) - 1 for x in logs) / 4, rel=1e-5)
    assert found["rollout/ratio_max"] == pytest.approx(math.exp(0.3), rel=1e-5)
    assert found["rollout/ratio_outside"] == 0
    far = dataclasses.replace(batch, rollout_logprobs=batch.rollout_logprobs - 1.0 * (torch.arange(8) == 2))
    assert check_judged(far, CheckConfig()).scalars()["rollout/ratio_outside"] == 1 / 4


def test_a_gap_that_is_no_number_is_worse_than_any(batch):
    sound, broken = (
        {"step": n, "rollout/num_tokens": 4, **check_judged(batch, CheckConfig()).scalars()} for n in (1, 2)
    )
    broken["rollout/logprob_gap_max"] = math.nan
    found = Agreement.of([sound, broken, {"step": 2, "validation/score": 1.0}])
    assert found is not None
    assert found.step == 2
    assert dataclasses.replace(found, text=None).worst == "token 2 of prompt 41 sample 3, (id 16), step 2"
    assert Agreement.of([{"step": 0, "validation/score": 0.5}]) is None
