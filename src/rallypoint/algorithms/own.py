"""Policy losses and advantages that are a function of the user's.

Owns: what such a function is given, and the checks of every call: what it returns, and that it modifies nothing. Must
not know: where the function is from. Invariants: it sees finite numbers only; it never sees weights, masks of other
rows or denominators, so that what it returns for a token means the same in every cut.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Generator, Mapping
from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor

from rallypoint.algorithms.group_relative import Advantage
from rallypoint.algorithms.kl import MIN_LOGPROB
from rallypoint.algorithms.policy_losses import PolicyObjective, PolicyTokens, TokenLosses
from rallypoint.algorithms.rewards import Rewards
from rallypoint.errors import NotFiniteError, OwnLossError, UserCodeError
from rallypoint.types import AtMaximum, Last, Maximum, Mean, Metric, Minimum, Sum

OwnLosses = Tensor | tuple[Tensor, Mapping[str, Tensor | Metric]]
"""The loss of each token, [T]; with it, numbers to watch: [T] each, of which a metric shows the mean, or metrics."""

TAKEN = frozenset(
    {"loss", "policy_loss", "approx_kl", "entropy", "reference_kl", "correction", "correction_square"}
    | {"correction_dropped", "ratio_error", "ratio_error_max", "grad_norm", "lr", "mfu", "num_tokens"}
)
"""Metrics of every update; these names are reserved, because a clash would sum both."""

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
            UserCodeError: it returns something else, not one for each token, or without a gradient; a metric has the
                name of another one; or an argument was modified.
            OwnLossError: a loss is not finite.
        """
        names = ("logprobs", "old_logprobs", "rollout_logprobs")
        given = dataclasses.replace(tokens, **{name: getattr(tokens, name).clamp(min=MIN_LOGPROB) for name in names})
        with _unmodified(self.function, given):
            found: object = self.function(given)
        if tokens.logprobs.requires_grad and torch.is_grad_enabled():
            checked = functools.partial(self._check_gradient, given)
            tokens.logprobs.register_hook(checked)  # pyright: ignore[reportUnknownMemberType]
        losses, watched = found, cast("object", {})
        if isinstance(found, tuple) and len(cast("tuple[object, ...]", found)) == 2:
            losses, watched = cast("tuple[object, object]", found)
        if not isinstance(watched, Mapping):
            raise UserCodeError(
                f"{self.function} must return losses, or (losses, dictionary of metrics); the second value is "
                f"{type(watched).__name__}"
            )
        numbers = cast("Mapping[object, object]", watched)
        if unnamed := [name for name in numbers if not isinstance(name, str)]:
            raise UserCodeError(f"a number that {self.function} watches needs a name, found {unnamed[0]!r}")
        if taken := sorted(TAKEN & numbers.keys()):
            raise UserCodeError(
                f"the metric {taken[0]!r} is one of every update: give that of {self.function} another name"
            )
        num = len(tokens.logprobs)
        return self._usable(losses, given), {
            str(name): x if isinstance(x, _METRICS) else _by_token(x, num, f"numbers {name!r} of {self.function}")
            for name, x in numbers.items()
        }

    def _usable(self, found: object, tokens: PolicyTokens) -> Tensor:
        """Return losses that training may use."""
        losses = _by_token(found, len(tokens.logprobs), f"losses of {self.function}")
        if tokens.logprobs.requires_grad and torch.is_grad_enabled() and not losses.requires_grad:
            raise UserCodeError(
                f"the losses of {self.function} do not depend on tokens.logprobs: they have no gradient; compute them "
                "from logprobs, ratio or log_ratio without detach(), and take torch.where instead of a return of zeros"
            )
        wrong = (tokens.loss_mask & ~losses.isfinite()).nonzero().flatten()
        if len(wrong):
            t = int(wrong[0])
            said = f"{self.function} returned {float(losses[t].detach())} for a token ({_seen(tokens, t)})"
            raise OwnLossError(int(tokens.rows[t]), said)
        return losses

    def _check_gradient(self, tokens: PolicyTokens, gradient: Tensor) -> None:
        wrong = (~gradient.isfinite()).nonzero().flatten()
        if len(wrong):
            t = int(wrong[0])
            raise NotFiniteError(
                f"the gradient of the losses of {self.function} by tokens.logprobs is {float(gradient[t])} for a token "
                f"({_seen(tokens, t)}): common causes: a root or log at 0, or a "
                "value that is not finite in the branch that torch.where discards"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class OwnAdvantage(Advantage):
    """A function of the user's."""

    function: Callable[[Rewards], Tensor]
    """Returns the advantage of each token, [T]; values at untrained tokens are ignored."""

    compares_group = False

    def estimate(self, rewards: Rewards) -> Float[Tensor, " T"]:
        """See `Advantage.estimate`.

        Raises:
            UserCodeError: it returns something else, or not one for each token; or an argument was modified.
            NotFiniteError: an advantage is not finite.
        """
        with _unmodified(self.function, rewards):
            found = self.function(rewards)
        advantages = _by_token(found, len(rewards.loss_mask), f"advantages of {self.function}")
        wrong = (rewards.loss_mask & ~advantages.isfinite()).nonzero().flatten()
        if len(wrong):
            row = int(rewards.rows[wrong[0]])
            raise NotFiniteError(
                f"an advantage is not finite: {self.function} returned {float(advantages[wrong[0]])} for a token of "
                f"prompt {int(rewards.groups[row])}, in a row whose score is {float(rewards.scores[row]):.4g}; divide "
                "by x.clamp(min=1e-6)"
            )
        return torch.where(rewards.loss_mask, advantages, 0.0).to(rewards.token_rewards.dtype)


def _seen(tokens: PolicyTokens, t: int) -> str:
    names = ("logprobs", "old_logprobs", "rollout_logprobs", "advantages")
    return ", ".join(f"{name} {float(getattr(tokens, name)[t].detach()):.4g}" for name in names)


def tensors_of(given: PolicyTokens | Rewards) -> dict[str, Tensor]:
    """Return the tensors of what a function is given, by name; those of `components` as `components['NAME']`."""
    fields = {field.name: getattr(given, field.name) for field in dataclasses.fields(given)}
    if isinstance(given, Rewards):
        fields |= {f"components[{name!r}]": x for name, x in given.components.items()}
    return {name: x for name, x in fields.items() if isinstance(x, Tensor)}


@contextlib.contextmanager
def _unmodified(function: object, given: PolicyTokens | Rewards) -> Generator[None, None, None]:
    """Raise a UserCodeError if a tensor is modified or replaced meanwhile; torch counts what is written into it."""
    tensors = tensors_of(given)
    before = {name: x._version for name, x in tensors.items()}
    yield
    after = tensors_of(given)
    for name in tensors | after:
        if after.get(name) is not tensors.get(name) or after[name]._version != before[name]:
            raise UserCodeError(
                f"{function} modified its argument {name}; write x * 2 for x.mul_(2), and clone before x[0] = 1"
            )


def _by_token(x: object, num_tokens: int, what: str) -> Tensor:
    """Return what a function returned, if it has one number for each token."""
    wanted = f"the {what} must be a tensor of shape [{num_tokens}], one number for each token"
    if not isinstance(x, Tensor):
        raise UserCodeError(f"{wanted}, found {type(x).__name__}")
    if tuple(x.shape) != (num_tokens,):
        raise UserCodeError(
            f"{wanted}, found shape {list(x.shape)}: sums, means and weights are applied afterwards; row_means, "
            "row_totals and spread give each token the number of its row"
        )
    return x
