"""What the actor minimises: the policy losses by name, the pull to the reference, and the bonus of entropy.

Owns: these names, sums over trained tokens, and the two losses that hold back the few tokens which make the policy's
entropy collapse, clip-cov and kl-cov (arXiv 2505.22617). Invariants: those of `policy_losses`; tokens are chosen among
all of a step and by the logprobs of the sampler, before any pass, so that no cut changes which they are.

An update changes the entropy of a softmax policy by about minus the covariance of log p and A over what it samples
(theorem 1 of the paper): likely tokens that earn much drive it down, and few tokens have nearly all of the covariance.
"""

from __future__ import annotations

import dataclasses

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rallypoint.algorithms.kl import MAX_LOG_RATIO, MIN_LOGPROB, KLEstimator, kl_penalty, log_ratio
from rallypoint.algorithms.policy_losses import (
    CISPO,
    DPPO,
    GMPO,
    GSPO,
    SAPO,
    Clip,
    Decoupled,
    ImportanceSampling,
    PolicyGradient,
    PolicyLoss,
    PolicyObjective,
    PolicyTokens,
    TokenLosses,
)
from rallypoint.types import Mean, Metrics


def covariances(logprobs: Float[Tensor, " N"], advantages: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
    """Return what each token adds to the covariance, times N; in float64 (eq. 10 of arXiv 2505.22617).

        cov[t] = (logprobs[t] - mean of logprobs) * (advantages[t] - mean of advantages)

    >>> covariances(torch.tensor([-1.0, -3.0, -2.0]), torch.tensor([1.0, -1.0, 0.0])).tolist()
    [1.0, 1.0, 0.0]
    """
    logprobs, advantages = logprobs.double().clamp_min(MIN_LOGPROB), advantages.double()
    return (logprobs - logprobs.mean()) * (advantages - advantages.mean())


def num_chosen(fraction: float, num_tokens: int) -> int:
    """Return how many of so many trained tokens are chosen: at least one, as in the authors' code."""
    return max(1, int(fraction * num_tokens))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClipCov(Clip):
    """`clip`, of which a few tokens, drawn from those whose covariance is within bounds, are left out."""

    fraction: float
    """Share of the trained tokens of a step that is left out, if so many are within the bounds."""
    covariance_low: float
    """Tokens of less are not drawn."""
    covariance_high: float
    """Tokens of more are not drawn."""

    is_watched_at_start = True

    def choose(
        self,
        logprobs: Float[Tensor, " T"],
        advantages: Float[Tensor, " T"],
        loss_mask: Bool[Tensor, " T"],
        seed: int,
    ) -> Bool[Tensor, " T"]:
        """See `PolicyObjective.choose`."""
        trained = loss_mask.nonzero().flatten()
        found = covariances(logprobs[trained], advantages[trained])
        within = trained[(found > self.covariance_low) & (found < self.covariance_high)]
        drawn = torch.randperm(len(within), generator=torch.Generator().manual_seed(seed))
        return _marked(within[drawn[: num_chosen(self.fraction, len(trained))]], loss_mask)

    def by_token(self, tokens: PolicyTokens) -> TokenLosses:
        """See `PolicyObjective.by_token`."""
        losses, watched = super().by_token(tokens)
        selected = _selected(tokens)
        return torch.where(selected, 0.0, losses), {**watched, "apart_fraction": selected}


@dataclasses.dataclass(frozen=True, kw_only=True)
class KLCov(PolicyObjective):
    """The surrogate without bounds, where the few tokens of the highest covariance are held to the old policy.

    loss = -r * A + coef * |log r|        of these tokens, as in the authors' code;  -r * A  of all others
    """

    fraction: float
    """Share of the trained tokens of a step that is held; fewer if not so many have a covariance above 0."""
    coef: float
    """Coefficient of the KL."""

    needs_advantage = False
    is_watched_at_start = True

    def choose(
        self,
        logprobs: Float[Tensor, " T"],
        advantages: Float[Tensor, " T"],
        loss_mask: Bool[Tensor, " T"],
        seed: int,
    ) -> Bool[Tensor, " T"]:
        """See `PolicyObjective.choose`."""
        del seed
        trained = loss_mask.nonzero().flatten()
        found, order = covariances(logprobs[trained], advantages[trained]).sort(descending=True, stable=True)
        return _marked(trained[order[found > 0][: num_chosen(self.fraction, len(trained))]], loss_mask)

    def by_token(self, tokens: PolicyTokens) -> TokenLosses:
        """See `PolicyObjective.by_token`."""
        selected = _selected(tokens)
        held = torch.where(selected, self.coef * tokens.log_ratio.abs(), 0.0)
        return held - tokens.ratio * tokens.advantages, {"apart_fraction": selected}


def _marked(positions: Tensor, like: Tensor) -> Tensor:
    return torch.zeros_like(like).index_fill_(0, positions, True)


def _selected(tokens: PolicyTokens) -> Tensor:
    if tokens.selected is None:
        raise ValueError("nobody has chosen the tokens of this loss: see `ActorLoss.with_selected`")
    return tokens.selected


OBJECTIVES: dict[str, type[PolicyObjective]] = {
    "clip": Clip,
    "decoupled": Decoupled,
    "policy_gradient": PolicyGradient,
    "importance_sampling": ImportanceSampling,
    "gspo": GSPO,
    "gmpo": GMPO,
    "cispo": CISPO,
    "sapo": SAPO,
    "dppo": DPPO,
    "clip_cov": ClipCov,
    "kl_cov": KLCov,
}
"""Every policy loss by the name that a config has for it."""


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
    """Return `Clip` of tokens whose rows and sampler play no part."""
    tokens = PolicyTokens(
        logprobs=logprobs,
        old_logprobs=old_logprobs,
        rollout_logprobs=old_logprobs,
        advantages=advantages,
        loss_mask=loss_mask,
        rows=torch.zeros_like(loss_mask, dtype=torch.int64),
        num_rows=1,
    )
    return Clip(clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)(tokens)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class KLLoss:
    """What `kl_loss` returns; every field is a scalar tensor."""

    sum: Float[Tensor, ""]
    """Over trained tokens, with gradient."""
    estimate: Float[Tensor, ""]
    """The same, of tokens that no correction weighs or leaves out: to be watched."""
    weight: Float[Tensor, ""] | Int[Tensor, ""]
    """Sum of the tokens' weights: their number, where all are 1."""

    def metrics(self) -> Metrics:
        """Return the mean of this part of the batch."""
        return Metrics({"reference_kl": Mean(float(self.estimate), float(self.weight))})


def kl_loss(
    logprobs: Float[Tensor, " T"],
    reference_logprobs: Float[Tensor, " T"],
    loss_mask: Bool[Tensor, " T"],
    *,
    estimator: KLEstimator,
    corrected_from: Float[Tensor, " T"] | None = None,
    correction: Float[Tensor, " T"] | None = None,
    weights: Float[Tensor, " T"] | None = None,
) -> KLLoss:
    """Return the estimated KL(policy || reference), summed over trained tokens; see `kl_penalty`.

    With r = exp(logprobs - old_logprobs), the gradient of r k3 is r k1 times that of logprobs. The gradient of r k1 is
    r (k1 + 1) times it: the 1 is a constant, which is 0 in expectation only where no weight depends on what is
    sampled, unlike a row's length, a mask, or a weight for older samplers. So k1 gets the gradient of k3.

    Args:
        logprobs: [T] of the policy as it is.
        reference_logprobs: [T] of the reference.
        loss_mask: [T] True at trained tokens.
        estimator: of the divergence.
        corrected_from: [T] old_logprobs, to weigh each token's estimate with exp(logprobs - old_logprobs); with
            gradient, so that it stays that of the divergence however far the policy has moved (arXiv 2512.02556).
        correction: [T] of the gap between sampler and trainer, see `corrections`; None is 1 for each token.
        weights: [T] of aggregation, see `aggregation`; None is 1 for each token.

    >>> policy, reference = torch.tensor([0.5, 0.25, 0.9]).log(), torch.tensor([0.25, 0.5, 0.1]).log()
    >>> mask = torch.tensor([True, True, False])
    >>> round(float(kl_loss(policy, reference, mask, estimator="k3").sum), 4)  # 0.1931 + 0.3069
    0.5
    """
    logprobs, reference_logprobs = (torch.where(loss_mask, x, 0.0) for x in (logprobs, reference_logprobs))
    penalty = kl_penalty(logprobs, reference_logprobs, estimator)
    if corrected_from is not None:
        moved = log_ratio(logprobs, torch.where(loss_mask, corrected_from, 0.0))
        penalty = penalty.detach() if estimator == "k1" else penalty
        penalty = penalty * moved.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    total = _total(penalty, loss_mask, weights)
    estimate = total.detach()
    if correction is not None:
        total = _total(penalty * torch.where(loss_mask, correction, 0.0), loss_mask, weights)
    return KLLoss(sum=total, estimate=estimate, weight=_weight(loss_mask, weights))


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class EntropyBonus:
    """What `entropy_bonus` returns; every field is a scalar tensor."""

    sum: Float[Tensor, ""]
    """Over trained tokens, with gradient; to be subtracted from the loss."""
    weight: Float[Tensor, ""] | Int[Tensor, ""]
    """Sum of the tokens' weights: their number, where all are 1."""

    def metrics(self) -> Metrics:
        """Return the mean of this part of the batch."""
        return Metrics({"entropy": Mean(float(self.sum.detach()), float(self.weight))})


def entropy_bonus(
    entropy: Float[Tensor, " T"], loss_mask: Bool[Tensor, " T"], *, weights: Float[Tensor, " T"] | None = None
) -> EntropyBonus:
    """Return the policy's entropy, summed over trained tokens.

    Args:
        entropy: [T] of the distribution that token t was chosen from, as the engine computed it.
        loss_mask: [T] True at trained tokens.
        weights: [T] of aggregation, see `aggregation`; None is 1 for each token.
    """
    total = _total(torch.where(loss_mask, entropy, 0.0), loss_mask, weights)
    return EntropyBonus(sum=total, weight=_weight(loss_mask, weights))


def _total(x: Tensor, loss_mask: Tensor, weights: Tensor | None) -> Tensor:
    """Sum of numbers that are 0 where no token is trained."""
    weighed = x if weights is None else x.double() * torch.where(loss_mask, weights, 0.0)
    return weighed.sum(dtype=torch.float64)


def _weight(loss_mask: Tensor, weights: Tensor | None) -> Tensor:
    return loss_mask.sum() if weights is None else torch.where(loss_mask, weights, 0.0).sum(dtype=torch.float64)
