"""What is done to scores and rows around advantages: long responses, truncated ones, and groups without a signal.

Owns: these three. Invariant: what is masked counts in no denominator; what merely has no advantage still does.
"""

from __future__ import annotations

import dataclasses

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rallypoint.algorithms._rows import row_sums
from rallypoint.types import Mean, Metrics, ScoredBatch


def overlong_penalty(
    num_tokens: Int[Tensor, " B"], *, max_tokens: int, buffer: int, factor: float
) -> Float[Tensor, " B"]:
    """Return what a response's score loses for its length: DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13).

    Nothing up to `max_tokens - buffer` tokens, then linearly more, and `factor` at `max_tokens`.

    >>> overlong_penalty(torch.tensor([5, 8, 9, 10]), max_tokens=10, buffer=4, factor=1.0).tolist()
    [0.0, 0.5, 0.75, 1.0]

    Args:
        num_tokens: [B] sampled tokens of each response.
        max_tokens: the longest response that there can be.
        buffer: tokens before that in which the penalty grows.
        factor: the largest penalty, in the unit of the reward.
    """
    over = (num_tokens - (max_tokens - buffer)).double() / buffer
    return factor * over.clamp(0.0, 1.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OverlongPenalty:
    """What long responses of a step lose, with its parameters; see `overlong_penalty`."""

    max_tokens: int
    buffer: int
    factor: float

    def __call__(self, batch: ScoredBatch) -> tuple[ScoredBatch, Metrics]:
        """Return the batch with the penalty on the last token of each response, and how large it was in the mean."""
        tokens = batch.loss_mask.nonzero().squeeze(-1)
        rows = batch.row_of_token[tokens]
        penalty = overlong_penalty(
            rows.bincount(minlength=len(batch)), max_tokens=self.max_tokens, buffer=self.buffer, factor=self.factor
        )
        last = torch.zeros(len(batch), dtype=torch.int64).scatter_reduce_(0, rows, tokens, "amax")
        token_rewards = batch.token_rewards.index_add(0, last, -penalty.float())
        shaped = dataclasses.replace(batch, token_rewards=token_rewards, scores_before=batch.scores, rounding=None)
        exact = torch.where(batch.lengths > 0, batch.scores - penalty, 0.0)
        return dataclasses.replace(shaped, rounding=exact - shaped.scores), Metrics(
            {"reward/overlong_penalty": Mean(float(penalty.sum()), len(batch))}
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowMask:
    """Rows of a step that do not train: no pass, no share of a denominator. Their scores count in all baselines."""

    truncated: bool = False
    """Rows that ended at the length limit (DAPO's overlong filtering, arXiv 2503.14476)."""
    zero_variance: bool = False
    """Rows of prompts without a signal, see `Advantage.signal`, as where dynamic sampling replaces them; a critic
    learns from them all the same."""

    def for_critic(self, batch: ScoredBatch) -> Bool[Tensor, " B"]:
        """Return which rows a critic learns from."""
        return ~batch.truncated if self.truncated else torch.ones_like(batch.truncated)

    def for_actor(self, batch: ScoredBatch, signal: Bool[Tensor, " B"]) -> Bool[Tensor, " B"]:
        """Return which rows the policy learns from, of which some are of prompts with a signal."""
        trains = self.for_critic(batch)
        return trains & signal if self.zero_variance else trains


def rows_that_learn(
    advantages: Float[Tensor, " T"], loss_mask: Bool[Tensor, " T"], offsets: Int[Tensor, " B1"]
) -> Bool[Tensor, " B"]:
    """Return which rows have a trained token with an advantage other than 0.

    All others have a policy loss of 0 without a gradient, and need no pass where nothing else is learned from them.
    """
    num_rows = len(offsets) - 1
    rows = torch.repeat_interleave(torch.arange(num_rows), offsets.diff())
    return row_sums((loss_mask & (advantages != 0)).double(), rows, num_rows) > 0
