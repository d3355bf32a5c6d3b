"""Groups that are sampled, and that no saved step was trained on: a run that loses a process can take them again.

Owns: which of them a start may take over. Must not know: how they were sampled, or what they earn: they are scored
again. Without `rollout.max_staleness` the same prompts give the same tokens at any time, so all are taken over that
were sampled together, from memory. A run that samples ahead is on other weights after a kill: only groups that were
finished before newer weights than those of the checkpoint were published are what it would have had. It has files of
them, so that they outlive the driver, and says in `Resumed` which they are.

A run with two steps done samples ahead, is killed, and goes on after the first; prompt 7 was finished too late:

>>> groups = KeptGroups(is_on=True, is_ahead=True)
>>> for step, prompt in ((1, 5), (1, 6), (2, 7)):
...     groups.published(step)
...     groups.put(prompt, [])
>>> groups.go_on(1, PromptsDone(5, 5, (6,)))
[5]
"""

from __future__ import annotations

import base64
import dataclasses
import json
from collections.abc import Collection, Sequence
from typing import Any, Self, TypeAlias

from rallypoint.config import RunConfig
from rallypoint.environments.failures import RolloutFailure
from rallypoint.run.rollouts import RolloutFiles
from rallypoint.sampling.groups import PromptsDone
from rallypoint.types import Trajectory, Turn

Found: TypeAlias = Trajectory | RolloutFailure
"""What became of a rollout."""
_MOST_TOKENS = 2**23
"""Tokens that are kept in memory; beyond, the oldest groups are sampled again."""


@dataclasses.dataclass(frozen=True, slots=True)
class KeptGroup:
    """The rollouts of a prompt."""

    after: int
    """Steps that had been done when the newest weights were published that it may have tokens of."""
    rollouts: Sequence[Found]

    @property
    def num_tokens(self) -> int:
        """Sampled tokens."""
        trajectories = (one for one in self.rollouts if isinstance(one, Trajectory))
        return sum(len(turn.response) for one in trajectories for turn in one.turns)


@dataclasses.dataclass(frozen=True, slots=True)
class GoneOn:
    """What a start that goes on takes over."""

    kept: Sequence[int]
    """Prompts whose groups are not sampled again."""
    loads: Sequence[int] = ()
    """Version of the weights of each load before those that are loaded next, of a run that samples ahead."""


class KeptGroups:
    """Rollouts of a run by the index of their prompt; outlives a start of the roles."""

    def __init__(self, *, is_on: bool = False, is_ahead: bool = False, files: RolloutFiles | None = None) -> None:
        """Begin without groups.

        Args:
            is_on: whether groups are kept at all.
            is_ahead: whether the run samples ahead.
            files: of a run whose groups are to outlive the driver.
        """
        self._is_on, self._is_ahead, self._files = is_on, is_ahead, files
        self.groups: dict[int, KeptGroup] = {}
        """Those that need not be sampled again."""
        self._steps: dict[int, int] = {}
        """Step that was trained on a group, of those that were."""
        self._after = self._num_tokens = 0

    @classmethod
    def of(cls, config: RunConfig, files: RolloutFiles) -> Self:
        """Return those of a run.

        Which of over-sampled groups end first depends on all that are sampled. In a run in one process nothing is lost
        but all of it.
        """
        is_ahead = config.rollout.max_staleness > 0
        is_on = is_ahead or (config.cluster.runtime != "inline" and config.rollout.over_sampling is None)
        return cls(is_on=is_on, is_ahead=is_ahead, files=files if is_ahead else None)

    def published(self, step: int) -> None:
        """Note that the weights after a step are published: tokens may be of these from now on."""
        self._after = step

    def put(self, index: int, rollouts: Sequence[Found]) -> None:
        """Keep the rollouts of a prompt."""
        if not self._is_on:
            return
        self.groups[index] = kept = KeptGroup(self._after, rollouts)
        self._num_tokens += kept.num_tokens
        if self._files is not None:
            self._files.keep(index, lambda: _written(kept))
        while self._num_tokens > _MOST_TOKENS and len(self.groups) > 1:
            self.forget([next(iter(self.groups))])

    def taken(self, step: int, indices: Collection[int]) -> None:
        """Note which groups a step is trained on, or has dropped."""
        self._steps |= dict.fromkeys(self.groups.keys() & set(indices), step)

    def saved(self, step: int) -> None:
        """Forget what steps up to a saved one were trained on."""
        self.forget([index for index, taken in self._steps.items() if taken <= step])

    def forget(self, indices: Collection[int]) -> None:
        """Have groups sampled again, if they are needed again."""
        for index in indices:
            if (kept := self.groups.pop(index, None)) is not None:
                self._num_tokens -= kept.num_tokens
            self._steps.pop(index, None)
        if self._files is not None:
            self._files.forget(indices)

    def only(self, indices: Collection[int]) -> None:
        """Forget all others."""
        self.forget(self.groups.keys() - set(indices))
        self._steps.clear()

    def read(self) -> None:
        """Read those of an earlier driver back."""
        if self._files is not None:
            for index, text in self._files.kept().items():
                try:
                    self.groups[index] = _read(text)
                except ValueError:  # as a power cut may leave it
                    self._files.forget([index])
            self._num_tokens = sum(kept.num_tokens for kept in self.groups.values())

    def go_on(self, step: int, done: PromptsDone) -> list[int]:
        """Return the prompts whose groups are taken over after a step, and forget the others."""
        self.only(
            [
                index
                for index, kept in self.groups.items()
                if index >= done.oldest and index not in done.ahead and not (self._is_ahead and kept.after > step)
            ]
        )
        self._after = step
        return sorted(self.groups)


def _fields(of: Trajectory | Turn | RolloutFailure) -> dict[str, Any]:
    return {field.name: getattr(of, field.name) for field in dataclasses.fields(of)}


def _written(kept: KeptGroup) -> str:
    rollouts = [
        _fields(one) | {"turns": [_fields(turn) for turn in one.turns]} if isinstance(one, Trajectory) else _fields(one)
        for one in kept.rollouts
    ]
    return json.dumps({"after": kept.after, "rollouts": rollouts}, default=lambda data: base64.b64encode(data).decode())


def _read(text: str) -> KeptGroup:
    values = json.loads(text)
    return KeptGroup(values["after"], [_found(one) for one in values["rollouts"]])


def _found(values: dict[str, Any]) -> Found:
    if "turns" not in values:
        return RolloutFailure(**values)
    turns = tuple(_turn(turn) for turn in values.pop("turns"))
    return Trajectory(turns=turns, rewards=_as_tuple(values.pop("rewards")), **values)


def _turn(values: dict[str, Any]) -> Turn:
    experts: dict[str, Any] = {name: base64.b64decode(values[name]) for name in ("experts", "prompt_experts")}
    return Turn(**{name: _as_tuple(value) for name, value in values.items()} | experts)


def _as_tuple(value: Any) -> Any:
    return tuple(map(_as_tuple, value)) if isinstance(value, list) else value
