"""From a judged batch to what actor and critic learn from: the step of the page between judging and learning.

Owns: which advantage goes with which carrier, where KL enters the reward, and that masked rows leave when all baselines
are known. Must not know: how advantages are computed. Called once per step with the whole batch, so that whitening and
group baselines see every row.
"""

from __future__ import annotations

import dataclasses
from typing import TypeVar

import torch
from torch import Tensor

from rallypoint.algorithms.aggregation import AggregationName, aggregate
from rallypoint.algorithms.estimators import GAE, Advantage, Rewards
from rallypoint.algorithms.kl import KL, kl_penalty
from rallypoint.algorithms.shaping import RowMask, rows_that_learn
from rallypoint.types import ActorBatch, CriticBatch, JudgedBatch, ScoredBatch, Sequences, ValuedBatch

BatchT = TypeVar("BatchT", bound=Sequences)
_ALL_TRAIN = RowMask()


def weigh(
    batch: JudgedBatch,
    advantage: Advantage,
    *,
    kl: KL | None,
    aggregation: AggregationName = "token",
    mask: RowMask = _ALL_TRAIN,
) -> ActorBatch:
    """Weigh every token by an estimator that needs no critic.

    Args:
        batch: B rows; those with the same `prompt_index` are a group.
        advantage: the estimator.
        kl: the pull towards the reference, or None.
        aggregation: what the loss is to be a mean of.
        mask: rows that do not train.

    Raises:
        ValueError: kl needs logprobs of a reference that the batch does not have, or a reward stands on a
            token that is not trained.
    """
    return _actor_batch(batch, advantage(_earned(batch, kl, None)), kl, aggregation, mask.for_actor(batch))


def rows_with_signal(batch: ScoredBatch, advantage: Advantage, mask: RowMask = _ALL_TRAIN) -> Tensor:
    """Return which rows will have a trained token with an advantage other than 0, where no KL is in the rewards: [B].

    Args:
        batch: B rows that nobody has judged yet.
        advantage: the estimator.
        mask: rows that do not train.
    """
    rewards = _earned(batch.judged(old_logprobs=None, reference_logprobs=None), None, None)
    return rows_that_learn(advantage(rewards), batch.loss_mask, batch.offsets) & mask.for_actor(batch)


def weigh_valued(
    batch: ValuedBatch,
    advantage: GAE,
    *,
    kl: KL | None,
    aggregation: AggregationName = "token",
    mask: RowMask = _ALL_TRAIN,
) -> tuple[ActorBatch, CriticBatch]:
    """Weigh every token by an estimator with a critic, and say what the critic should have predicted.

    Returns are computed before whitening: the critic learns rewards in their own unit.

    Args:
        batch: B rows with values.
        advantage: the estimator.
        kl: the pull towards the reference, or None.
        aggregation: what the actor's loss is to be a mean of.
        mask: rows that do not train.

    Raises:
        ValueError: as for `weigh`.
    """
    rewards = _earned(batch, kl, batch.values)
    returns = advantage.returns(rewards)
    critic_batch = _only(batch.widen(CriticBatch, returns=returns), mask.for_critic(batch))
    return _actor_batch(batch, advantage(rewards), kl, aggregation, mask.for_actor(batch)), critic_batch


def _earned(batch: JudgedBatch, kl: KL | None, values: Tensor | None) -> Rewards:
    return Rewards(
        token_rewards=_rewards(batch, kl),
        earned=batch.token_rewards,
        loss_mask=batch.loss_mask,
        offsets=batch.offsets,
        groups=batch.prompt_index,
        values=values,
        components=_components(batch),
    )


def _components(batch: JudgedBatch) -> dict[str, Tensor]:
    """Return the scores of each row by the name of the reward, where there are several."""
    if batch.reward_parts is None:
        return {}
    return dict(zip(batch.part_names, batch.reward_parts.unbind(1), strict=True))


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


def _actor_batch(
    batch: JudgedBatch, advantages: Tensor, kl: KL | None, aggregation: AggregationName, trains: Tensor
) -> ActorBatch:
    """Pass the reference and weights on only where the loss needs them."""
    in_loss = kl is not None and kl.placement == "loss"
    reference_logprobs = _reference_logprobs(batch) if in_loss else None
    rows = _only(batch.widen(ActorBatch, advantages=advantages, reference_logprobs=reference_logprobs), trains)
    rows = dataclasses.replace(rows, kl_coef=kl.coef) if kl is not None and in_loss else rows
    if aggregation not in ("sequence", "prompt"):  # there all tokens weigh the same
        return rows
    weights = aggregate(aggregation, rows.loss_mask, rows.offsets, rows.prompt_index, length=1.0).by_row
    return dataclasses.replace(rows, loss_weights=weights)


def _only(batch: BatchT, trains: Tensor) -> BatchT:
    """Return the rows that train."""
    return batch if bool(trains.all()) else batch.rows(trains.nonzero().flatten())


def _reference_logprobs(batch: JudgedBatch) -> Tensor:
    if batch.reference_logprobs is None:
        raise ValueError(
            "kl is set, but the batch has no reference_logprobs: give the run a reference role, or pass kl=None"
        )
    return batch.reference_logprobs
