"""Kullback-Leibler divergence to the reference, estimated from the sampled tokens alone.

Owns: the estimators, and where a run lets the divergence act. Must not know: what else is in the
reward or the loss. Frame of reference: everything is per token and aligned with the tokens.

An estimator with the right value need not have the right gradient. In expectation over sampled tokens:

    placement         estimator     gradient
    reward            k1            that of KL(policy || reference), of whole responses
    loss              k2            that of KL(policy || reference), token by token
    loss              k3            that of KL(reference || policy), token by token: the same minimum, another way there
    loss              abs           that of the sum of |policy - reference| (twice the total variation), token by token
    loss, corrected   k1, k3        that of KL(policy || reference), token by token, also after the policy has moved;
                                    both have the gradient of k3 here, see `kl_loss`
    loss              k1            zero: refused
    loss, corrected   k2, abs       that of no divergence: refused
    reward            k2, k3, abs   likewise; a token that the policy has almost lost is driven out altogether: refused

All of them are 0 at the reference, whatever weighs tokens and rows. Where older weights have sampled, those in the loss
are weighed with old / rollout by the corrections of the policy loss, or as it weighs itself back to the sampler.

`tests/shared/loss_terms.py` holds each to it, on a policy whose responses can be enumerated.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log-ratios are cut off here before `exp`: e**20 = 4.9e8 is far outside every trust region, and finite."""

MIN_LOGPROB = -1000.0
"""Lower logprobs are clamped to this. A model can exclude a token (-inf), and differences must stay finite."""

KLEstimator = Literal["k1", "k2", "k3", "abs"]
"""Schulman's three estimators of a KL divergence from one sample, and the size of the log-ratio."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class KL:
    """The pull towards the reference: how strong, how estimated, and where it acts."""

    coef: float
    """What the divergence is multiplied with; beta in the papers."""
    estimator: KLEstimator
    """k1, k2, k3 or abs."""
    placement: Literal["reward", "loss"]
    """`reward` (InstructGPT, arXiv 2203.02155) subtracts it from every trained token's reward;
    `loss` (DeepSeekMath, arXiv 2402.03300) adds it to the actor's loss."""
    importance_corrected: bool = False
    """In the loss: weigh each token with exp(logprobs - old_logprobs), with its gradient (DeepSeek-V3.2,
    arXiv 2512.02556)."""

    def __post_init__(self) -> None:
        if self.importance_corrected and (self.placement == "reward" or self.estimator in {"k2", "abs"}):
            raise ValueError(
                f"kl: {self.estimator} in the {self.placement} cannot be corrected by importance weights: only k1 and "
                "k3 in the loss have the gradient of the divergence then: use one of them, or leave "
                "importance_corrected out"
            )
        if self.placement == "loss" and self.estimator == "k1" and not self.importance_corrected:
            raise ValueError(
                "kl: k1 in the loss does not pull towards the reference, because its gradient is that of "
                "logprobs, whose expectation is zero: use the estimator k2 or k3, or the placement 'reward'"
            )
        if self.placement == "reward" and self.estimator != "k1":
            raise ValueError(
                f"kl: {self.estimator} in the reward does not pull towards the reference, because only k1 has the "
                "gradient of the divergence there: use the estimator k1, or the placement 'loss'"
            )


def log_ratio(logprobs: Float[Tensor, " T"], other_logprobs: Float[Tensor, " T"]) -> Float[Tensor, " T"]:
    """Return logprobs - other_logprobs, finite also where a model excludes a token; 0 where both do.

    >>> log_ratio(torch.tensor([-1.0, -1.0, -torch.inf]), torch.tensor([-3.0, -torch.inf, -torch.inf])).tolist()
    [2.0, 999.0, 0.0]
    """
    return logprobs.clamp(min=MIN_LOGPROB) - other_logprobs.clamp(min=MIN_LOGPROB)


def kl_penalty(
    logprobs: Float[Tensor, " T"], reference_logprobs: Float[Tensor, " T"], estimator: KLEstimator
) -> Float[Tensor, " T"]:
    """Return each token's estimate of KL(policy || reference), for tokens sampled by the policy.

    With d = reference_logprobs - logprobs (J. Schulman, http://joschu.net/blog/kl-approx.html):

        k1 = -d                 unbiased, but often negative
        k2 = d**2 / 2           biased, never negative; its gradient is unbiased
        k3 = exp(d) - 1 - d     unbiased, never negative; its gradient is that of KL(reference || policy)
        abs = |d|               no estimate of the divergence; its gradient is that of twice the total variation

    In k3, d is cut off at 20 so that it cannot overflow: above that it is constant, about 4.9e8, and its
    gradient is zero. d is not cut off below, where k3 is the straight line -1 - d. See `log_ratio` for
    logprobs of -inf.

    >>> policy = torch.tensor([0.5, 0.25, 0.25]).log()
    >>> reference = torch.tensor([0.25, 0.25, 0.5]).log()
    >>> for estimator in ("k1", "k2", "k3"):
    ...     print(estimator, [round(k, 4) for k in kl_penalty(policy, reference, estimator).tolist()])
    k1 [0.6931, 0.0, -0.6931]
    k2 [0.2402, 0.0, 0.2402]
    k3 [0.1931, 0.0, 0.3069]

    Args:
        logprobs: [T] of the policy that sampled the tokens.
        reference_logprobs: [T] of the same tokens, by the reference.
        estimator: k1, k2, k3 or abs.

    Raises:
        ValueError: there is no such estimator.
    """
    d = log_ratio(reference_logprobs, logprobs)
    match estimator:
        case "k1":
            return log_ratio(logprobs, reference_logprobs)
        case "k2":
            return 0.5 * d.square()
        case "k3":
            d = d.clamp(max=MAX_LOG_RATIO)
            return torch.expm1(d) - d
        case "abs":
            return d.abs()
        case _:
            raise ValueError(f"estimator: expected 'k1', 'k2', 'k3' or 'abs', found {estimator!r}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdaptiveKL:
    """A coefficient that holds the divergence near a target (Ziegler et al., arXiv 1909.08593, section 2.2)."""

    target: float
    """The divergence wanted, in nats a token."""
    horizon: float
    """Rollouts in which the coefficient may grow or shrink by a factor of about e**0.2."""

    def next(self, coef: float, kl: float, num_rollouts: int) -> float:
        """Return the coefficient after a step of so many rollouts, at most `horizon`, whose mean divergence was `kl`.

        >>> AdaptiveKL(target=0.1, horizon=1000.0).next(coef=1.0, kl=0.5, num_rollouts=100)
        1.02
        """
        if not math.isfinite(kl):
            return coef
        error = min(max(kl / self.target - 1.0, -0.2), 0.2)
        return coef * (1.0 + error * num_rollouts / self.horizon)
