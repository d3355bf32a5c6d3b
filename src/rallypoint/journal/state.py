"""The state of a run: one pure fold over its journal.

Invariant: a function of the events alone, so that every reader sees the same run. A start that goes on from step 20
supersedes what earlier starts did after step 20.

>>> from rallypoint.journal.events import RunBegan, RunEnded, StepDone
>>> def state(*events):
...     return fold(Entry(number, number, event) for number, event in enumerate(events))
>>> began = RunBegan(first=0, config={"trainer.num_steps": 9}, software={}, machine="")
>>> done = [StepDone(step=step, metrics={}, digests={}) for step in (1, 2, 3)]
>>> killed = state(began, *done)
>>> killed.step, killed.ended
(3, None)
>>> again = state(began, *done, dataclasses.replace(began, first=2), RunEnded(how="stopped"))
>>> again.step, again.ended.how, [start.first for start in again.starts], [one.step for one in again.attempts]
(2, 'stopped', [0, 2], [3, 2])
>>> again.records
[{'step': 1, 'time_s': 1.0}, {'step': 2, 'time_s': 2.0}]
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

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
from rallypoint.journal.log import Entry

STEP, TIME = "step", "time_s"
Measured: TypeAlias = RolesStarted | StepDone | Validated | CheckpointSaved
"""What has metrics."""


@dataclasses.dataclass(frozen=True, slots=True)
class Attempt:
    """A start of a run, whether or not a later one has superseded what it did."""

    began: RunBegan
    began_s: float
    """When it began: seconds since the epoch."""
    until_s: float
    """Time of its newest event."""
    step: int
    """Newest step that was done at its end."""
    ended: RunEnded | None
    """How it ended; None while it runs, or if it was killed."""


@dataclasses.dataclass(frozen=True, slots=True)
class RunState:
    """What there is to know of a run."""

    launched: Launched = Launched()
    """The newest command that made or resumed it."""
    attempts: Sequence[Attempt] = ()
    """All of its starts, oldest first."""
    starts: Sequence[RunBegan] = ()
    """Starts that count, oldest first: those that no later one has superseded whole."""
    inputs: InputsRead | None = None
    """The files that the newest start read."""
    measured: Sequence[tuple[float, Measured]] = ()
    """Events with metrics that count, oldest first, each with the seconds that the run had been at work."""
    steps: Mapping[int, StepDone] = dataclasses.field(default_factory=dict[int, StepDone])
    """Steps that count, by number."""
    validations: Mapping[int, Validated] = dataclasses.field(default_factory=dict[int, Validated])
    checkpoints: Mapping[int, CheckpointSaved] = dataclasses.field(default_factory=dict[int, CheckpointSaved])
    published: Mapping[int, WeightsPublished] = dataclasses.field(default_factory=dict[int, WeightsPublished])
    """What each step published; at 0, or at the step that a start went on from, what it began with."""
    loaded: Mapping[int, WeightsLoaded] = dataclasses.field(default_factory=dict[int, WeightsLoaded])
    """What the ranks that sample then loaded."""
    losses: Sequence[RoleLost | RolesRestarted] = ()
    """Processes that were lost, over all starts, and how it went on after them."""
    heard_s: float = 0.0
    """Time of the newest event, in seconds since the epoch; 0 without any."""

    @property
    def began(self) -> RunBegan | None:
        """Its newest start."""
        return self.attempts[-1].began if self.attempts else None

    @property
    def ended(self) -> RunEnded | None:
        """End of its newest start; None while it runs, or if it was killed."""
        return self.attempts[-1].ended if self.attempts else None

    @property
    def records(self) -> list[dict[str, float]]:
        """Its numbers, oldest first, as `metrics.jsonl` has them; several may be of one step."""
        return [{STEP: one.step, TIME: time_s, **one.metrics} for time_s, one in self.measured]

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


def _measured(event: Event, at_s: float) -> list[tuple[float, Measured]]:
    return [(round(at_s, 3), event)] if isinstance(event, Measured) else []


def fold(entries: Iterable[Entry]) -> RunState:
    """Return the state that a journal makes, oldest entry first."""
    launched, attempts, starts, inputs = Launched(), list[Attempt](), list[RunBegan](), None
    measured, losses, newest = list[tuple[float, Measured]](), list[RoleLost | RolesRestarted](), 0
    steps, validations, checkpoints = dict[int, StepDone](), dict[int, Validated](), dict[int, CheckpointSaved]()
    published, loaded = dict[int, WeightsPublished](), dict[int, WeightsLoaded]()
    began, ended, began_s, before_s, heard_s = None, None, 0.0, 0.0, 0.0

    def attempt() -> list[Attempt]:
        return [] if began is None else [Attempt(began, began_s, heard_s, max(steps, default=began.first), ended)]

    for entry in entries:
        event = entry.event
        match event:
            case RunBegan(first=first):
                attempts += attempt()
                began, ended, began_s, inputs = event, None, entry.time_s, None
                starts, newest = [*(one for one in starts if one.first < first), event], first
                measured = [(at_s, one) for at_s, one in measured if not is_superseded(one.step, first)]
                before_s = measured[-1][0] if measured else 0.0
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
        measured += _measured(event, before_s + entry.time_s - began_s)
        heard_s = entry.time_s
    attempts += attempt()
    of_steps = (steps, validations, checkpoints, published, loaded)
    return RunState(launched, attempts, starts, inputs, measured, *of_steps, losses, heard_s)
