"""What the actor minimises: sums over trained tokens, and the numbers worth watching beside them.

Owns: the formulas. Must not know: the denominator, which is global (all ranks, all micro-batches) and
applied by the caller; coefficients; how tokens were cut into micro-batches. Invariants: `sum` alone carries
gradient; sums are float64, so that a loss does not depend on the cut; numbers outside the mask have no
effect, even NaN. Tensors may be whole [T] streams with their mask, or the trained tokens alone with a mask
that is True everywhere. Nothing waits for the device before `metrics` is called. The same holds for
`critic_losses`.
"""

from __future__ import annotations

import dataclasses

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rallypoint.algorithms.kl import MAX_LOG_RATIO, KLEstimator, kl_penalty, log_ratio
from rallypoint.types import Mean, Metrics, merge


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PolicyLoss:
    """What `policy_loss` returns; every field is a scalar tensor."""

    sum: Float[Tensor, ""]
    """Over trained tokens, with gradient."""
    num_tokens: Int[Tensor, ""]
    """Trained tokens."""
    num_clipped: Int[Tensor, ""]
    """Tokens whose gradient was cut off by a bound: of the ratio, the dual one, or that of the log-ratio."""
    kl_sum: Float[Tensor, ""]
    """k3 estimate of KL(old || current): how far this update has moved."""

    def mean(self) -> Metrics:
        """Return the mean of this part of the batch."""
        return Metrics({"policy_loss": Mean(float(self.sum.detach()), float(self.num_tokens))})

    def metrics(self) -> Metrics:
        """Return that, and how far its ratios are from 1."""
        weight = float(self.num_tokens)
        moved = {"clip_fraction": Mean(float(self.num_clipped), weight), "approx_kl": Mean(float(self.kl_sum), weight)}
        return merge(self.mean(), moved)


def policy_loss(
    logprobs: Float[Tensor, " T"],
    old_logprobs: Float[Tensor, " T"],
    advantages: Float[Tensor, " T"],
    loss_mask: Bool[Tensor, " T"],
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
) -> PolicyLoss:
    """Return PPO's clipped surrogate (arXiv 1707.06347), summed over trained tokens.

        ratio = exp(logprobs - old_logprobs)
        loss  = -min(ratio * A, clamp(ratio, 1 - clip_low, 1 + clip_high) * A)
        loss  = min(loss, -dual_clip * A)        where A < 0, if dual_clip is given (arXiv 1912.09729)

    Equal bounds are PPO's and GRPO's, `clip_high > clip_low` is DAPO's clip-higher (arXiv 2503.14476).
    The log-ratio is cut off at +-20 before `exp`, so that it cannot overflow; a token beyond has no
    gradient, and is counted as clipped.

    Ratios 2, 2, 1/2, 1/2 with advantages of both signs: only where moving on would help is it clipped.
    The last two tokens are not trained.

    >>> result = policy_loss(
    ...     logprobs=torch.tensor([2.0, 2.0, 0.5, 0.5, 9.0, 9.0]).log(),
    ...     old_logprobs=torch.zeros(6),
    ...     advantages=torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0, 1.0]),
    ...     loss_mask=torch.tensor([True, True, True, True, False, False]),
    ...     clip_low=0.2,
    ...     clip_high=0.3,
    ...     dual_clip=None,
    ... )
    >>> round(float(result.sum), 4), int(result.num_clipped)  # -1.3 + 2 - 0.5 + 0.8
    (1.0, 2)
    """
    moved = torch.where(loss_mask, log_ratio(logprobs, old_logprobs), 0.0)
    advantages = torch.where(loss_mask, advantages, 0.0)
    ratio = moved.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    free = ratio * advantages
    bounded = torch.minimum(free, ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages)
    if dual_clip is not None:
        bounded = torch.where(advantages < 0, torch.maximum(bounded, dual_clip * advantages), bounded)
    return PolicyLoss(
        sum=-bounded.sum(dtype=torch.float64),
        num_tokens=loss_mask.sum(),
        num_clipped=((bounded != free) | ((moved.abs() > MAX_LOG_RATIO) & (advantages != 0))).sum(),
        kl_sum=kl_penalty(torch.zeros_like(moved), moved.detach(), "k3").sum(dtype=torch.float64),
    )


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class KLLoss:
    """What `kl_loss` returns; every field is a scalar tensor."""

    sum: Float[Tensor, ""]
    """Over trained tokens, with gradient."""
    num_tokens: Int[Tensor, ""]
    """Trained tokens."""

    def metrics(self) -> Metrics:
        """Return the mean of this part of the batch."""
        return Metrics({"reference_kl": Mean(float(self.sum.detach()), float(self.num_tokens))})


def kl_loss(
    logprobs: Float[Tensor, " T"],
    reference_logprobs: Float[Tensor, " T"],
    loss_mask: Bool[Tensor, " T"],
    *,
    estimator: KLEstimator,
) -> KLLoss:
    """Return the estimated KL(policy || reference), summed over trained tokens; see `kl_penalty`.

    >>> policy, reference = torch.tensor([0.5, 0.25, 0.9]).log(), torch.tensor([0.25, 0.5, 0.1]).log()
    >>> mask = torch.tensor([True, True, False])
    >>> round(float(kl_loss(policy, reference, mask, estimator="k3").sum), 4)  # 0.1931 + 0.3069
    0.5
    """
    logprobs, reference_logprobs = (torch.where(loss_mask, x, 0.0) for x in (logprobs, reference_logprobs))
    penalty = kl_penalty(logprobs, reference_logprobs, estimator)
    return KLLoss(sum=penalty.sum(dtype=torch.float64), num_tokens=loss_mask.sum())


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class EntropyBonus:
    """What `entropy_bonus` returns; every field is a scalar tensor."""

    sum: Float[Tensor, ""]
    """Over trained tokens, with gradient; to be subtracted from the loss."""
    num_tokens: Int[Tensor, ""]
    """Trained tokens."""

    def metrics(self) -> Metrics:
        """Return the mean of this part of the batch."""
        return Metrics({"entropy": Mean(float(self.sum.detach()), float(self.num_tokens))})


def entropy_bonus(entropy: Float[Tensor, " T"], loss_mask: Bool[Tensor, " T"]) -> EntropyBonus:
    """Return the policy's entropy, summed over trained tokens.

    Args:
        entropy: [T] of the distribution that token t was chosen from, as the engine computed it.
        loss_mask: [T] True at trained tokens.
    """
    total = torch.where(loss_mask, entropy, 0.0).sum(dtype=torch.float64)
    return EntropyBonus(sum=total, num_tokens=loss_mask.sum())
