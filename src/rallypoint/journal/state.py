"""The state of a run: one pure fold over its journal.

Invariant: a function of the events alone, so that every reader sees the same run. A start that goes on from step 20
supersedes what earlier starts did after step 20.

>>> from rallypoint.journal.events import RunBegan, RunEnded, StepDone
>>> began = RunBegan(first=0, config={"trainer.num_steps": 9}, software={}, machine="")
>>> done = [StepDone(step=step, metrics={}, digests={}) for step in (1, 2, 3)]
>>> killed = fold([began, *done])
>>> killed.step, killed.ended
(3, None)
>>> again = fold([began, *done, dataclasses.replace(began, first=2), RunEnded(how="stopped")])
>>> again.step, again.ended.how, again.num_starts, [start.first for start in again.starts], again.killed
(2, 'stopped', 2, [0, 2], [3])
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rallypoint.journal.events import (
    CheckpointSaved,
    Event,
    InputsRead,
    Launched,
    RoleLost,
    RolesRestarted,
    RolesStarted,
    RunBegan,
    RunEnded,
    StepDone,
    Validated,
    WeightsLoaded,
    WeightsPublished,
)


@dataclasses.dataclass(frozen=True, slots=True)
class RunState:
    """What there is to know of a run."""

    launched: Launched = Launched()
    """The newest command that made or resumed it."""
    began: RunBegan | None = None
    """Its newest start."""
    inputs: InputsRead | None = None
    """The files that it read."""
    num_starts: int = 0
    starts: Sequence[RunBegan] = ()
    """Starts that count, oldest first: those that no later one has superseded whole."""
    steps: Mapping[int, StepDone] = dataclasses.field(default_factory=dict[int, StepDone])
    """Steps that count, by number."""
    validations: Mapping[int, Validated] = dataclasses.field(default_factory=dict[int, Validated])
    checkpoints: Mapping[int, CheckpointSaved] = dataclasses.field(default_factory=dict[int, CheckpointSaved])
    published: Mapping[int, WeightsPublished] = dataclasses.field(default_factory=dict[int, WeightsPublished])
    """What each step published; at 0, or at the step that a start went on from, what it began with."""
    loaded: Mapping[int, WeightsLoaded] = dataclasses.field(default_factory=dict[int, WeightsLoaded])
    """What the ranks that sample then loaded."""
    ended: RunEnded | None = None
    """End of its newest start; None while it runs, or if it was killed."""
    killed: Sequence[int] = ()
    """Newest step of each earlier start that has no end."""
    losses: Sequence[RoleLost | RolesRestarted] = ()
    """Processes that were lost, over all starts, and how it went on after them."""

    @property
    def step(self) -> int:
        """Newest step that is done."""
        return max(self.steps, default=0 if self.began is None else self.began.first)


def is_superseded(step: float, first: int) -> bool:
    """Return whether a start that goes on from a step, 0 for none, does another step again, or what came after it."""
    return step > first or not first


def _supersede(first: int, *kinds: dict[int, Any]) -> None:
    """Remove what a start does anew that goes on from a step."""
    for done in kinds:
        for step in [step for step in done if is_superseded(step, first)]:
            del done[step]


def fold(events: Iterable[Event]) -> RunState:
    """Return the state that events make, oldest first."""
    launched, began, inputs, ended, num_starts = Launched(), None, None, None, 0
    starts, newest, killed, losses = list[RunBegan](), 0, list[int](), list[RoleLost | RolesRestarted]()
    steps, validations, checkpoints = dict[int, StepDone](), dict[int, Validated](), dict[int, CheckpointSaved]()
    published, loaded = dict[int, WeightsPublished](), dict[int, WeightsLoaded]()
    for event in events:
        match event:
            case RunBegan(first=first):
                killed += [max(steps, default=began.first)] if began is not None and ended is None else []
                began, inputs, ended, num_starts = event, None, None, num_starts + 1
                starts, newest = [*(one for one in starts if one.first < first), event], first
                _supersede(first, steps, validations, checkpoints, published, loaded)
            case Launched():
                launched = event
            case InputsRead():
                inputs = event
            case RolesStarted(step=step):
                newest = step + 1
            case StepDone(step=step):
                steps[step], newest = event, step + 1
            case WeightsPublished():
                published[newest] = event
            case WeightsLoaded():
                loaded[newest] = event
            case Validated(step=step):
                validations[step] = event
            case CheckpointSaved(step=step):
                checkpoints[step] = event
            case RoleLost() | RolesRestarted():
                losses.append(event)
            case RunEnded():
                ended = event
    of_steps = (steps, validations, checkpoints, published, loaded)
    return RunState(launched, began, inputs, num_starts, starts, *of_steps, ended, killed, losses)
