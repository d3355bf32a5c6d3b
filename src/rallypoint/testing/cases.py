"""Batches of few tokens, as plain numbers, with all that goes wrong in large ones.

Owns: rows that are empty, alone in their group, equally rewarded, or infinitely unlikely; and how numbers become the
tensors that algorithms take. Must not know: any formula.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Sequence

import torch

from rallypoint.algorithms import PolicyObjective, PolicyTokens, Rewards


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A batch of B rows and T tokens."""

    lengths: tuple[int, ...]
    """[B] tokens of each row."""
    groups: tuple[int, ...]
    """[B] the prompt of each row."""
    mask: tuple[bool, ...]
    """[T] True at trained tokens."""
    logprobs: tuple[float, ...]
    """[T] of the policy as it is."""
    old: tuple[float, ...]
    """[T] of the policy at the start of the update."""
    rollout: tuple[float, ...]
    """[T] of the sampler."""
    advantages: tuple[float, ...]
    """[T] what losses weigh tokens with."""
    rewards: tuple[float, ...]
    """[T] the reward that arrives with each token."""
    values: tuple[float, ...]
    """[T] of a critic."""
    selected: tuple[bool, ...]
    """[T] True at tokens that the loss selects."""
    component_names: tuple[str, ...] = ("score", "length")
    """Names of the rewards, as `Rewards.components` has them; none for a run whose reward is one function."""

    @property
    def offsets(self) -> list[int]:
        """[B+1] where rows begin and end."""
        return [0, *itertools.accumulate(self.lengths)]

    @property
    def rows(self) -> list[list[int]]:
        """[B] the positions of each row's trained tokens, in order."""
        return [[t for t in range(start, stop) if self.mask[t]] for start, stop in itertools.pairwise(self.offsets)]

    @property
    def scores(self) -> list[float]:
        """[B] the sum of each row's rewards."""
        return [math.fsum(self.rewards[t] for t in row) for row in self.rows]

    def tokens(self, *, dtype: torch.dtype = torch.float64) -> PolicyTokens:
        """Return what losses and corrections take."""
        return PolicyTokens(
            logprobs=torch.tensor(self.logprobs, dtype=dtype),
            old_logprobs=torch.tensor(self.old, dtype=dtype),
            rollout_logprobs=torch.tensor(self.rollout, dtype=dtype),
            advantages=torch.tensor(self.advantages, dtype=dtype),
            loss_mask=torch.tensor(self.mask, dtype=torch.bool),
            rows=torch.arange(len(self.lengths)).repeat_interleave(torch.tensor(self.lengths, dtype=torch.int64)),
            num_rows=len(self.lengths),
            selected=torch.tensor(self.selected, dtype=torch.bool),
        )

    def with_selected(self, objective: PolicyObjective) -> Case:
        """Return the batch with the tokens that a loss selects; it chooses them from the whole of it."""
        tokens = self.tokens()
        selected = objective.choose(tokens.rollout_logprobs, tokens.advantages, tokens.loss_mask, 0)
        return self if selected is None else dataclasses.replace(self, selected=tuple(selected.tolist()))

    def earned(self, *, dtype: torch.dtype = torch.float64) -> Rewards:
        """Return what advantages take."""
        token_rewards = torch.tensor(self.rewards, dtype=dtype)
        return Rewards(
            token_rewards=token_rewards,
            earned=token_rewards,
            loss_mask=torch.tensor(self.mask, dtype=torch.bool),
            offsets=torch.tensor(self.offsets, dtype=torch.int64),
            groups=torch.tensor(self.groups, dtype=torch.int64),
            values=torch.tensor(self.values, dtype=dtype),
            components={
                name: torch.tensor(self._component(place), dtype=dtype)
                for place, name in enumerate(self.component_names)
            },
        )

    def _component(self, place: int) -> list[float]:
        """[B] of each row: the score for the first component, the length for the second, then mixtures of both."""
        if place == 0:
            return self.scores
        by_row = zip(self.scores, self.rows, strict=True)
        return [(place - 1) * score + len(row) for score, row in by_row]

    def picked(self, rows: Sequence[int]) -> Case:
        """Return some rows, in this order."""
        offsets = self.offsets
        tokens = [t for row in rows for t in range(offsets[row], offsets[row + 1])]
        by_row = {name: tuple(getattr(self, name)[row] for row in rows) for name in _BY_ROW}
        by_token = {name: tuple(getattr(self, name)[t] for t in tokens) for name in _BY_TOKEN}
        return dataclasses.replace(self, **by_row, **by_token)

    def trained(self) -> Case:
        """Return the trained tokens alone."""
        kept = [t for row in self.rows for t in row]
        by_token = {name: tuple(getattr(self, name)[t] for t in kept) for name in _BY_TOKEN}
        return dataclasses.replace(self, lengths=tuple(len(row) for row in self.rows), **by_token)


_BY_ROW = ("lengths", "groups")
_BY_TOKEN = ("mask", "logprobs", "old", "rollout", "advantages", "rewards", "values", "selected")
"""Fields of a `Case` by what their numbers belong to."""


def make_case(
    lengths: Sequence[int], groups: Sequence[int], *, seed: int, spread: float = 1.0, trained: float = 0.8
) -> Case:
    """Return rows of these lengths with random numbers; the responses' probabilities move by `spread` nats.

    Rewards are multiples of a quarter, so that some are equal, and advantages are those of rows.
    """
    source = random.Random(seed)
    num_tokens = sum(lengths)
    rollout = [-source.random() * 3.0 for _ in range(num_tokens)]
    old = [min(x + source.gauss(0.0, spread), -1e-3) for x in rollout]
    row_advantages = [source.choice([-1.5, -0.5, 0.0, 0.5, 2.0]) for _ in lengths]
    mask = tuple(source.random() < trained for _ in range(num_tokens))
    return Case(
        lengths=tuple(lengths),
        groups=tuple(groups),
        mask=mask,
        logprobs=tuple(min(x + source.gauss(0.0, spread), -1e-3) for x in old),
        old=tuple(old),
        rollout=tuple(rollout),
        advantages=tuple(a for a, length in zip(row_advantages, lengths, strict=True) for _ in range(length)),
        rewards=tuple(source.randint(-2, 6) / 4 if is_trained else 0.0 for is_trained in mask),
        values=tuple(source.gauss(0.0, 1.0) for _ in range(num_tokens)),
        selected=(False,) * num_tokens,
    )


def _with(case: Case, **fields: Sequence[float]) -> Case:
    return dataclasses.replace(case, **{name: tuple(values) for name, values in fields.items()})


def _cases() -> dict[str, Case]:
    usual = make_case([4, 6, 3, 5], [0, 0, 1, 1], seed=1)
    alike = make_case([3, 3, 2], [0, 0, 0], seed=2, trained=1.0)
    endings = [float(t in {2, 5, 7}) * 0.1 for t in range(8)]
    far = make_case([3, 4], [0, 0], seed=3, spread=0.5, trained=1.0)
    gone = [-math.inf, -0.5, -30.0, -0.7, -math.inf, -0.2, -0.1]
    return {
        "usual": usual,
        "small moves": make_case([7, 2, 4, 6, 5], [3, 1, 3, 1, 1], seed=4, spread=0.01),
        "on policy": _with(usual, logprobs=usual.old, rollout=usual.old),
        "groups in any order": make_case([2, 5, 1, 4, 3, 2], [7, 2, 7, 2, 2, 7], seed=5),
        "a group of one": make_case([3, 4, 2], [0, 1, 0], seed=6),
        "empty responses": make_case([3, 0, 4, 0, 2], [0, 0, 1, 2, 1], seed=7),
        "nothing trained": make_case([2, 3], [0, 0], seed=8, trained=0.0),
        "no rows": make_case([], [], seed=9),
        "equal rewards": _with(alike, rewards=endings),
        "no advantage": _with(usual, advantages=[0.0] * 18),
        "excluded tokens": _with(far, logprobs=gone),
        "excluded by all": _with(far, logprobs=gone, old=gone, rollout=gone),
        "excluded by the sampler": _with(far, rollout=gone),
        "one long row": make_case([40], [0], seed=10, spread=0.1),
    }


CASES: dict[str, Case] = _cases()
"""Batches that break careless functions, by what is special about them."""
