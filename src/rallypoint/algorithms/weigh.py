"""Advantages: from a batch with logprobs and values to what actor and critic learn from.

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
from rallypoint.algorithms.estimators import GAE
from rallypoint.algorithms.group_relative import Advantage
from rallypoint.algorithms.kl import KL, kl_penalty
from rallypoint.algorithms.rewards import Rewards
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
        kl: the KL to the reference, or None.
        aggregation: what the loss is to be a mean of.
        mask: rows that do not train.

    Raises:
        ValueError: kl needs logprobs of a reference that the batch does not have, or a reward stands on a
            token that is not trained.
    """
    trains = mask.for_actor(batch, has_signal(batch, advantage))
    return _actor_batch(batch, advantage(_earned(batch, kl, None)), kl, aggregation, trains)


def has_signal(batch: ScoredBatch, advantage: Advantage) -> Tensor:
    """Return which rows are of a prompt with a signal, before a penalty for length or KL: [B]; see `Advantage.signal`.

    Args:
        batch: B rows, all of their prompts.
        advantage: the estimator.
    """
    rewards = _earned(batch, None, None)
    if batch.scores_before is not None:
        rewards = dataclasses.replace(rewards, rounding=None)
        rewards = dataclasses.replace(rewards, rounding=batch.scores_before - rewards.earned_scores)
    return advantage.signal(rewards)


def rows_with_signal(batch: ScoredBatch, advantage: Advantage, mask: RowMask = _ALL_TRAIN) -> Tensor:
    """Return which rows will have a trained token with an advantage other than 0, where no KL is in the rewards: [B].

    Args:
        batch: B rows that nobody has judged yet.
        advantage: the estimator.
        mask: rows that do not train.
    """
    learns = rows_that_learn(advantage(_earned(batch, None, None)), batch.loss_mask, batch.offsets)
    return learns & mask.for_actor(batch, has_signal(batch, advantage))


def weigh_valued(
    batch: ValuedBatch,
    advantage: GAE,
    *,
    kl: KL | None,
    aggregation: AggregationName = "token",
    mask: RowMask = _ALL_TRAIN,
) -> tuple[ActorBatch, CriticBatch]:
    """Weigh every token by an estimator with a critic, and return what the critic should have predicted.

    Returns are computed before whitening: the critic learns rewards in their own unit.

    Args:
        batch: B rows with values.
        advantage: the estimator.
        kl: the KL to the reference, or None.
        aggregation: what the actor's loss is to be a mean of.
        mask: rows that do not train.

    Raises:
        ValueError: as for `weigh`.
    """
    rewards = _earned(batch, kl, batch.values)
    returns = advantage.returns(rewards)
    critic_batch = _only(batch.widen(CriticBatch, returns=returns), mask.for_critic(batch))
    trains = mask.for_actor(batch, has_signal(batch, advantage))
    return _actor_batch(batch, advantage(rewards), kl, aggregation, trains), critic_batch


def _earned(batch: ScoredBatch, kl: KL | None, values: Tensor | None) -> Rewards:
    _check_places(batch)
    penalty = None if kl is None or kl.placement == "loss" else _penalty(batch, kl)
    return Rewards(
        token_rewards=batch.token_rewards if penalty is None else batch.token_rewards - penalty,
        earned=batch.token_rewards,
        loss_mask=batch.loss_mask,
        offsets=batch.offsets,
        groups=batch.prompt_index,
        values=values,
        components=_components(batch),
        rounding=batch.rounding,
        penalty=penalty,
        turn_states=batch.turn_states,
    )


def _components(batch: ScoredBatch) -> dict[str, Tensor]:
    """Return the scores of each row by the name of the reward, where there are several."""
    if batch.reward_parts is None:
        return {}
    return dict(zip(batch.part_names, batch.reward_parts.unbind(1), strict=True))


def _check_places(batch: ScoredBatch) -> None:
    """Refuse rewards of tokens that are not trained."""
    stray = (batch.token_rewards != 0) & ~batch.loss_mask
    if bool(stray.any()):
        token = int(stray.nonzero()[0])
        raise ValueError(
            f"token_rewards: row {int(batch.row_of_token[token])} has a reward of "
            f"{float(batch.token_rewards[token])} on a token that is not trained (token {token} of the batch), "
            "where it would be lost: put it on the last trained token before"
        )


def _penalty(batch: ScoredBatch, kl: KL) -> Tensor:
    """[T] what KL in the reward costs."""
    if not isinstance(batch, JudgedBatch) or batch.old_logprobs is None:
        raise ValueError("KL in the reward is measured by old_logprobs, but nobody has judged the batch")
    penalty = kl_penalty(batch.old_logprobs, _reference_logprobs(batch), kl.estimator)
    return kl.coef * torch.where(batch.loss_mask, penalty, 0.0)


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
