"""From a judged batch to what actor and critic learn from: the step of the page between judging and learning.

Owns: which advantage goes with which carrier, and where KL enters the reward. Must not know: how
advantages are computed. Called once per step with the whole batch, so that whitening and group baselines
see every row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rallypoint.algorithms.aggregation import AggregationName, aggregate
from rallypoint.algorithms.estimators import GAE, Advantage, Rewards
from rallypoint.algorithms.kl import KL, kl_penalty
from rallypoint.types import ActorBatch, CriticBatch, JudgedBatch, ValuedBatch


def weigh(
    batch: JudgedBatch, advantage: Advantage, *, kl: KL | None, aggregation: AggregationName = "token"
) -> ActorBatch:
    """Weigh every token by an estimator that needs no critic.

    Args:
        batch: B rows; those with the same `prompt_index` are a group.
        advantage: the estimator.
        kl: the pull towards the reference, or None.
        aggregation: what the loss is to be a mean of.

    Raises:
        ValueError: kl needs logprobs of a reference that the batch does not have, or a reward stands on a
            token that is not trained.
    """
    return _actor_batch(batch, advantage(_earned(batch, kl, None)), kl, aggregation)


def weigh_valued(
    batch: ValuedBatch, advantage: GAE, *, kl: KL | None, aggregation: AggregationName = "token"
) -> tuple[ActorBatch, CriticBatch]:
    """Weigh every token by an estimator with a critic, and say what the critic should have predicted.

    Returns are computed before whitening: the critic learns rewards in their own unit.

    Args:
        batch: B rows with values.
        advantage: the estimator.
        kl: the pull towards the reference, or None.
        aggregation: what the actor's loss is to be a mean of.

    Raises:
        ValueError: as for `weigh`.
    """
    rewards = _earned(batch, kl, batch.values)
    returns = advantage.returns(rewards)
    return _actor_batch(batch, advantage(rewards), kl, aggregation), batch.widen(CriticBatch, returns=returns)


def _earned(batch: JudgedBatch, kl: KL | None, values: Tensor | None) -> Rewards:
    return Rewards(
        token_rewards=_rewards(batch, kl),
        earned=batch.token_rewards,
        loss_mask=batch.loss_mask,
        offsets=batch.offsets,
        groups=batch.prompt_index,
        values=values,
    )


def _rewards(batch: JudgedBatch, kl: KL | None) -> Tensor:
    """[T] token rewards, minus the KL penalty where it belongs to the reward."""
    stray = (batch.token_rewards != 0) & ~batch.loss_mask
    if bool(stray.any()):
        token = int(stray.nonzero()[0])
        raise ValueError(
            f"token_rewards: row {int(batch.row_of_token[token])} has a reward of "
            f"{float(batch.token_rewards[token])} on a token that is not trained (token {token} of the batch), "
            "where it would be lost: put it on the last trained token before"
        )
    if kl is None or kl.placement == "loss":
        return batch.token_rewards
    if batch.old_logprobs is None:
        raise ValueError("KL in the reward is measured by old_logprobs, but nobody has judged the batch")
    penalty = kl_penalty(batch.old_logprobs, _reference_logprobs(batch), kl.estimator)
    return batch.token_rewards - kl.coef * torch.where(batch.loss_mask, penalty, 0.0)


def _actor_batch(batch: JudgedBatch, advantages: Tensor, kl: KL | None, aggregation: AggregationName) -> ActorBatch:
    """Pass the reference and weights on only where the loss needs them."""
    in_loss = kl is not None and kl.placement == "loss"
    reference_logprobs = _reference_logprobs(batch) if in_loss else None
    weights = None
    if aggregation in ("sequence", "prompt"):  # elsewhere all tokens weigh the same
        weights = aggregate(aggregation, batch.loss_mask, batch.offsets, batch.prompt_index, length=1.0).by_row
    return batch.widen(ActorBatch, advantages=advantages, reference_logprobs=reference_logprobs, loss_weights=weights)


def _reference_logprobs(batch: JudgedBatch) -> Tensor:
    if batch.reference_logprobs is None:
        raise ValueError(
            "kl is set, but the batch has no reference_logprobs: give the run a reference role, or pass kl=None"
        )
    return batch.reference_logprobs
