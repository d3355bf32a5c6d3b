"""Advantage estimators by the names of their papers: from the rewards of a step to a weight for every token.

Owns: which formula a name stands for. Must not know: carriers, KL, or what the loss does with the result.
Invariants: an estimator sees the whole step, so that baselines and whitening cover every row; tokens that are
not trained get 0 and are never read; rows may come in any order; arithmetic is float64.

Most of them compare the rollouts of a prompt, and differ in what they subtract from a score R and divide by:

    dr_grpo                         R - mean                   of the group
    grpo                            (R - mean) / std
    lite_ppo                        (R - mean) / std           of all rollouts of the step
    rloo                            (R - mean) * n / (n - 1)   = R - mean of the other rollouts of the prompt
    reinforce_plus_plus_baseline    R - mean, whitened over the trained tokens of the step
    max_rl                          (R - mean) / mean
    opo                             R - mean weighed by length
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Mapping
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rallypoint.algorithms._rows import (
    NO_SIGNAL,
    chance_of_none,
    differing,
    group_sums,
    normalized_in_groups,
    put_back,
    sums_to_row_end,
    trained_tokens,
)
from rallypoint.algorithms.advantages import (
    gae_advantages,
    turn_gae_advantages,
    turn_returns,
    whiten,
)
from rallypoint.algorithms.group_relative import GRPO, Advantage, DrGRPO, GiGPO, TurnGRPO
from rallypoint.algorithms.rewards import Rewards
from rallypoint.errors import RewardError


@dataclasses.dataclass(frozen=True, kw_only=True)
class GAE(Advantage):
    """Generalised advantage estimation (arXiv 1506.02438), with a critic.

    With `value_lambda` and `length_alpha` it is that of VAPO (arXiv 2504.05118): the critic learns from returns
    with a lambda of its own, and the lambda of the advantages grows with the row, 1 - 1 / (length_alpha * length).
    """

    discount: float
    """Gamma, once per unit."""
    gae_lambda: float
    """Lambda of the advantages, where `length_alpha` is None."""
    value_lambda: float | None
    """Lambda of the returns; None: `gae_lambda`."""
    length_alpha: float | None
    """Alpha of the lambda that grows with the row's units; None for a lambda that is the same for all rows."""
    unit: Literal["token", "turn"]
    """What a time step is; see `turn_gae_advantages`."""

    compares_group = False

    def estimate(self, rewards: Rewards) -> Float[Tensor, " T"]:
        """See `Advantage.estimate`."""
        return self._both(rewards, self.gae_lambda, self.length_alpha)[0]

    def returns(self, rewards: Rewards) -> Float[Tensor, " T"]:
        """Return what the critic should have predicted, in the unit of the rewards."""
        return self._both(rewards, self.gae_lambda if self.value_lambda is None else self.value_lambda, None)[1]

    def _both(self, rewards: Rewards, gae_lambda: float, length_alpha: float | None) -> tuple[Tensor, Tensor]:
        if rewards.values is None:
            raise ValueError("gae: the batch has no values: give the run a critic, or another advantage")
        estimate = gae_advantages if self.unit == "token" else turn_gae_advantages
        return estimate(
            rewards.token_rewards,
            rewards.values,
            rewards.loss_mask,
            rewards.offsets,
            discount=self.discount,
            gae_lambda=gae_lambda,
            length_alpha=length_alpha,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReinforcePlusPlus(Advantage):
    """REINFORCE++ (arXiv 2501.03262): the discounted rewards to the row's end, whitened; GAE without values."""

    discount: float
    """Discount of the rewards that come after a unit."""
    unit: Literal["token", "turn"] = "token"
    """What a time step is; see `turn_returns`."""

    compares_group = False

    def estimate(self, rewards: Rewards) -> Float[Tensor, " T"]:
        """See `Advantage.estimate`."""
        if self.unit == "turn":
            return turn_returns(rewards.token_rewards, rewards.loss_mask, rewards.offsets, discount=self.discount)
        positions, rows = trained_tokens(rewards.loss_mask, rewards.offsets)
        to_go = sums_to_row_end(rewards.token_rewards[positions], rows, decay=self.discount)
        return put_back(to_go, positions, rewards.token_rewards)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ByScore(Advantage):
    """An estimator that gives all trained tokens of a row one number."""

    @abc.abstractmethod
    def by_row(self, rewards: Rewards) -> Float[Tensor, " B"]:
        """Return the advantage of each row."""

    def estimate(self, rewards: Rewards) -> Float[Tensor, " T"]:
        """See `Advantage.estimate`."""
        return rewards.spread(self.by_row(rewards))


@dataclasses.dataclass(frozen=True, kw_only=True)
class LitePPO(ByScore):
    """The group's mean and the step's standard deviation (arXiv 2508.08221)."""

    def by_row(self, rewards: Rewards) -> Float[Tensor, " B"]:
        """See `ByScore.by_row`; nothing is divided where all rollouts of the step earned the same."""
        whole_step = torch.zeros_like(rewards.groups)
        if not bool(differing(rewards.earned_scores, whole_step, rewards.sizes).any()):
            return rewards.centred()
        return rewards.centred() / rewards.scores.std(correction=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RLOO(ByScore):
    """REINFORCE leave-one-out (arXiv 2402.14740): the baseline is the mean of the prompt's other rollouts."""

    def by_row(self, rewards: Rewards) -> Float[Tensor, " B"]:
        """See `ByScore.by_row`."""
        count = group_sums(torch.ones_like(rewards.groups).double(), rewards.groups)
        return torch.where(count > 1, rewards.centred() * count / (count - 1).clamp_min(1.0), 0.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReinforcePlusPlusBaseline(ByScore):
    """REINFORCE++ with the group's mean as its baseline (arXiv 2501.03262): Dr. GRPO, whitened over the step."""

    def by_row(self, rewards: Rewards) -> Float[Tensor, " B"]:
        """See `ByScore.by_row`."""
        return rewards.centred()


@dataclasses.dataclass(frozen=True, kw_only=True)
class GDPO(ByScore):
    """Several rewards, each normalised by itself (arXiv 2601.05242): one with a large range does not drown the others.

    Each is normalised in its group; their weighed sum is normalised over the rows of the step.
    """

    weights: Mapping[str, float]
    """Weight of each reward, by its name."""

    def by_row(self, rewards: Rewards) -> Float[Tensor, " B"]:
        """See `ByScore.by_row`."""
        total = self._total(rewards)
        whitened = whiten(total, torch.ones(len(total), dtype=torch.bool))
        return torch.where(self._differ(total, rewards), whitened, 0.0)

    def signal(self, rewards: Rewards) -> Bool[Tensor, " B"]:
        """See `Advantage.signal`; rewards that differ may cancel out, and equal sums of them may hide one that differs.

        Raises:
            ValueError: there is no reward of one of the names.
        """
        return self._differ(self._total(rewards), rewards)

    def _differ(self, total: Tensor, rewards: Rewards) -> Tensor:
        size = math.fsum(map(abs, self.weights.values()))  # what is normalised is about 1
        return differing(total, rewards.groups, torch.full_like(total, size))

    def _total(self, rewards: Rewards) -> Float[Tensor, " B"]:
        if missing := sorted(self.weights.keys() - rewards.components.keys()):
            have = ", ".join(sorted(rewards.components)) or "none"
            raise ValueError(f"gdpo: there is no reward named {', '.join(missing)}; the rewards are: {have}")
        total = torch.zeros(len(rewards.groups), dtype=torch.float64)
        for name, weight in self.weights.items():
            total = total + weight * _normalized(rewards.components[name], rewards.groups)
        return total


def _normalized(component: Float[Tensor, " B"], groups: Int[Tensor, " B"]) -> Float[Tensor, " B"]:
    """Return a reward normalised in each group over the rows that it applies to, and 0 for the others."""
    applies = (~component.isnan()).nonzero().flatten()
    found = normalized_in_groups(component[applies], groups[applies], normalize_std=True)
    return torch.zeros(len(component), dtype=torch.float64).index_copy(0, applies, found)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MaxRL(ByScore):
    """Maximum-likelihood RL (arXiv 2602.02710): hard prompts weigh as 1 / pass rate; 0 where none is right."""

    def by_row(self, rewards: Rewards) -> Float[Tensor, " B"]:
        """See `ByScore.by_row`.

        Raises:
            RewardError: a score is negative, for which the formula has no meaning.
        """
        earned = rewards.earned_scores
        if len(negative := (earned < -NO_SIGNAL * rewards.sizes).nonzero().flatten()):
            row = int(negative[0])
            raise RewardError(
                f"max_rl: expected scores of 0 or more, found {float(earned[row]):g} for a rollout of prompt "
                f"{int(rewards.groups[row])}: add to all scores what makes the lowest one 0, or take another advantage"
            )
        count = group_sums(torch.ones_like(earned), rewards.groups)
        mean = group_sums(earned, rewards.groups) / count
        is_zero = mean <= NO_SIGNAL * group_sums(rewards.sizes, rewards.groups) / count
        return torch.where(is_zero, 0.0, rewards.centred() / torch.where(is_zero, 1.0, mean))


@dataclasses.dataclass(frozen=True, kw_only=True)
class OPO(ByScore):
    """On-policy RL with the optimal baseline (arXiv 2505.23585): the group's mean, each score weighed by its length."""

    def by_row(self, rewards: Rewards) -> Float[Tensor, " B"]:
        """See `ByScore.by_row`."""
        scores, lengths = rewards.scores, rewards.lengths
        total = group_sums(lengths, rewards.groups)
        baseline = group_sums(scores * lengths, rewards.groups) / total.clamp_min(1.0)
        # Exactly 0 where nothing can be compared, as for all others: rounding is no signal.
        differs = group_sums((rewards.centred() != 0).double(), rewards.groups) > 0
        are_several = group_sums((lengths > 0).double(), rewards.groups) > 1
        return torch.where(differs & are_several, scores - baseline, 0.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PassAtK(ByScore):
    """The chance that one of k rollouts is right (arXiv 2508.10751, the analytical form).

    With N rollouts of which M are wrong, the mean over all sets of k is 1 - C(M, k) / C(N, k). A right rollout makes
    every set that it is in right; a wrong one those whose other k - 1 are not all wrong.
    """

    k: int
    """Size of the sets; 1 is GRPO on rewards of 0 and 1."""

    def by_row(self, rewards: Rewards) -> Float[Tensor, " B"]:
        """See `ByScore.by_row`; a score above 0 is right. A group of fewer than k gets 0."""
        right = self._right(rewards)
        count = group_sums(torch.ones_like(right).double(), rewards.groups)
        wrong = group_sums((~right).double(), rewards.groups)
        mean = 1.0 - chance_of_none(count, wrong, self.k)
        own = torch.where(right, 1.0, 1.0 - chance_of_none(count - 1, wrong - 1, self.k - 1))
        found = (own - mean) / (mean * (1.0 - mean)).sqrt()
        return torch.where(self.signal(rewards), found, 0.0)

    def signal(self, rewards: Rewards) -> Bool[Tensor, " B"]:
        """See `Advantage.signal`: some sets of k are right, and others wrong, however much each rollout earned."""
        right = self._right(rewards)
        return (group_sums(right.double(), rewards.groups) > 0) & (
            group_sums((~right).double(), rewards.groups) >= self.k
        )

    def _right(self, rewards: Rewards) -> Bool[Tensor, " B"]:
        return rewards.earned_scores > NO_SIGNAL * rewards.sizes


ADVANTAGES: dict[str, type[Advantage]] = {
    "gae": GAE,
    "grpo": GRPO,
    "dr_grpo": DrGRPO,
    "turn_grpo": TurnGRPO,
    "gigpo": GiGPO,
    "lite_ppo": LitePPO,
    "rloo": RLOO,
    "reinforce_plus_plus": ReinforcePlusPlus,
    "reinforce_plus_plus_baseline": ReinforcePlusPlusBaseline,
    "gdpo": GDPO,
    "max_rl": MaxRL,
    "opo": OPO,
    "pass_at_k": PassAtK,
}
"""Every estimator by the name that a config has for it."""
