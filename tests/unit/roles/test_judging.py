"""What every recipe compares before it learns: sampled logprobs with recomputed ones."""

import dataclasses
import math

import pytest
import torch

from rallypoint.config import CheckConfig
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


def test_each_step_that_rollouts_are_behind_may_widen_the_gap_as_much(batch):
    behind = dataclasses.replace(batch, steps_behind=1)
    check_judged(behind, CheckConfig(rollout_gap=0.06))
    with pytest.raises(OffPolicyError, match=r"checks.rollout_gap=0.04, for each of 2 steps"):
        check_judged(behind, CheckConfig(rollout_gap=0.04))


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
