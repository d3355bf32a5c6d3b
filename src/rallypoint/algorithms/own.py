"""Policy losses and advantages that are a function of the user's.

Owns: what such a function is given, and the check of what it returns. Must not know: where the function is from.
Invariants: it sees finite numbers only; it never sees weights, masks of other rows or denominators, so that what it
returns for a token means the same in every cut.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor

from rallypoint.algorithms.estimators import Advantage, Rewards
from rallypoint.algorithms.kl import MIN_LOGPROB
from rallypoint.algorithms.policy_losses import PolicyObjective, PolicyTokens, TokenLosses
from rallypoint.types import AtMaximum, Last, Maximum, Mean, Metric, Minimum, Sum

OwnLosses = Tensor | tuple[Tensor, Mapping[str, Tensor | Metric]]
"""The loss of each token, [T]; with it, numbers to watch: [T] each, of which a metric shows the mean, or metrics."""

TAKEN = frozenset(
    {"loss", "policy_loss", "approx_kl", "entropy", "reference_kl", "correction", "correction_square"}
    | {"correction_dropped", "ratio_error", "ratio_error_max", "grad_norm", "lr", "mfu", "num_tokens"}
)
"""Metrics of every update: two numbers of one name would be added up."""

_METRICS = Mean | Sum | Maximum | Minimum | Last | AtMaximum


@dataclasses.dataclass(frozen=True, kw_only=True)
class OwnObjective(PolicyObjective):
    """A function of the user's."""

    function: Callable[[PolicyTokens], OwnLosses]
    """Takes tokens of whole rows, see `PolicyTokens`; logprobs are -1000 where a model excludes a token."""

    needs_advantage = False
    is_watched_at_start = True

    def by_token(self, tokens: PolicyTokens) -> TokenLosses:
        """See `PolicyObjective.by_token`.

        Raises:
            TypeError: it returns something else.
            ValueError: there is not one for each token, or a metric has the name of another one.
        """
        names = ("logprobs", "old_logprobs", "rollout_logprobs")
        finite = {name: getattr(tokens, name).clamp(min=MIN_LOGPROB) for name in names}
        found: object = self.function(dataclasses.replace(tokens, **finite))
        losses, watched = found, cast("object", {})
        if isinstance(found, tuple) and len(cast("tuple[object, ...]", found)) == 2:
            losses, watched = cast("tuple[object, object]", found)
        if not isinstance(watched, Mapping):
            raise TypeError(f"with the losses comes a dictionary of numbers to watch, found {type(watched).__name__}")
        numbers = cast("Mapping[str, object]", watched)
        if taken := sorted(TAKEN & numbers.keys()):
            raise ValueError(f"the metric {taken[0]!r} is one of every update: give yours another name")
        num = len(tokens.logprobs)
        return _by_token(losses, num, "losses"), {
            name: x if isinstance(x, _METRICS) else _by_token(x, num, f"numbers to watch, {name!r},")
            for name, x in numbers.items()
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class OwnAdvantage(Advantage):
    """A function of the user's."""

    function: Callable[[Rewards], Tensor]
    """Returns the advantage of each token, [T]; what it says of tokens that are not trained is not read."""

    compares_group = False

    def estimate(self, rewards: Rewards) -> Float[Tensor, " T"]:
        """See `Advantage.estimate`.

        Raises:
            TypeError: it returns something else.
            ValueError: there is not one for each token.
        """
        advantages = _by_token(self.function(rewards), len(rewards.loss_mask), "advantages")
        return torch.where(rewards.loss_mask, advantages, 0.0).to(rewards.token_rewards.dtype)


def _by_token(x: object, num_tokens: int, what: str) -> Tensor:
    """Return what a function returned, if it has one number for each token."""
    wanted = f"the {what} must be a tensor of shape [{num_tokens}], one number for each token"
    if not isinstance(x, Tensor):
        raise TypeError(f"{wanted}, found {type(x).__name__}")
    if tuple(x.shape) != (num_tokens,):
        raise ValueError(
            f"{wanted}, found shape {list(x.shape)}: sums, means and weights are applied afterwards; row_means, "
            "row_totals and spread give each token the number of its row"
        )
    return x
