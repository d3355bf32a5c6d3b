"""From a judged batch to what actor and critic learn from: the step of the page between judging and learning.

Owns: which advantage goes with which carrier, and where KL enters the reward. Must not know: how
advantages are computed. Called once per step with the whole batch, so that whitening and group baselines
see every row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rallypoint.algorithms._rows import numbered
from rallypoint.algorithms.advantages import (
    gae_advantages,
    group_relative_advantages,
    group_relative_token_advantages,
    whiten,
)
from rallypoint.algorithms.kl import KL, kl_penalty
from rallypoint.types import ActorBatch, CriticBatch, JudgedBatch, ValuedBatch


def gae(
    batch: ValuedBatch, *, discount: float, gae_lambda: float, whiten_advantages: bool, kl: KL | None
) -> tuple[ActorBatch, CriticBatch]:
    """Weigh every token by generalised advantage estimation, as PPO does.

    Returns are computed before whitening: the critic learns rewards in their own unit.

    Args:
        batch: B rows with values.
        discount: gamma.
        gae_lambda: lambda.
        whiten_advantages: give advantages mean 0 and standard deviation 1 over the batch.
        kl: the pull towards the reference, or None.

    Raises:
        ValueError: kl needs logprobs of a reference that the batch does not have, or a reward stands on a
            token that is not trained.
    """
    advantages, returns = gae_advantages(
        _rewards(batch, kl),
        batch.values,
        batch.loss_mask,
        batch.offsets,
        discount=discount,
        gae_lambda=gae_lambda,
    )
    if whiten_advantages:
        advantages = whiten(advantages, batch.loss_mask)
    return _actor_batch(batch, advantages, kl), batch.widen(CriticBatch, returns=returns)


def group_relative(
    batch: JudgedBatch, *, normalize_std: bool, token_discount: float | None, kl: KL | None
) -> ActorBatch:
    """Weigh every rollout against the others of its prompt, as GRPO does.

    KL in the reward is subtracted from the tokens' rewards first, and so enters scores and baselines. The
    standard deviation of a group whose rewards are all equal would then be that of the penalties alone, and
    dividing by it would blow up what `kl.coef` made small: a penalty of a thousandth would weigh as much as
    a right answer. Such a group is centred and not divided.

    Args:
        batch: B rows; those with the same `prompt_index` are a group.
        normalize_std: divide by the group's standard deviation (GRPO) or not (Dr. GRPO).
        token_discount: None gives all trained tokens of a row the advantage of the row's score; a number
            gives each token the normalised rewards from it to the row's end, discounted (process supervision).
        kl: the pull towards the reference, or None.

    Raises:
        ValueError: kl needs logprobs of a reference that the batch does not have, or a reward stands on a
            token that is not trained.
    """
    rewards = _rewards(batch, kl)

    def relative(token_rewards: Tensor, *, normalize_std: bool) -> Tensor:
        if token_discount is None:
            return _by_row(batch, token_rewards, normalize_std=normalize_std)
        return group_relative_token_advantages(
            token_rewards,
            batch.loss_mask,
            batch.offsets,
            batch.prompt_index,
            normalize_std=normalize_std,
            discount=token_discount,
        )

    advantages = relative(rewards, normalize_std=normalize_std)
    if normalize_std and kl is not None and kl.placement == "reward":
        differs = _in_groups_with(relative(batch.token_rewards, normalize_std=False) != 0, batch)
        advantages = torch.where(differs, advantages, relative(rewards, normalize_std=False))
    return _actor_batch(batch, advantages, kl)


def _by_row(batch: JudgedBatch, token_rewards: Tensor, *, normalize_std: bool) -> Tensor:
    """[T] the advantage of its row's score, at every trained token."""
    scores = torch.zeros(len(batch), dtype=torch.float64).index_add_(0, batch.row_of_token, token_rewards.double())
    row_advantages = group_relative_advantages(scores, batch.prompt_index, normalize_std=normalize_std)
    return torch.where(batch.loss_mask, row_advantages[batch.row_of_token], 0.0).to(token_rewards.dtype)


def _in_groups_with(tokens: Tensor, batch: JudgedBatch) -> Tensor:
    """[T] True at every token of a group in which one token or more is marked; `tokens` is [T] bool."""
    group, num_groups = numbered(batch.prompt_index)
    num_marked = torch.zeros(num_groups, dtype=torch.int64).index_add_(0, group[batch.row_of_token], tokens.long())
    return (num_marked > 0)[group][batch.row_of_token]


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


def _actor_batch(batch: JudgedBatch, advantages: Tensor, kl: KL | None) -> ActorBatch:
    """Pass the reference on only where the loss needs it."""
    in_loss = kl is not None and kl.placement == "loss"
    reference_logprobs = _reference_logprobs(batch) if in_loss else None
    return batch.widen(ActorBatch, advantages=advantages, reference_logprobs=reference_logprobs)


def _reference_logprobs(batch: JudgedBatch) -> Tensor:
    if batch.reference_logprobs is None:
        raise ValueError(
            "kl is set, but the batch has no reference_logprobs: give the run a reference role, or pass kl=None"
        )
    return batch.reference_logprobs
