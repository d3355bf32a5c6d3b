"""Losses that hold back the few tokens which make the policy's entropy collapse: clip-cov and kl-cov.

Owns: these two (arXiv 2505.22617), and how their tokens are chosen. Must not know: mini-batches. Invariant: tokens are
chosen among all of a step and by the logprobs of the sampler, before any pass, so that no cut changes which they are.

An update changes the entropy of a softmax policy by about minus the covariance of log p and A over what it samples
(theorem 1 of the paper): likely tokens that earn much drive it down, and few tokens have nearly all of the covariance.
"""

from __future__ import annotations

import dataclasses

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rallypoint.algorithms.kl import MIN_LOGPROB
from rallypoint.algorithms.policy_losses import Clip, PolicyObjective, PolicyTokens, TokenLosses


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
        apart = _apart(tokens)
        return torch.where(apart, 0.0, losses), {**watched, "apart_fraction": apart}


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
        apart = _apart(tokens)
        held = torch.where(apart, self.coef * tokens.log_ratio.abs(), 0.0)
        return held - tokens.ratio * tokens.advantages, {"apart_fraction": apart}


def _marked(positions: Tensor, like: Tensor) -> Tensor:
    return torch.zeros_like(like).index_fill_(0, positions, True)


def _apart(tokens: PolicyTokens) -> Tensor:
    if tokens.apart is None:
        raise ValueError("nobody has chosen the tokens of this loss: see `ActorLoss.set_apart`")
    return tokens.apart
