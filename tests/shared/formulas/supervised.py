"""Losses of fine-tuning, reward models and preferences as their papers write them, in loops over tokens.

Owns: nothing that a run computes with. They are what `rallypoint.algorithms.supervised` is compared with.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

Floats = Sequence[float]


def cross_entropy(logprobs: Sequence[Floats]) -> float:
    """Return the mean of -log p over all trained tokens of all rows; by row, [rows][tokens]."""
    total, num = 0.0, 0
    for row in logprobs:
        for logprob in row:
            total, num = total - logprob, num + 1
    return total / num


def bradley_terry(scores: Floats) -> float:
    """Return the mean of -log sigmoid(chosen - rejected) over pairs; scores of chosen and rejected take turns."""
    losses = [_softplus(rejected - chosen) for chosen, rejected in zip(scores[::2], scores[1::2], strict=True)]
    return sum(losses) / len(losses)


def preference(name: str, beta: float, logprobs: Sequence[Floats], reference: Sequence[Floats]) -> float:
    """Return the mean loss of pairs (arXiv 2305.18290, eq. 7; 2310.12036, eq. 17; 2411.15124, eq. 6).

    Args:
        name: of the loss.
        beta: how near the policy stays to the reference.
        logprobs: [rows][tokens] by the policy; chosen and rejected rows take turns.
        reference: likewise.
    """
    gains: list[float] = []
    for row, likely in zip(logprobs, reference, strict=True):
        gain = 0.0
        for logprob, before in zip(row, likely, strict=True):
            gain += logprob - before
        gains.append(gain if name == "sigmoid" else gain / len(row))
    losses: list[float] = []
    for chosen, rejected in zip(gains[::2], gains[1::2], strict=True):
        gap = chosen - rejected
        losses.append((gap - 1 / (2 * beta)) ** 2 if name == "ipo" else _softplus(-beta * gap))
    return sum(losses) / len(losses)


def _softplus(x: float) -> float:
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))
