"""What an advantage estimator is, and the family of GRPO: rollouts of a prompt, or their parts, against each other.

Owns: how parts of rollouts are compared, also where a KL penalty is in the rewards. Must not know: carriers.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rallypoint.algorithms._rows import group_sums, row_sums
from rallypoint.algorithms.advantages import (
    group_relative_token_advantages,
    group_relative_turn_advantages,
    step_group_advantages,
    whiten,
)
from rallypoint.algorithms.rewards import Rewards


@dataclasses.dataclass(frozen=True, kw_only=True)
class Advantage(abc.ABC):
    """An estimator with its parameters."""

    whiten: bool
    """Scale the result to mean 0 and standard deviation 1 over the trained tokens of the step."""

    compares_group: ClassVar[bool] = True
    """Whether it compares the rollouts of a prompt, and so is 0 for a rollout that is alone."""

    @abc.abstractmethod
    def estimate(self, rewards: Rewards) -> Float[Tensor, " T"]:
        """Return the advantage of each token before whitening, 0 where none is trained."""

    def signal(self, rewards: Rewards) -> Bool[Tensor, " B"]:
        """Return which rows are of a prompt whose rollouts differ in what is compared, before any penalty.

        Dynamic sampling replaces the others, and a mask leaves them out. An estimator that compares something else than
        scores says so here.
        """
        return rewards.differ

    def __call__(self, rewards: Rewards) -> Float[Tensor, " T"]:
        """Return the advantage of each token, 0 where none is trained."""
        advantages = self.estimate(rewards)
        return whiten(advantages, rewards.loss_mask) if self.whiten else advantages


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupRelative(Advantage):
    """Rewards of a row, or of its parts, against those of the group.

    A KL penalty in the reward enters scores and baselines. The standard deviation of a group whose rewards are
    all equal would then be that of the penalties alone, and dividing by it would blow up what the coefficient
    made small. Such a group is centred and not divided.
    """

    @abc.abstractmethod
    def divides(self) -> bool:
        """Say whether it divides by the deviation of the group."""

    @abc.abstractmethod
    def of_parts(self, rewards: Rewards, token_rewards: Tensor, *, divides: bool) -> Tensor | None:
        """Return advantages whose parts of rows are compared, [T]; None if rows are compared as wholes."""

    def estimate(self, rewards: Rewards) -> Float[Tensor, " T"]:
        """See `Advantage.estimate`."""
        advantages = self.of_parts(rewards, rewards.token_rewards, divides=self.divides())
        if advantages is None:
            return rewards.spread(rewards.centred(normalize_std=self.divides()))
        alone = None if rewards.penalty is None else self.of_parts(rewards, -rewards.penalty, divides=False)
        return advantages if alone is None else torch.where(self.signal(rewards)[rewards.rows], advantages, alone)

    def signal(self, rewards: Rewards) -> Bool[Tensor, " B"]:
        """See `Advantage.signal`; under process supervision the rewards of tokens, or of turns, are compared."""
        earned = self.of_parts(rewards, rewards.earned, divides=False)
        if earned is None:
            return rewards.differ
        num_differing = row_sums((earned != 0).double(), rewards.rows, len(rewards.groups))
        return group_sums(num_differing, rewards.groups) > 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class GRPO(GroupRelative):
    """Group-relative advantages (DeepSeekMath, arXiv 2402.03300)."""

    token_discount: float | None
    """None gives all tokens the advantage of the score; a number gives each what follows (process supervision)."""

    def divides(self) -> bool:
        """See `GroupRelative.divides`."""
        return True

    def of_parts(self, rewards: Rewards, token_rewards: Tensor, *, divides: bool) -> Tensor | None:
        """See `GroupRelative.of_parts`."""
        if self.token_discount is None:
            return None
        where = rewards.loss_mask, rewards.offsets, rewards.groups
        discount = self.token_discount
        return group_relative_token_advantages(token_rewards, *where, normalize_std=divides, discount=discount)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrGRPO(GRPO):
    """Dr. GRPO (arXiv 2503.20783): GRPO without the division, which favours prompts that are easy or hard."""

    def divides(self) -> bool:
        """See `GroupRelative.divides`."""
        return False


@dataclasses.dataclass(frozen=True, kw_only=True)
class TurnGRPO(GroupRelative):
    """GRPO of turns: each against those of the same place, by the rewards from it to the row's end."""

    discount: float
    """Discount of later turns, once a turn; see `group_relative_turn_advantages`."""
    normalize_std: bool
    """Whether to divide by the deviation, as GRPO; otherwise as Dr. GRPO."""

    def divides(self) -> bool:
        """See `GroupRelative.divides`."""
        return self.normalize_std

    def of_parts(self, rewards: Rewards, token_rewards: Tensor, *, divides: bool) -> Tensor | None:
        """See `GroupRelative.of_parts`."""
        where = rewards.loss_mask, rewards.offsets, rewards.groups
        return group_relative_turn_advantages(token_rewards, *where, normalize_std=divides, discount=self.discount)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GiGPO(GroupRelative):
    """GiGPO (arXiv 2505.10978): GRPO, and beside it turns against those that began in the same state."""

    discount: float
    """Discount of later turns, once a turn; see `step_group_advantages`."""
    step_weight: float
    """Weight of the comparison of turns, omega in the paper."""
    normalize_std: bool
    """Whether to divide by the deviations, as GRPO; otherwise as Dr. GRPO."""

    def divides(self) -> bool:
        """See `GroupRelative.divides`."""
        return self.normalize_std

    def of_parts(self, rewards: Rewards, token_rewards: Tensor, *, divides: bool) -> Tensor | None:
        """See `GroupRelative.of_parts`.

        Raises:
            ValueError: nothing says in which states turns began.
        """
        if rewards.turn_states is None:
            raise ValueError("gigpo: the batch has no states of turns: sample it in a run with this advantage")
        where = rewards.turn_states, rewards.loss_mask, rewards.offsets, rewards.groups
        return step_group_advantages(token_rewards, *where, normalize_std=divides, discount=self.discount)

    def estimate(self, rewards: Rewards) -> Float[Tensor, " T"]:
        """See `Advantage.estimate`; each of the two is divided by its own deviation."""
        by_row = rewards.spread(rewards.centred(normalize_std=self.normalize_std))
        return by_row + self.step_weight * super().estimate(rewards)

    def signal(self, rewards: Rewards) -> Bool[Tensor, " B"]:
        """See `Advantage.signal`; scores are compared, and returns of turns."""
        return rewards.differ | super().signal(rewards) if self.step_weight else rewards.differ
