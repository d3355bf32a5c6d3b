"""What the critic minimises, and how well it predicts.

Owns: the value loss and the explained variance. Invariants: those of `losses`.
"""

from __future__ import annotations

import dataclasses

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rallypoint.types import Mean, Metrics

ROUNDING = 1e-12
"""A variance below this part of the mean square is rounding noise of float64 sums."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ValueLoss:
    """What `value_loss` returns; every field is a scalar tensor."""

    sum: Float[Tensor, ""]
    """Over trained tokens, with gradient."""
    num_tokens: Int[Tensor, ""]
    """Trained tokens."""
    num_clipped: Int[Tensor, ""]
    """Tokens whose loss is that of the clipped value."""
    value_sum: Float[Tensor, ""]
    """Sum of values as they are now."""
    error_sum: Float[Tensor, ""]
    """Sum of returns - values."""
    error_square_sum: Float[Tensor, ""]
    """Sum of (returns - values)**2."""
    return_sum: Float[Tensor, ""]
    """Sum of returns."""
    return_square_sum: Float[Tensor, ""]
    """Sum of returns**2."""

    def metrics(self) -> Metrics:
        """Return the means of this part of the batch; `explained_variance` needs them merged."""
        weight = float(self.num_tokens)
        totals = {
            "loss": self.sum.detach(),
            "clip_fraction": self.num_clipped,
            "value": self.value_sum,
            "error": self.error_sum,
            "error_square": self.error_square_sum,
            "return": self.return_sum,
            "return_square": self.return_square_sum,
        }
        return Metrics({name: Mean(float(total), weight) for name, total in totals.items()})


def value_loss(
    values: Float[Tensor, " T"],
    old_values: Float[Tensor, " T"],
    returns: Float[Tensor, " T"],
    loss_mask: Bool[Tensor, " T"],
    *,
    clip: float | None,
) -> ValueLoss:
    """Return half the squared error of the critic, summed over trained tokens.

        near = clamp(values, old_values - clip, old_values + clip)
        loss = max((values - returns)**2, (near - returns)**2) / 2

    as in the reference implementation of PPO (openai/baselines, ppo2/model.py); `clip=None` takes the first
    term alone.

    >>> result = value_loss(
    ...     values=torch.tensor([1.0, 1.0, 5.0]),
    ...     old_values=torch.tensor([0.0, 0.0, 0.0]),
    ...     returns=torch.tensor([1.0, 0.0, 0.0]),
    ...     loss_mask=torch.tensor([True, True, False]),
    ...     clip=0.5,
    ... )
    >>> float(result.sum), int(result.num_clipped)  # max(0, 0.25) / 2 + max(1, 0.25) / 2
    (0.625, 1)
    """
    values, old_values, returns = (torch.where(loss_mask, x, 0.0) for x in (values, old_values, returns))
    square = free = (values - returns).square()
    if clip is not None:
        near = values.clamp(old_values - clip, old_values + clip)
        square = torch.maximum(free, (near - returns).square())
    error, exact_returns = (returns - values).detach().double(), returns.double()
    return ValueLoss(
        sum=0.5 * square.sum(dtype=torch.float64),
        num_tokens=loss_mask.sum(),
        num_clipped=(square != free).sum(),
        value_sum=values.detach().sum(dtype=torch.float64),
        error_sum=error.sum(),
        error_square_sum=error.square().sum(),
        return_sum=exact_returns.sum(),
        return_square_sum=exact_returns.square().sum(),
    )


def explained_variance(
    *, error_mean: float, error_square_mean: float, return_mean: float, return_square_mean: float
) -> float:
    """Return 1 - Var(returns - values) / Var(returns), from means over all tokens of a step.

    The means are those of `ValueLoss.metrics`, merged: parts cannot be averaged after the division. 1 is a
    perfect critic, 0 one that is no better than a constant; NaN when all returns are equal.

    Returns 0 and 2 predicted as 0 and 1, so errors of 0 and 1:

    >>> explained_variance(error_mean=0.5, error_square_mean=0.5, return_mean=1.0, return_square_mean=2.0)
    0.75
    """
    return_variance = return_square_mean - return_mean**2
    if not return_variance > ROUNDING * return_square_mean:
        return float("nan")
    return 1.0 - (error_square_mean - error_mean**2) / return_variance
