"""What is done to scores and masks before advantages: long responses, truncated ones, and groups without a signal.

Owns: these three. Invariant: what is masked counts in no denominator; what merely has no advantage still does.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rallypoint.algorithms._rows import group_sums, normalized_in_groups, row_sums


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


def without_truncated(
    loss_mask: Bool[Tensor, " T"], offsets: Int[Tensor, " B1"], truncated: Bool[Tensor, " B"]
) -> Bool[Tensor, " T"]:
    """Return the mask without rows that ended at the length limit (DAPO's overlong filtering, arXiv 2503.14476).

    Their scores still count in the baseline of their prompt.
    """
    return loss_mask & ~truncated.repeat_interleave(offsets.diff())


def has_signal(scores: Float[Tensor, " B"], groups: Int[Tensor, " B"]) -> Bool[Tensor, " B"]:
    """Return which rows are in a group whose scores are not all equal.

    >>> has_signal(torch.tensor([1.0, 0.1, 0.0, 0.1, 0.1, 7.0]), torch.tensor([5, 2, 5, 2, 2, 9])).tolist()
    [True, False, True, False, False, False]
    """
    centred = normalized_in_groups(scores, groups, normalize_std=False)
    return group_sums((centred != 0).double(), groups) > 0


def rows_that_learn(
    advantages: Float[Tensor, " T"], loss_mask: Bool[Tensor, " T"], offsets: Int[Tensor, " B1"]
) -> Bool[Tensor, " B"]:
    """Return which rows have a trained token with an advantage other than 0.

    All others have a policy loss of 0 without a gradient, and need no pass where nothing else is learned from them.
    """
    num_rows = len(offsets) - 1
    rows = torch.repeat_interleave(torch.arange(num_rows), offsets.diff())
    return row_sums((loss_mask & (advantages != 0)).double(), rows, num_rows) > 0
