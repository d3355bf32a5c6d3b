"""What is done about a sampler that does not agree with the trainer: weights and masks for the policy loss.

The sampler runs other kernels, in another precision, and in asynchronous runs older weights. With rho = old / rollout,
the trainer's probability of a token at the start of the update over the sampler's:

    tis              min(rho, cap) by token, or of the product over the row
    icepop           rho where low <= rho <= high, else 0
    mask             1 where rho is within bounds, else 0: by token, or by the row's product or geometric mean
    kl_mask          1 in rows whose estimated KL(rollout || old) is at most a bound, else 0
    off_policy_mask  0 in rows with A < 0 that the policy has left, else 1

Owns: these formulas, and the numbers that show the gap in every run. Must not know: denominators: a correction weighs
tokens and never changes how many there are. Invariants: nothing here has a gradient; several corrections multiply;
rows are whole, so that no cut changes a weight.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from rallypoint.algorithms.kl import MAX_LOG_RATIO, log_ratio
from rallypoint.algorithms.policy_losses import CISPO, DPPO, Anchored, Decoupled, PolicyObjective, PolicyTokens
from rallypoint.types import Maximum, Mean, Metric, Metrics


@dataclasses.dataclass(frozen=True, kw_only=True)
class Correction(abc.ABC):
    """A weight for each token, with its parameters."""

    weighs_kl: ClassVar[bool] = True
    """Whether it weighs a KL in the loss as well: unless it is about advantages, which that has none of."""

    @abc.abstractmethod
    def weights(self, tokens: PolicyTokens, gap: Float[Tensor, " T"]) -> Float[Tensor, " T"]:
        """Return the weight of each token.

        Args:
            tokens: with zeros where no token is trained, and no gradient.
            gap: log rho of each token, and 0 where none is trained.
        """


def _exp(gap: Tensor) -> Tensor:
    return gap.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


@dataclasses.dataclass(frozen=True, kw_only=True)
class TIS(Correction):
    """Truncated importance sampling (fengyao.notion.site/off-policy-rl; Ionides 2008)."""

    level: Literal["token", "sequence"]
    """Whether rho is that of each token, or the product over its row: less biased, and of more variance."""
    cap: float
    """The largest weight."""

    def weights(self, tokens: PolicyTokens, gap: Float[Tensor, " T"]) -> Float[Tensor, " T"]:
        """See `Correction.weights`."""
        return _exp(gap if self.level == "token" else tokens.row_totals(gap)).clamp(max=self.cap)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mask(Correction):
    """Leave out tokens or rows that the trainer finds much more, or much less, likely than the sampler."""

    level: Literal["token", "product", "geometric"]
    """Whether a token is judged by its own rho, or a row by the product or geometric mean of its tokens'."""
    low: float
    """The smallest rho that stays."""
    high: float
    """The largest rho that stays."""

    def weights(self, tokens: PolicyTokens, gap: Float[Tensor, " T"]) -> Float[Tensor, " T"]:
        """See `Correction.weights`."""
        if self.level != "token":
            gap = tokens.row_totals(gap) if self.level == "product" else tokens.row_means(gap)
        ratio = _exp(gap)
        return torch.where(ratio.isnan(), ratio, ((ratio >= self.low) & (ratio <= self.high)).to(ratio.dtype))


@dataclasses.dataclass(frozen=True, kw_only=True)
class IcePop(Correction):
    """IcePop (arXiv 2510.18855): `mask` by token, and `tis` for those that stay."""

    low: float
    """The smallest rho that stays."""
    high: float
    """The largest rho that stays."""

    def weights(self, tokens: PolicyTokens, gap: Float[Tensor, " T"]) -> Float[Tensor, " T"]:
        """See `Correction.weights`."""
        stays = Mask(level="token", low=self.low, high=self.high).weights(tokens, gap)
        return stays * TIS(level="token", cap=self.high).weights(tokens, gap)


@dataclasses.dataclass(frozen=True, kw_only=True)
class KLMask(Correction):
    """Leave out rows whose mean estimate of KL(rollout || old) is too large; see `kl_penalty` for k2 and k3."""

    estimator: Literal["k2", "k3"]
    """Neither is ever negative, so that gaps of both signs do not cancel."""
    max_kl: float
    """The largest mean that stays, in nats a token."""

    def weights(self, tokens: PolicyTokens, gap: Float[Tensor, " T"]) -> Float[Tensor, " T"]:
        """See `Correction.weights`."""
        mean = tokens.row_means(_k2(gap) if self.estimator == "k2" else _k3(gap))
        return torch.where(mean.isnan(), mean, (mean <= self.max_kl).to(mean.dtype))


@dataclasses.dataclass(frozen=True, kw_only=True)
class OffPolicyMask(Correction):
    """DeepSeek-V3.2's mask (arXiv 2512.02556): leave out rows with A < 0 that have become much less likely.

    Compares the policy as it is with the sampler, so it also counts what this update has moved.
    """

    delta: float
    """The largest mean of log(rollout / current) that stays, in nats a token."""

    weighs_kl = False

    def weights(self, tokens: PolicyTokens, gap: Float[Tensor, " T"]) -> Float[Tensor, " T"]:
        """See `Correction.weights`."""
        left = tokens.row_means(log_ratio(tokens.rollout_logprobs, tokens.logprobs)) > self.delta
        return (~(left & (tokens.advantages < 0))).to(gap.dtype)


def own_weight(objective: PolicyObjective) -> TIS | None:
    """Return the correction by which a policy loss weighs tokens back to the sampler by itself; None if it does not."""
    match objective:
        case Decoupled(max_weight=cap):
            return TIS(level="token", cap=math.inf if cap is None else cap)
        case DPPO(anchor="rollout", max_ratio=cap):
            return TIS(level="token", cap=cap)
        case CISPO(anchor="rollout", clip_high=above):
            return TIS(level="token", cap=1.0 + above)
        case Anchored(anchor="rollout"):
            return TIS(level="token", cap=math.inf)
        case _:
            return None


CORRECTIONS: dict[str, type[Correction]] = {
    "tis": TIS,
    "icepop": IcePop,
    "mask": Mask,
    "kl_mask": KLMask,
    "off_policy_mask": OffPolicyMask,
}
"""Every correction by the name that a config has for it."""


def correct(
    corrections: Sequence[Correction], tokens: PolicyTokens
) -> tuple[Float[Tensor, " T"], dict[str, Float[Tensor, " T"]]]:
    """Return the product of the corrections' weights, and what to watch of it, token by token.

    Three tokens of one row, of which the trainer finds the first four times as likely as the sampler did:

    >>> tokens = PolicyTokens(
    ...     logprobs=torch.tensor([0.8, 0.5, 0.5]).log(),
    ...     old_logprobs=torch.tensor([0.8, 0.5, 0.5]).log(),
    ...     rollout_logprobs=torch.tensor([0.2, 0.5, 0.5]).log(),
    ...     advantages=torch.ones(3),
    ...     loss_mask=torch.tensor([True, True, True]),
    ...     rows=torch.zeros(3, dtype=torch.int64),
    ...     num_rows=1,
    ... )
    >>> correct([TIS(level="token", cap=2.0)], tokens)[0].tolist()
    [2.0, 1.0, 1.0]
    >>> correct([Mask(level="geometric", low=0.9, high=1.1)], tokens)[0].tolist()
    [0.0, 0.0, 0.0]
    """
    tokens = dataclasses.replace(tokens, logprobs=tokens.logprobs.detach()).masked()
    gap = log_ratio(tokens.old_logprobs, tokens.rollout_logprobs)
    total = torch.ones_like(gap)
    for correction in corrections:
        total = total * correction.weights(tokens, gap).to(total.dtype)
    return total, {
        "correction": total,
        "correction_square": total.square(),
        "correction_dropped": total == 0,
    }


WIDE = (0.5, 2.0)
"""Ratios of sampler and trainer within are common, in half precision too; those outside are what masks are for."""


def gap_metrics(rollout_logprobs: Float[Tensor, " N"], old_logprobs: Float[Tensor, " N"]) -> Metrics:
    """Return how far the sampler is from the trainer: the numbers to watch in every run.

    `gap_kl` is the k3 estimate of KL(rollout || old) a token, `gap_chi2` that of the chi-square divergence, `ratio_max`
    the largest rho, `ratio_outside` the share of tokens whose rho is not within `WIDE`, and `gap_log_ppl` the mean of
    -log rho: what the sampler's perplexity has to be multiplied with, as a logarithm.

    >>> found = gap_metrics(torch.tensor([0.5, 0.25, 0.1]).log(), torch.tensor([0.5, 0.25, 0.4]).log()).scalars()
    >>> {name: round(x, 3) for name, x in found.items()}  # doctest: +NORMALIZE_WHITESPACE
    {'rollout/gap_kl': 0.538, 'rollout/gap_chi2': 5.0, 'rollout/gap_log_ppl': -0.462, 'rollout/ratio_outside': 0.333,
     'rollout/ratio_max': 4.0}

    Args:
        rollout_logprobs: [N] of trained tokens, by the sampler.
        old_logprobs: [N] by the trainer.
    """
    gap, count = log_ratio(old_logprobs, rollout_logprobs), len(old_logprobs)
    ratio = _exp(gap).double()
    found: dict[str, Metric] = {
        "rollout/gap_kl": Mean(float(_k3(gap).sum()), count),
        "rollout/gap_chi2": Mean(float((ratio.square() - 1.0).sum()), count),
        "rollout/gap_log_ppl": Mean(float(-gap.double().sum()), count),
        "rollout/ratio_outside": Mean(float(((ratio < WIDE[0]) | (ratio > WIDE[1])).sum()), count),
    }
    if count:
        found["rollout/ratio_max"] = Maximum(float(ratio.max()))
    return Metrics(found)


def _k2(gap: Tensor) -> Tensor:
    return 0.5 * gap.double().square()


def _k3(gap: Tensor) -> Tensor:
    """KL(rollout || old) of tokens that the sampler drew: exp(log rho) - 1 - log rho."""
    gap = gap.double().clamp(max=MAX_LOG_RATIO)
    return torch.expm1(gap) - gap
