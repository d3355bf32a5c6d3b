"""What long, truncated and signal-less rollouts do to a step, against numbers made by hand."""

import dataclasses

import pytest
import torch
from formulas import losses as formulas

from rallypoint.algorithms import ADVANTAGES, OverlongPenalty, RowMask, has_signal, weigh, weigh_valued
from rallypoint.algorithms.shaping import overlong_penalty
from rallypoint.types import JudgedBatch

LENGTHS = (1, 3, 2, 4, 0)
SCORES = (1.0, 0.0, 2.0, 2.0, 0.0)
DR_GRPO = ADVANTAGES["dr_grpo"](token_discount=None, whiten=False)
TRUNCATED = (False, True, False, True, False)


def judged(truncated=TRUNCATED, scores=SCORES):
    """Prompts of rows 0 and 1, 2 and 3, and 4; each row has a token of prompt, the last one no other."""
    rows = [[False] + [True] * length for length in LENGTHS]
    mask = torch.tensor([trained for row in rows for trained in row])
    offsets = torch.tensor([0, *torch.tensor([len(row) for row in rows]).cumsum(0).tolist()])
    rewards = torch.zeros(len(mask))
    rewards[offsets[1:] - 1] = torch.tensor(scores)
    return JudgedBatch(
        offsets=offsets,
        tokens=torch.arange(len(mask)),
        loss_mask=mask,
        rollout_logprobs=torch.zeros(len(mask)),
        prompt_index=torch.tensor([3, 3, 8, 8, 9]),
        sample_index=torch.tensor([0, 1, 0, 1, 0]),
        versions=torch.zeros(5, dtype=torch.int64),
        truncated=torch.tensor(truncated),
        token_rewards=rewards,
        old_logprobs=torch.zeros(len(mask)),
        reference_logprobs=None,
    )


def weighed(mask, aggregation="token", **fields):
    return weigh(judged(**fields), DR_GRPO, kl=None, aggregation=aggregation, mask=mask)


def test_the_penalty_falls_on_the_last_token_and_its_mean_counts_all_rows():
    penalty = OverlongPenalty(max_tokens=4, buffer=2, factor=0.5)
    before = judged()
    after, metrics = penalty(before)
    assert (after.scores - before.scores).tolist() == [0.0, -0.25, 0.0, -0.5, 0.0]
    assert (after.token_rewards != before.token_rewards).nonzero().flatten().tolist() == [5, 13]
    assert metrics.scalars() == {"reward/overlong_penalty": pytest.approx(0.75 / 5)}


def test_what_each_of_several_rewards_said_stays_with_rows_that_have_a_penalty():
    parts = torch.tensor([[1.0, 0.0]] * 5, dtype=torch.float64)
    batch = dataclasses.replace(judged(), reward_parts=parts, part_names=("right", "short"))
    after, _ = OverlongPenalty(max_tokens=4, buffer=2, factor=0.5)(batch)
    assert after.part_names == ("right", "short")
    assert after.reward_parts is not None
    assert after.reward_parts.equal(parts)


@pytest.mark.parametrize(("max_tokens", "buffer", "factor"), [(10, 4, 1.0), (7, 7, 0.5), (12, 1, 2.0)])
def test_the_penalty_of_every_length_is_that_of_the_paper(max_tokens, buffer, factor):
    bounds = {"max_tokens": max_tokens, "buffer": buffer, "factor": factor}
    found = overlong_penalty(torch.arange(16), **bounds)
    assert found.tolist() == pytest.approx([formulas.overlong(length, **bounds) for length in range(16)])


def test_truncated_rows_do_not_train_and_count_in_the_baseline_of_their_prompt():
    all_rows, kept = weighed(RowMask()), weighed(RowMask(truncated=True))
    assert kept.prompt_index.tolist() == [3, 8, 9]
    assert kept.sample_index.tolist() == [0, 0, 0]
    assert kept.advantages.tolist() == all_rows.rows([0, 2, 4]).advantages.tolist() == [0.0, 0.5, 0.0, 0.0, 0.0, 0.0]


def test_masked_rows_count_in_no_denominator():
    kept = weighed(RowMask(truncated=True), aggregation="prompt")
    assert kept.loss_weights.tolist()[:2] == [1.0, 0.5], "the whole of their prompts' means"
    assert kept.num_loss_tokens == 3


def test_groups_without_a_difference_do_not_train_the_policy():
    kept = weighed(RowMask(zero_variance=True))
    assert kept.prompt_index.tolist() == [3, 3], "scores 2 and 2 are equal, and one alone has no other"
    both = weighed(RowMask(truncated=True, zero_variance=True))
    assert both.prompt_index.tolist() == [3]


def test_groups_differ_by_their_scores_and_not_by_what_their_length_costs():
    """As with dynamic sampling, which chooses groups before the penalty: this is the same without new prompts."""
    mask, penalty = RowMask(zero_variance=True), OverlongPenalty(max_tokens=4, buffer=2, factor=0.5)

    def trained(batch):
        return mask.for_actor(batch, has_signal(batch, DR_GRPO))

    after, _ = penalty(judged())
    assert after.scores.tolist() == [1.0, -0.25, 2.0, 1.5, 0.0], "rows 2 and 3 are of one prompt, and equally right"
    assert trained(after).tolist() == [True, True, False, False, False]
    made_equal, _ = penalty(judged(scores=(0.5, 0.75, 2.0, 2.5, 0.0)))
    assert made_equal.scores.tolist()[:4] == [0.5, 0.5, 2.0, 2.0]
    assert trained(made_equal).tolist() == [True, True, True, True, False]
    assert trained(made_equal.rows([4, 2, 3])).tolist() == [False, True, True]


def test_a_step_of_truncated_rows_trains_nothing():
    kept = weighed(RowMask(truncated=True), truncated=(True,) * 5, aggregation="sequence")
    assert len(kept) == kept.num_tokens == 0


def test_a_critic_learns_from_groups_without_a_difference_and_not_from_truncated_rows():
    batch = judged()
    gae = ADVANTAGES["gae"](
        discount=1.0, gae_lambda=1.0, value_lambda=None, length_alpha=None, unit="token", whiten=False
    )
    mask = RowMask(truncated=True, zero_variance=True)
    actor, critic = weigh_valued(batch.valued(torch.zeros(batch.num_tokens)), gae, kl=None, mask=mask)
    assert actor.prompt_index.tolist() == [3]
    assert critic.prompt_index.tolist() == [3, 8, 9]
    assert critic.returns.tolist() == [0.0, 1.0, 0.0, 2.0, 2.0, 0.0]
