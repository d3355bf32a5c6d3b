"""How losses of tokens become one number: a weight for every token, and one denominator for the whole batch.

    token           sum of all tokens / their number                          DAPO (arXiv 2503.14476)
    sequence        mean over rows of the mean over their tokens              GRPO (arXiv 2402.03300)
    fixed_length    mean over rows of their sum / a length                    Dr. GRPO (arXiv 2503.20783)
    prompt          mean over prompts of the mean over their tokens

Owns: these weights. Invariant: weights and denominator are those of a whole mini-batch, and a weight depends on
nothing that a cut changes, so that sums over micro-batches and ranks add up to the same loss.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rallypoint.algorithms._rows import group_sums, numbered, row_sums

AggregationName = Literal["token", "sequence", "fixed_length", "prompt"]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Weights:
    """What `aggregate` returns."""

    by_row: Float[Tensor, " B"]
    """Weight of each trained token of a row."""
    denominator: float
    """What the weighed sum over the whole batch is divided by."""


def aggregate(
    name: AggregationName,
    loss_mask: Bool[Tensor, " T"],
    offsets: Int[Tensor, " B1"],
    groups: Int[Tensor, " B"],
    *,
    length: float,
) -> Weights:
    """Return the weights of a mini-batch: all rows of all ranks.

    Rows without trained tokens are not counted, but for `fixed_length`, where a row counts however long it is.

    Two prompts: one with rows of one and three tokens, one with a row of two.

    >>> mask, offsets = torch.ones(6, dtype=torch.bool), torch.tensor([0, 1, 4, 6])
    >>> for name in ("token", "sequence", "fixed_length", "prompt"):
    ...     weights = aggregate(name, mask, offsets, torch.tensor([0, 0, 1]), length=10.0)
    ...     print(name, [round(w, 3) for w in weights.by_row.tolist()], weights.denominator)
    token [1.0, 1.0, 1.0] 6.0
    sequence [1.0, 0.333, 0.5] 3.0
    fixed_length [1.0, 1.0, 1.0] 30.0
    prompt [0.25, 0.25, 0.5] 2.0

    Args:
        name: of the rule.
        loss_mask: [T] True at trained tokens.
        offsets: [B+1] where rows begin and end.
        groups: [B] the prompt of each row.
        length: what `fixed_length` divides by: the longest response that there can be.
    """
    num_rows = len(groups)
    rows = torch.repeat_interleave(torch.arange(num_rows), offsets.diff())
    lengths = row_sums(loss_mask.double(), rows, num_rows)
    equal = torch.ones(num_rows, dtype=torch.float64)
    match name:
        case "token":
            return Weights(by_row=equal, denominator=float(lengths.sum()))
        case "sequence":
            return Weights(by_row=1.0 / lengths.clamp_min(1.0), denominator=float((lengths > 0).sum()))
        case "fixed_length":
            return Weights(by_row=equal, denominator=num_rows * float(length))
        case "prompt":
            of_group = group_sums(lengths, groups)
            _, num_prompts = numbered(groups[of_group > 0])
            return Weights(by_row=1.0 / of_group.clamp_min(1.0), denominator=float(num_prompts))


def num_prompts_held(
    weights: Float[Tensor, " B"],
    loss_mask: Bool[Tensor, " T"],
    offsets: Int[Tensor, " B1"],
    groups: Int[Tensor, " B"],
) -> float:
    """Return how many prompts some rows of a step hold: a prompt with rows elsewhere counts as the share that is here.

    A whole prompt counts as exactly 1. A row of one of the four tokens of prompt 0, and both tokens of prompt 1:

    >>> weights, mask = torch.tensor([0.25, 0.5], dtype=torch.float64), torch.ones(3, dtype=torch.bool)
    >>> num_prompts_held(weights, mask, torch.tensor([0, 1, 3]), torch.tensor([0, 1]))
    1.25

    Args:
        weights: [B] of the rows, by `aggregate` with "prompt" over all rows of the step.
        loss_mask: [T] True at trained tokens.
        offsets: [B+1] where rows begin and end.
        groups: [B] the prompt of each row.
    """
    rows = torch.repeat_interleave(torch.arange(len(groups)), offsets.diff())
    prompt, num_prompts = numbered(groups)
    here = row_sums(row_sums(loss_mask.double(), rows, len(groups)), prompt, num_prompts)
    tokens = (1.0 / weights).round()  # of the whole prompt: a sum of rounded weights would not be 1
    return float((here / here.scatter(0, prompt, tokens.double())).sum())
