"""Gradients that a thread adds up for itself, beside other threads that pass through the same model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class GradientSums:
    """The sum of the gradients of some weights over passes, in float32 at least; touches no `grad`.

    >>> weights = [torch.ones(2, dtype=torch.bfloat16, requires_grad=True), torch.ones(1, requires_grad=True)]
    >>> sums = GradientSums(weights)
    >>> sums.add_backward(3 * weights[0].sum())
    >>> sums.add_backward(weights[0].sum())
    >>> sums.totals
    [tensor([4., 4.]), None]
    """

    def __init__(self, weights: Sequence[Tensor]) -> None:
        """Begin with nothing."""
        self._weights = weights
        self.totals: list[Tensor | None] = [None] * len(weights)
        """Of each weight; None for one that no pass has used."""

    def add_backward(self, total: Tensor) -> None:
        """Run backward from the result of a pass, and add its gradients."""
        gradients = list(torch.autograd.grad(total, self._weights, allow_unused=True))
        while gradients:  # each of them is let go as soon as it is added
            self._add(len(gradients) - 1, gradients.pop())

    def add(self, other: GradientSums) -> None:
        """Add the sums of another thread, which are of no use any more."""
        while other.totals:
            self._add(len(other.totals) - 1, other.totals.pop())

    def _add(self, index: int, gradient: Tensor | None) -> None:
        total = self.totals[index]
        if total is not None and gradient is not None:
            total += gradient
        elif gradient is not None:
            # A copy, as torch may have given the same memory to several weights.
            dtype = torch.promote_types(gradient.dtype, torch.float32)
            self.totals[index] = gradient.to(dtype, copy=True, memory_format=torch.contiguous_format)
