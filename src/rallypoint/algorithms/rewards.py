"""What the rollouts of a step earned: all that an advantage may depend on.

Owns: totals of rows, and what of them is compared. Must not know: any estimator. Invariants: totals are float64,
whatever float32 has cut off the rewards of tokens; numbers of tokens that are not trained are never read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rallypoint.algorithms._rows import differing, normalized_in_groups, row_sums


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Rewards:
    """What the rollouts of a step earned: all that an advantage may depend on."""

    token_rewards: Float[Tensor, " T"]
    """The reward that arrives with each token, less the KL penalty where that belongs to the reward."""
    earned: Float[Tensor, " T"]
    """The same before any penalty."""
    loss_mask: Bool[Tensor, " T"]
    """True at trained tokens."""
    offsets: Int[Tensor, " B1"]
    """Where rows begin and end; a row without trained tokens is legal."""
    groups: Int[Tensor, " B"]
    """The prompt of each row; members of a group need not be neighbours."""
    values: Float[Tensor, " T"] | None = None
    """Value of the state in which each token was chosen; None without a critic."""
    components: Mapping[str, Float[Tensor, " B"]] = dataclasses.field(default_factory=dict[str, Tensor])
    """Scores of each row by the name of the reward, NaN where it does not apply; empty if there is one
    `reward.function`."""
    rounding: Float[Tensor, " B"] | None = None
    """What float32 has cut off the sum of each row's rewards, in float64; None if nothing."""
    penalty: Float[Tensor, " T"] | None = None
    """The KL penalty of each token, where that belongs to the reward."""

    turn_states: Int[Tensor, " T"] | None = None
    """The state in which the turn of each trained token began, as a number; None unless turns are compared by it."""

    @property
    def rows(self) -> Int[Tensor, " T"]:
        """The row of each token."""
        return torch.repeat_interleave(torch.arange(len(self.groups)), self.offsets.diff())

    @property
    def scores(self) -> Float[Tensor, " B"]:
        """The sum of each row's rewards, in float64."""
        if self.penalty is not None:
            return self.earned_scores - self._sums(self.penalty)
        total = self._sums(self.token_rewards)
        return total if self.rounding is None else total + self.rounding

    @property
    def earned_scores(self) -> Float[Tensor, " B"]:
        """The sum of each row's rewards before any penalty, in float64."""
        total = self._sums(self.earned)
        return total if self.rounding is None else total + self.rounding

    @property
    def differ(self) -> Bool[Tensor, " B"]:
        """Whether the row's group earned different scores before any penalty, see `differing`."""
        return differing(self.earned_scores, self.groups, self.sizes)

    @property
    def sizes(self) -> Float[Tensor, " B"]:
        """The sum of each row's rewards before any penalty, without their signs: rounding is relative to it."""
        return self._sums(self.earned.abs())

    def centred(self, *, normalize_std: bool = False) -> Float[Tensor, " B"]:
        """Return each score minus its group's mean, see `normalized_in_groups`.

        Where a group earned the same, penalties alone are compared: the rounding of what was earned would be in the
        differences, and the deviation of penalties blows up what the coefficient made small.
        """
        found = normalized_in_groups(self.scores, self.groups, normalize_std=normalize_std, sizes=self.sizes)
        if self.penalty is None:
            return found
        penalties, sizes = self._sums(self.penalty), self._sums(self.penalty.abs())
        alone = -normalized_in_groups(penalties, self.groups, normalize_std=False, sizes=sizes)
        return torch.where(self.differ, found, alone)

    def _sums(self, x: Float[Tensor, " T"]) -> Float[Tensor, " B"]:
        return row_sums(torch.where(self.loss_mask, x, 0.0), self.rows, len(self.groups))

    @property
    def lengths(self) -> Float[Tensor, " B"]:
        """Trained tokens of each row, in float64."""
        return row_sums(self.loss_mask.double(), self.rows, len(self.groups))

    def spread(self, by_row: Float[Tensor, " B"]) -> Float[Tensor, " T"]:
        """Give every trained token the number of its row, and all others 0."""
        return torch.where(self.loss_mask, by_row[self.rows], 0.0).to(self.token_rewards.dtype)
