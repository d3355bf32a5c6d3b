"""What the actor minimises: sums over trained tokens, and the metrics of each loss.

Owns: the formulas, by the names of their papers. Must not know: denominators, which are global (all ranks, all
micro-batches) and applied by the caller; coefficients; how tokens were cut into micro-batches. Invariants: a loss is
the sum of what its tokens lose, and a row is never cut, so that it is the same for every cut; `sum` alone carries
gradient, and is float64; numbers outside the mask have no effect, even NaN. Tensors may be whole [T] streams with
their mask, or the trained tokens alone with a mask that is True everywhere. Nothing waits for the device before
`metrics` is called. The same holds for `critic_losses`.

With r = exp(logprobs - old_logprobs), A the advantage, s the geometric mean of r over a row, and sg: no gradient:

    clip                 -min(r A, clamp(r, 1 - low, 1 + high) A)         equal bounds: PPO, GRPO; unequal: DAPO
    importance_sampling  -r A                                              clip without bounds
    policy_gradient      -A logprobs                                       the same gradient where r is 1
    decoupled            sg(old / rollout) * clip                          clip, weighed back to the sampler
    gspo                 clip, of s instead of r
    gmpo                 -A s, of ratios that are clipped in it token by token
    cispo                -sg(clamp(r, 1 - low, 1 + high)) A logprobs       bounds the weight, never drops a token
    sapo                 -A sigmoid(tau (r - 1)) 4 / tau                   a soft bound
    dppo                 -sg(min(r, cap)) A logprobs, of tokens whose probability has not moved too far
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rallypoint.algorithms._rows import row_sums
from rallypoint.algorithms.kl import MAX_LOG_RATIO, kl_penalty, log_ratio
from rallypoint.types import Mean, Metric, Metrics, merge

SMALLEST_REST = 1e-8
"""A probability of all other tokens is never taken for less: its logarithm must stay finite."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PolicyTokens:
    """What a policy loss may depend on, token by token; rows are whole."""

    logprobs: Float[Tensor, " T"]
    """Log-probabilities by the policy as it is, with gradient."""
    old_logprobs: Float[Tensor, " T"]
    """Log-probabilities by the policy at the start of the update."""
    rollout_logprobs: Float[Tensor, " T"]
    """Log-probabilities by the sampler."""
    advantages: Float[Tensor, " T"]
    """What the tokens are weighed with."""
    loss_mask: Bool[Tensor, " T"]
    """True at trained tokens."""
    rows: Int[Tensor, " T"]
    """The row of each token, from 0."""
    num_rows: int
    """Rows, with those that have no token here."""
    selected: Bool[Tensor, " T"] | None = None
    """True at tokens that the loss treats in another way, see `PolicyObjective.choose`; None if it has none."""

    def masked(self) -> PolicyTokens:
        """Return the same with zeros where no token is trained, so that nothing of them leaks."""
        names = ("logprobs", "old_logprobs", "rollout_logprobs", "advantages")
        return dataclasses.replace(
            self, **{name: torch.where(self.loss_mask, getattr(self, name), 0.0) for name in names}
        )

    @property
    def log_ratio(self) -> Float[Tensor, " T"]:
        """Log r, finite also where a model excludes a token."""
        return log_ratio(self.logprobs, self.old_logprobs)

    @property
    def ratio(self) -> Float[Tensor, " T"]:
        """r, with its logarithm cut off at +-20."""
        return _ratio(self.log_ratio)[0]

    def row_means(self, x: Float[Tensor, " T"]) -> Float[Tensor, " T"]:
        """Return at each token the mean of x over the trained tokens of its row, in float64."""
        count = row_sums(self.loss_mask.double(), self.rows, self.num_rows).clamp_min(1.0)
        return (row_sums(torch.where(self.loss_mask, x, 0.0), self.rows, self.num_rows) / count)[self.rows]

    def row_totals(self, x: Float[Tensor, " T"]) -> Float[Tensor, " T"]:
        """Return at each token the sum of x over the trained tokens of its row, in float64."""
        return row_sums(torch.where(self.loss_mask, x, 0.0), self.rows, self.num_rows)[self.rows]


TokenLosses = tuple[Tensor, Mapping[str, Tensor | Metric]]
"""The loss of each token, [T], and numbers worth watching by name: [T] each, whose means are metrics, or metrics."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PolicyLoss:
    """What a policy loss returns; every number is a scalar tensor."""

    sum: Float[Tensor, ""]
    """Over trained tokens, with gradient."""
    weight: Float[Tensor, ""] | Int[Tensor, ""]
    """Sum of the weights of aggregation over trained tokens: their number, where all are 1."""
    num_tokens: Int[Tensor, ""]
    """Trained tokens."""
    kl_sum: Float[Tensor, ""]
    """k3 estimate of KL(old || current): how far this update has moved."""
    watched: Mapping[str, Tensor | Metric]
    """Sums over trained tokens of the numbers that a loss wants to be watched, or metrics."""

    def mean(self) -> Metrics:
        """Return the mean of this part of the batch."""
        return Metrics({"policy_loss": Mean(float(self.sum.detach()), float(self.weight))})

    def metrics(self) -> Metrics:
        """Return that, and how far its ratios are from 1."""
        weight = float(self.num_tokens)  # each `float` waits for the device
        return merge(self.mean(), self.noted(weight), {"approx_kl": Mean(float(self.kl_sum), weight)})

    def noted(self, weight: float) -> Metrics:
        """Return what the loss wants to be watched, of so many trained tokens."""
        return Metrics({k: Mean(float(x), weight) if isinstance(x, Tensor) else x for k, x in self.watched.items()})


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyObjective(abc.ABC):
    """A policy loss with its parameters; picklable, and the same on every rank."""

    needs_advantage: ClassVar[bool] = True
    """Whether a token of advantage 0 has a loss of 0 without a gradient."""
    is_watched_at_start: ClassVar[bool] = False
    """Whether what it watches can differ from 0 while the policy is that of the start of the update."""

    @abc.abstractmethod
    def by_token(self, tokens: PolicyTokens) -> TokenLosses:
        """Return the loss of each token, and what to watch. Values at untrained tokens are ignored."""

    def choose(
        self, logprobs: Float[Tensor, " T"], advantages: Float[Tensor, " T"], loss_mask: Bool[Tensor, " T"], seed: int
    ) -> Bool[Tensor, " T"] | None:
        """Return which tokens of a whole step, with the sampler's logprobs, are `PolicyTokens.selected`; or None."""
        del logprobs, advantages, loss_mask, seed
        return None

    def __call__(
        self,
        tokens: PolicyTokens,
        *,
        weights: Float[Tensor, " T"] | None = None,
        correction: Float[Tensor, " T"] | None = None,
    ) -> PolicyLoss:
        """Return the loss, summed over trained tokens.

        Args:
            tokens: whole rows.
            weights: of aggregation, see `aggregation`; None is 1 for each token.
            correction: of the gap between sampler and trainer, see `corrections`; None is 1 for each token.
        """
        tokens = tokens.masked()
        losses, watched = self.by_token(tokens)
        if correction is not None:
            losses = losses * correction
        if weights is not None:
            losses = losses.double() * weights
        mask = tokens.loss_mask

        def total(x: Tensor) -> Tensor:
            return torch.where(mask, x, 0).sum(dtype=torch.float64)

        moved = tokens.log_ratio.detach()
        return PolicyLoss(
            sum=total(losses),
            weight=mask.sum() if weights is None else total(weights),
            num_tokens=mask.sum(),
            kl_sum=kl_penalty(torch.zeros_like(moved), moved, "k3").sum(dtype=torch.float64),
            watched={name: total(x.detach()) if isinstance(x, Tensor) else x for name, x in watched.items()},
        )


def _ratio(moved: Tensor) -> tuple[Tensor, Tensor]:
    """Return exp of a log-ratio that is cut off so that it cannot overflow, and where it was."""
    return moved.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp(), moved.abs() > MAX_LOG_RATIO


def _moved(tokens: PolicyTokens, anchor: Literal["old", "rollout"] = "old") -> Tensor:
    return log_ratio(tokens.logprobs, tokens.old_logprobs if anchor == "old" else tokens.rollout_logprobs)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Clip(PolicyObjective):
    """PPO's clipped surrogate (arXiv 1707.06347).

        loss = -min(r * A, clamp(r, 1 - clip_low, 1 + clip_high) * A)
        loss = min(loss, -dual_clip * A)        where A < 0, if dual_clip is given (arXiv 1912.09729)

    Equal bounds are PPO's and GRPO's, `clip_high > clip_low` is DAPO's clip-higher (arXiv 2503.14476).
    The log-ratio is cut off at +-20 before `exp`, so that it cannot overflow; a token beyond has no
    gradient, and is counted as clipped.

    Ratios 2, 2, 1/2, 1/2 with advantages of both signs: only where moving on would help is it clipped.
    The last two tokens are not trained.

    >>> result = Clip(clip_low=0.2, clip_high=0.3, dual_clip=None)(
    ...     PolicyTokens(
    ...         logprobs=torch.tensor([2.0, 2.0, 0.5, 0.5, 9.0, 9.0]).log(),
    ...         old_logprobs=torch.zeros(6),
    ...         rollout_logprobs=torch.zeros(6),
    ...         advantages=torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0, 1.0]),
    ...         loss_mask=torch.tensor([True, True, True, True, False, False]),
    ...         rows=torch.zeros(6, dtype=torch.int64),
    ...         num_rows=1,
    ...     )
    ... )
    >>> round(float(result.sum), 4), int(result.watched["clip_fraction"])  # -1.3 + 2 - 0.5 + 0.8
    (1.0, 2)
    """

    clip_low: float
    """How far below 1 the ratio may be."""
    clip_high: float
    """How far above 1 the ratio may be."""
    dual_clip: float | None
    """Bound of the ratio where A < 0; None for none."""

    def by_token(self, tokens: PolicyTokens) -> TokenLosses:
        """See `PolicyObjective.by_token`."""
        return self._bounded(tokens, _moved(tokens))

    def _bounded(self, tokens: PolicyTokens, moved: Tensor) -> TokenLosses:
        advantages = tokens.advantages
        ratio, beyond = _ratio(moved)
        free = ratio * advantages
        bounded = torch.minimum(free, ratio.clamp(1.0 - self.clip_low, 1.0 + self.clip_high) * advantages)
        if self.dual_clip is not None:
            bounded = torch.where(advantages < 0, torch.maximum(bounded, self.dual_clip * advantages), bounded)
        return -bounded, {"clip_fraction": (bounded != free) | (beyond & (advantages != 0))}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decoupled(Clip):
    """Decoupled PPO (AReaL, arXiv 2505.24298): clip to the policy at the start, weigh back to the sampler.

    The same as `clip` with a correction by token, whose cap is `max_weight`.
    """

    max_weight: float | None
    """Cap of old / rollout; None for none."""

    is_watched_at_start = True

    def by_token(self, tokens: PolicyTokens) -> TokenLosses:
        """See `PolicyObjective.by_token`."""
        losses, watched = super().by_token(tokens)
        weight, _ = _ratio(log_ratio(tokens.old_logprobs, tokens.rollout_logprobs).detach())
        weight = weight if self.max_weight is None else weight.clamp(max=self.max_weight)
        return losses * weight, {**watched, "behaviour_weight": weight}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyGradient(PolicyObjective):
    """REINFORCE (Williams 1992): no ratio, so right only for the policy that sampled."""

    def by_token(self, tokens: PolicyTokens) -> TokenLosses:
        """See `PolicyObjective.by_token`."""
        return -tokens.advantages * log_ratio(tokens.logprobs, torch.zeros_like(tokens.logprobs)), {}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Anchored(PolicyObjective):
    """A loss whose ratio may compare with the sampler, where rollouts are of older weights."""

    anchor: Literal["old", "rollout"]
    """Policy that the ratio compares with: that of the start of the update, or the sampler."""

    is_watched_at_start = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImportanceSampling(Anchored):
    """The surrogate without bounds: unbiased, and with a variance that grows as the policy moves away."""

    def by_token(self, tokens: PolicyTokens) -> TokenLosses:
        """See `PolicyObjective.by_token`."""
        ratio, beyond = _ratio(_moved(tokens, self.anchor))
        return -ratio * tokens.advantages, {"clip_fraction": beyond & (tokens.advantages != 0)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class GSPO(Clip):
    """Group sequence policy optimisation (arXiv 2507.18071), in its form by token (section 4.3).

        s = exp(mean over the row of log r), and for each token  s_t = sg(s) * p_t / sg(p_t)

    All tokens of a row have one ratio, and are clipped together. Meant for aggregation by sequence, and for bounds
    of a few ten-thousandths: a mean over a row hardly moves.
    """

    def by_token(self, tokens: PolicyTokens) -> TokenLosses:
        """See `PolicyObjective.by_token`."""
        moved = _moved(tokens)
        mean = tokens.row_means(moved.detach()).to(moved.dtype)
        return self._bounded(tokens, mean + (moved - moved.detach()))


@dataclasses.dataclass(frozen=True, kw_only=True)
class GMPO(PolicyObjective):
    """Geometric-mean policy optimisation (arXiv 2507.20673): ratios are clipped by token, then averaged over the row.

    Meant for aggregation by sequence. Bounds are those of log r.
    """

    clip_low: float
    """How far below 0 the log-ratio may be."""
    clip_high: float
    """How far above 0 the log-ratio may be."""

    def by_token(self, tokens: PolicyTokens) -> TokenLosses:
        """See `PolicyObjective.by_token`."""
        moved, sign = _moved(tokens), tokens.advantages.sign()
        near = moved.clamp(-self.clip_low, self.clip_high)
        # A token of a row without advantage has no sign, and nothing to lose.
        bounded = sign * torch.minimum(sign * moved, sign * near)
        ratio, _ = _ratio(tokens.row_means(bounded))
        return -tokens.advantages * ratio.to(moved.dtype), {"clip_fraction": bounded != sign * sign * moved}


@dataclasses.dataclass(frozen=True, kw_only=True)
class CISPO(Anchored):
    """Clipped importance weights (MiniMax-M1, arXiv 2506.13585): a token that moved far still has its gradient.

    Bounds are offsets from 1; the paper has none below (`clip_low=1`).
    """

    clip_low: float
    """How far below 1 the weight may be."""
    clip_high: float
    """How far above 1 the weight may be."""

    def by_token(self, tokens: PolicyTokens) -> TokenLosses:
        """See `PolicyObjective.by_token`."""
        ratio, _ = _ratio(_moved(tokens, self.anchor).detach())
        weight = ratio.clamp(1.0 - self.clip_low, 1.0 + self.clip_high)
        logprobs = log_ratio(tokens.logprobs, torch.zeros_like(tokens.logprobs))
        return -weight * tokens.advantages * logprobs, {"clip_fraction": weight != ratio}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SAPO(PolicyObjective):
    """Soft adaptive policy optimisation (arXiv 2511.20347): the gradient fades as the ratio leaves 1."""

    tau_positive: float
    """How fast it fades where A > 0."""
    tau_negative: float
    """How fast it fades elsewhere; a little faster is more stable."""

    def by_token(self, tokens: PolicyTokens) -> TokenLosses:
        """See `PolicyObjective.by_token`."""
        ratio, beyond = _ratio(_moved(tokens))
        tau = torch.where(tokens.advantages > 0, torch.full_like(ratio, self.tau_positive), self.tau_negative)
        gate = torch.sigmoid(tau * (ratio - 1.0)) * (4.0 / tau)
        return -gate * tokens.advantages, {"clip_fraction": beyond & (tokens.advantages != 0)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class DPPO(Anchored):
    """PPO with a trust region (arXiv 2602.04879): it bounds a divergence of probabilities, where `clip` bounds a ratio.

    A rare token may change its ratio tenfold without changing the policy, and a common one hardly may. A token is
    dropped once it has left the region on the side that its advantage pushes to. The divergence is that of the two
    outcomes "this token" and "another": total variation |p - q|, or KL(q || p); the paper's anchor is the sampler.
    """

    divergence: Literal["tv", "kl"]
    """Total variation, or KL."""
    clip_low: float
    """The bound where A <= 0."""
    clip_high: float
    """The bound where A > 0."""
    max_ratio: float
    """Cap of the ratio."""

    def by_token(self, tokens: PolicyTokens) -> TokenLosses:
        """See `PolicyObjective.by_token`."""
        moved = _moved(tokens, self.anchor).detach()
        ratio, _ = _ratio(moved)
        logprobs = log_ratio(tokens.logprobs, torch.zeros_like(tokens.logprobs))
        before = tokens.old_logprobs if self.anchor == "old" else tokens.rollout_logprobs
        p, q = logprobs.detach().double().exp(), before.double().exp()
        if self.divergence == "tv":
            distance = (p - q).abs()
        else:
            rest_p, rest_q = (1.0 - p).clamp_min(SMALLEST_REST), (1.0 - q).clamp_min(SMALLEST_REST)
            distance = -q * moved.double() + rest_q * (rest_q / rest_p).log()
        pushes_up = tokens.advantages > 0
        outside = torch.where(pushes_up, (distance > self.clip_high) & (p > q), (distance > self.clip_low) & (p < q))
        weight = torch.where(outside, 0.0, ratio.clamp(max=self.max_ratio))
        return -weight * tokens.advantages * logprobs, {"clip_fraction": outside}
