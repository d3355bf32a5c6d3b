"""One rule of what a signal is: rewards that are equal but for rounding train nothing, however they are given."""

import math

import pytest
import torch
from hypothesis import given, strategies as st

from rallypoint.algorithms import ADVANTAGES, KL, OverlongPenalty, RowMask, has_signal, weigh
from rallypoint.types import JudgedBatch

BY_SCORE = {
    "grpo": {"token_discount": None},
    "dr_grpo": {"token_discount": None},
    "lite_ppo": {},
    "rloo": {},
    "reinforce_plus_plus_baseline": {},
    "turn_grpo": {"discount": 1.0, "normalize_std": True},
    "gigpo": {"discount": 1.0, "step_weight": 1.0, "normalize_std": True},
    "max_rl": {},
    "opo": {},
    "pass_at_k": {"k": 2},
}
ESTIMATORS = {
    name: ADVANTAGES[name](whiten=name == "reinforce_plus_plus_baseline", **more) for name, more in BY_SCORE.items()
}
GRPO, RLOO = ESTIMATORS["grpo"], ESTIMATORS["rloo"]
IN_REWARD = KL(coef=1e-3, estimator="k1", placement="reward")


def judged(lists, *, groups=None, parts=None, logprobs=None):
    """Rows of two tokens of prompt and a list of rewards, as scoring makes them of what a function returns."""
    mask = torch.tensor([t >= 2 for row in lists for t in range(2 + len(row))])
    num, tokens = len(lists), torch.zeros(len(mask))
    rewards = torch.tensor([x for row in lists for x in (0.0, 0.0, *row)], dtype=torch.float32)
    offsets = torch.tensor([0, *torch.tensor([2 + len(row) for row in lists]).cumsum(0).tolist()])
    rounding = [math.fsum(row) - math.fsum(torch.tensor(row).tolist()) for row in lists]
    return JudgedBatch(
        offsets=offsets,
        tokens=tokens.long(),
        loss_mask=mask,
        rollout_logprobs=tokens,
        prompt_index=torch.tensor([0] * num if groups is None else groups),
        sample_index=torch.arange(num),
        versions=torch.zeros(num, dtype=torch.int64),
        truncated=torch.zeros(num, dtype=torch.bool),
        turn_states=mask.long(),
        token_rewards=rewards,
        rounding=torch.tensor(rounding, dtype=torch.float64),
        reward_parts=None if parts is None else torch.tensor(parts, dtype=torch.float64),
        part_names=() if parts is None else ("right", "short"),
        old_logprobs=tokens if logprobs is None else logprobs,
        reference_logprobs=tokens,
    )


def trained(batch, advantage, **options):
    """Whether advantages are not all 0, whether dynamic sampling keeps the group, and whether its mask does."""
    found = weigh(batch, advantage, kl=None, **options)
    kept = weigh(batch, advantage, kl=None, mask=RowMask(zero_variance=True), **options)
    return bool((found.advantages != 0).any()), bool(has_signal(batch, advantage).any()), len(kept) > 0


shares = st.lists(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=5), min_size=2, max_size=6)


@pytest.mark.parametrize("name", ESTIMATORS)
@given(shares=shares, total=st.sampled_from([1.0, 37.7, 77.3, 1e-7, 3e5]))
def test_equal_rewards_that_are_spread_over_tokens_in_other_ways_are_no_signal(name, shares, total):
    lists = [[*(total * x for x in row), total * (1.0 - math.fsum(row))] for row in shares]
    assert trained(judged(lists), ESTIMATORS[name]) == (False, False, False)


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("unit", [1e-9, 1e-3, 1.0, 1e6])
def test_a_signal_is_relative_to_the_rewards(name, unit):
    scores = [0.0, 0.0, unit, unit]
    assert trained(judged([[x] for x in scores]), ESTIMATORS[name]) == (True, True, True)
    nearly = [[unit], [unit * (1 - 1e-8)], [unit * (1 + 1e-8)]]
    assert trained(judged(nearly), ESTIMATORS[name]) == (False, False, False)


def test_advantages_that_divide_do_not_depend_on_the_unit_of_rewards():
    of_unit = [weigh(judged([[0.0], [unit], [unit]]), GRPO, kl=None).advantages for unit in (1.0, 1e-9)]
    torch.testing.assert_close(*of_unit)


def test_rewards_that_cancel_out_are_neither_right_nor_different():
    """0.1 + 0.2 - 0.3 is 3e-17 in floating point."""
    lists = [[0.1, 0.2, -0.3], [0.0], [-0.3, 0.1, 0.2]]
    for name, advantage in ESTIMATORS.items():
        assert trained(judged(lists), advantage) == (False, False, False), name


def test_equal_rewards_are_still_equal_after_a_penalty_for_length():
    batch, _ = OverlongPenalty(max_tokens=5, buffer=5, factor=0.3)(judged([[0.1, 0.9], [0.7, 0.3], [1.0, 0.0]]))
    assert batch.scores.tolist() == pytest.approx([0.88] * 3, abs=1e-15)
    assert trained(batch, RLOO) == (False, False, False)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "opo"])
def test_a_kl_in_the_reward_pulls_groups_of_equal_rewards_however_weak_it_is(name):
    """It is compared by itself: beside a reward of 77.3, float32 keeps nothing of it."""
    logprobs = torch.tensor([0.0, 0.0, -1e-4, -3e-4, 0.0, 0.0, -1e-4, -1e-4])
    batch = judged([[7.3, 70.0], [30.0, 47.3]], logprobs=logprobs)
    found = weigh(batch, ESTIMATORS[name], kl=IN_REWARD).advantages
    factor = 2.0 if name == "rloo" else 1.0
    assert found[2::4].tolist() == pytest.approx([factor * 1e-7, -factor * 1e-7], rel=1e-4)


def gdpo(weights):
    return ADVANTAGES["gdpo"](whiten=False, weights=weights)


@pytest.mark.parametrize(
    ("parts", "weights", "has_one"),
    [
        # Both earn 1 in all, but one of them is right: the deviations differ, and the sum hides it.
        ([[1.0, 0.0], [0.0, 100.0]], {"right": 1.0, "short": 0.01}, True),
        ([[1.0, 0.0], [0.0, 1.0]], {"right": 1.0, "short": 0.5}, True),
        # The sums differ, but not what is compared: each reward is normalised, and they cancel out.
        ([[3.0, 0.0], [0.0, 1.0]], {"right": 1.0, "short": 1.0}, False),
        # What differs has no weight.
        ([[1.0, 0.0], [1.0, 1.0]], {"right": 1.0, "short": 0.0}, False),
        ([[1.0, 0.1], [1.0, 0.1]], {"right": 1.0, "short": 1.0}, False),
    ],
)
def test_several_rewards_are_judged_by_what_gdpo_compares(parts, weights, has_one):
    ordinary = [[1.0, 1.0], [0.0, 0.0]]
    lists = [[math.fsum(w * x for w, x in zip(weights.values(), row, strict=True))] for row in (*parts, *ordinary)]
    batch = judged(lists, groups=[0, 0, 1, 1], parts=[*parts, *ordinary])
    assert has_signal(batch, gdpo(weights)).tolist() == [has_one, has_one, True, True]
    advantages = weigh(batch, gdpo(weights), kl=None).advantages[batch.loss_mask]
    assert (advantages != 0).tolist() == [has_one, has_one, True, True]
    kept = weigh(batch, gdpo(weights), kl=None, mask=RowMask(zero_variance=True))
    assert kept.prompt_index.tolist() == ([0, 0] if has_one else []) + [1, 1]


def test_gdpo_normalizes_each_reward_over_the_rows_that_it_applies_to():
    """TRL's `normalize_then_sum`: deviations of what is there, and 0 in place of what is not."""
    nan = math.nan
    parts = [[1.0, nan], [0.0, nan], [nan, 5.0], [nan, 7.0], [1.0, nan], [nan, nan], [1.0, nan], [1.0, 2.0]]
    lists = [[math.fsum(x for x in row if not math.isnan(x))] for row in parts]
    batch = judged(lists, groups=[0, 0, 1, 1, 2, 2, 3, 3], parts=parts)
    both = gdpo({"right": 1.0, "short": 1.0})
    assert has_signal(batch, both).tolist() == [True] * 4 + [False] * 4
    found = weigh(batch, both, kl=None).advantages[batch.loss_mask]
    assert found.tolist() == pytest.approx([math.sqrt(2), -math.sqrt(2), -math.sqrt(2), math.sqrt(2), 0, 0, 0, 0])


def test_right_answers_of_other_scores_are_no_signal_where_right_ones_are_counted():
    batch, counts = judged([[1.0], [0.5], [0.75]]), ESTIMATORS["pass_at_k"]
    assert trained(batch, counts) == (False, False, False)
    assert trained(batch, RLOO) == (True, True, True)


def test_process_supervision_compares_rewards_of_tokens():
    by_token = ADVANTAGES["grpo"](token_discount=1.0, whiten=False)
    assert trained(judged([[0.2, 0.8], [0.6, 0.4]]), by_token) == (True, True, True)
    assert trained(judged([[0.1, 0.1], [0.1, 0.1, 0.1]]), by_token) == (False, False, False)
