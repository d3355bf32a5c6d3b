import math

import pytest
import torch

from rallypoint.algorithms import (
    ADVANTAGES,
    OBJECTIVES,
    ActorLoss,
    AdaptiveKL,
    aggregate,
    gap_metrics,
    rows_that_learn,
    weigh,
)
from rallypoint.algorithms.shaping import overlong_penalty
from rallypoint.testing import CASES
from rallypoint.types import JudgedBatch, merge


def test_a_prompt_in_two_mini_batches_counts_in_each_as_the_part_that_is_there():
    batch = JudgedBatch(
        offsets=torch.tensor([0, 1, 4, 6]),
        tokens=torch.arange(6),
        loss_mask=torch.ones(6, dtype=torch.bool),
        rollout_logprobs=torch.zeros(6),
        prompt_index=torch.tensor([0, 0, 1]),
        sample_index=torch.tensor([0, 1, 0]),
        versions=torch.zeros(3, dtype=torch.int64),
        truncated=torch.zeros(3, dtype=torch.bool),
        token_rewards=torch.tensor([1.0, 0, 0, 0, 0, 0]),
        old_logprobs=torch.zeros(6),
        reference_logprobs=None,
    )
    actor = weigh(batch, ADVANTAGES["rloo"](whiten=False), kl=None, aggregation="prompt")
    loss = ActorLoss(
        objective=OBJECTIVES["policy_gradient"](),
        corrections=(),
        aggregation="prompt",
        length=1.0,
        entropy_coef=0.0,
        kl=None,
        is_single_update=False,
    )
    parts = [actor.rows(torch.tensor(rows)) for rows in ([0], [1, 2])]
    assert [loss.denominator(part) for part in (actor, *parts)] == [2.0, 0.25, 1.75]


def test_the_metric_of_a_weighed_loss_is_the_mean_of_the_rule():
    case = CASES["usual"]
    tokens, rewards = case.tokens(), case.earned()
    weights = aggregate("sequence", rewards.loss_mask, rewards.offsets, rewards.groups, length=1.0)
    loss = OBJECTIVES["policy_gradient"]()(tokens, weights=weights.by_row[tokens.rows])
    assert loss.metrics().scalars()["policy_loss"] == pytest.approx(float(loss.sum) / weights.denominator)


@pytest.mark.parametrize("kl", [0.0, 0.05, 0.2, 5.0])
def test_the_coefficient_follows_the_divergence_and_never_jumps(kl):
    control = AdaptiveKL(target=0.1, horizon=1000.0)
    changed = control.next(coef=2.0, kl=kl, num_rollouts=100)
    assert (changed > 2.0) == (kl > 0.1)
    assert abs(changed / 2.0 - 1.0) <= 0.02 + 1e-12


def test_a_divergence_that_is_not_a_number_leaves_the_coefficient_alone():
    assert AdaptiveKL(target=0.1, horizon=1000.0).next(coef=2.0, kl=float("nan"), num_rollouts=100) == 2.0


def test_equal_policies_have_no_gap_and_tokens_that_one_excludes_have_a_finite_one():
    nothing = torch.zeros(0)
    logprobs = torch.tensor([-1.0, -0.5, -torch.inf])
    names = ("gap_kl", "gap_chi2", "gap_log_ppl", "ratio_outside")
    expected = {**{f"rollout/{name}": 0.0 for name in names}, "rollout/ratio_max": 1.0}
    assert gap_metrics(logprobs, logprobs).scalars() == expected
    assert all(
        math.isfinite(x) for x in gap_metrics(logprobs, torch.tensor([-1.0, -torch.inf, -3.0])).scalars().values()
    )
    halves = merge(gap_metrics(logprobs, logprobs), gap_metrics(nothing, nothing))
    assert halves.scalars() == expected


def test_the_gap_of_a_known_pair_of_policies_is_their_divergence():
    """Every token as often as the sampler draws it: the estimates are the divergences themselves."""
    rollout = torch.tensor([0.5, 0.5, 0.25, 0.25], dtype=torch.float64)[[0, 0, 2, 3]]
    old = torch.tensor([0.25, 0.25, 0.25, 0.5], dtype=torch.float64)
    p, q = torch.tensor([0.5, 0.25, 0.25]).double(), torch.tensor([0.25, 0.25, 0.5]).double()
    found = gap_metrics(rollout.log(), old.log()).scalars()
    assert found["rollout/gap_kl"] == pytest.approx(float((p * (p / q).log()).sum()))
    assert found["rollout/gap_chi2"] == pytest.approx(float((q.square() / p).sum() - 1))
    assert found["rollout/ratio_max"] == pytest.approx(2.0)


def test_the_penalty_begins_at_the_buffer_and_ends_at_its_factor():
    lost = overlong_penalty(torch.tensor([0, 80, 90, 100, 200]), max_tokens=100, buffer=20, factor=0.5)
    assert lost.tolist() == [0.0, 0.0, 0.25, 0.5, 0.5]


def test_rows_that_learn_nothing_are_found():
    mask, offsets = torch.tensor([True, False, True, True]), torch.tensor([0, 2, 2, 4])
    assert rows_that_learn(torch.tensor([0.0, 5.0, 0.0, -1.0]), mask, offsets).tolist() == [False, False, True]
