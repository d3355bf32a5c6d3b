"""What a run that samples ahead did, read from its journal: whose it is, and whether a run can repeat it.

Owns: which events of a journal count. Must not know: how calls are repeated (`sampling/replay.py`), or torch, as it is
read before anything is started.

Every start has its config (`RunBegan`) and the ranks that sample (`WeightsLoaded`). One that goes on from a checkpoint
has the prompts that were done (`Resumed`), and what was sent after the weights of that checkpoint counts no more; if it
has taken groups over, what was sent after the next weights.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from rallypoint.config import RunConfig, shown, values_of
from rallypoint.errors import RunFolderError, ScheduleError
from rallypoint.journal import (
    BatchTaken,
    Event,
    Resumed,
    RolloutFailed,
    RunBegan,
    SliceSent,
    WeightsLoaded,
    read_journal,
)
from rallypoint.run.folder import anchored
from rallypoint.run.resume import is_free

Sent: TypeAlias = SliceSent | WeightsLoaded | Resumed
FailureName: TypeAlias = tuple[int, int, int | None]
"""A rollout: its prompt, its sample, and the step after which it was validated, None in training."""

_SHARED = ("validation", "data.validation", "trainer.num_steps")
"""Keys that no weights depend on, but calls of the ranks do."""
_MOST = 5
"""Differences that an error lists."""


@dataclasses.dataclass(frozen=True, slots=True)
class Origin:
    """What a part of a schedule was recorded with."""

    num_ranks: int
    """Ranks that sample."""
    config: Mapping[str, Any]
    """The keys that decide what they are asked for."""
    after_step: int | None = None
    """Step after which the run went on with it; None for its start."""

    @classmethod
    def of(cls, config: RunConfig, num_ranks: int) -> Origin:
        """Return that of a run."""
        return cls.read(RunBegan(first=0, config=dict(values_of(anchored(config))), software={}, machine=""), num_ranks)

    @classmethod
    def read(cls, began: RunBegan, num_ranks: int) -> Origin:
        """Return that of a start."""
        values: dict[str, Any] = json.loads(json.dumps(dict(began.config)))
        deciding = {key: value for key, value in values.items() if _decides(key)}
        return cls(num_ranks, deciding, began.first or None)

    def differences(self, other: Origin, word: str) -> list[str]:
        """Return what another one has differently.

        Args:
            other: that is compared.
            word: before its values.
        """
        missing = object()
        found = {key: (value, other.config.get(key, missing)) for key, value in self.config.items()}
        ranks = [f"{self.num_ranks} ranks of rollout ({word} {other.num_ranks})"]
        return (ranks if self.num_ranks != other.num_ranks else []) + [
            f"{key}={shown(mine)} ({word} {'a section' if theirs is missing else shown(theirs)})"
            for key, (mine, theirs) in found.items()
            if mine != theirs
        ]


def _decides(key: str) -> bool:
    is_shared = any(f"{key}.".startswith(f"{one}.") for one in _SHARED)
    return key != "rollout.schedule" and (is_shared or not is_free(key))


@dataclasses.dataclass(frozen=True, slots=True)
class RecordedSchedule:
    """A schedule as it was read."""

    origins: tuple[Origin, ...]
    """What it was recorded with: at its start, and wherever its run was resumed."""
    events: tuple[Sent, ...]
    """Events of ranks."""
    takes: tuple[tuple[int, ...], ...] = ()
    """Prompts of each step; empty if steps were taken in order."""
    failed: tuple[Mapping[FailureName, RolloutFailed], ...] = ({},)
    """Rollouts that failed, from the start and from each `Resumed` on; the engine's own failures are not repeated."""

    @property
    def num_ranks(self) -> int:
        """Ranks that sample."""
        return self.origins[0].num_ranks

    @property
    def loads(self) -> list[int]:
        """Version of the weights of each load, but for those that a start began with that went on."""
        before = zip((None, *self.events), self.events, strict=False)
        return [one.version for last, one in before if isinstance(one, WeightsLoaded) and not isinstance(last, Resumed)]

    def why_not_with(self, here: Origin) -> str | None:
        """Return why a single run cannot repeat this one and then go on with this config; None if it can."""
        found = [each for origin in self.origins for each in here.differences(origin, "was")]
        return f"goes on with {listed(list(dict.fromkeys(found)))}" if found else None

    @classmethod
    def read(cls, path: Path, resumed: Resumed | None = None) -> RecordedSchedule:
        """Read it from the journal of a run.

        Args:
            path: of the journal.
            resumed: with which it is about to go on.

        Raises:
            ScheduleError: it is missing or damaged, or has no beginning.
        """
        named = f"rollout.schedule={str(path)!r}"
        expected = "expected journal.jsonl of a run that had rollout.max_staleness from its start"
        if not path.is_file():
            raise ScheduleError(f"{named} cannot be read (no such file); {expected}")
        try:
            more = () if resumed is None else (resumed,)
            kept = _kept(itertools.chain((entry.event for entry in read_journal(path)), more))
        except RunFolderError as error:
            raise ScheduleError(f"{named} cannot be read ({error}); {expected}") from error
        origins = tuple(_origins(kept))
        if not origins or origins[0].after_step is not None:
            raise ScheduleError(f"{named} does not begin with the start of a run, so it cannot be repeated; {expected}")
        has_window = origins[0].config.get("rollout.window", 1) != 1
        takes = tuple(tuple(event.prompts) for event in kept if isinstance(event, BatchTaken)) if has_window else ()
        return cls(origins, tuple(event for event in kept if isinstance(event, Sent)), takes, tuple(_failed(kept)))

    def check(self, path: str, config: RunConfig, num_ranks: int | None = None) -> None:
        """Refuse to repeat it with another config.

        Args:
            path: of the file.
            config: of the run that is to repeat it.
            num_ranks: that sample in that run; None if they are not known yet.

        Raises:
            ScheduleError: they differ in what decides the calls of ranks, or the schedule itself has no one config.
        """
        for origin in self.origins:
            here = Origin.of(config, origin.num_ranks if num_ranks is None else num_ranks)
            if found := origin.differences(here, "here"):
                when = "" if origin.after_step is None else f" that went on after step {origin.after_step}"
                raise ScheduleError(
                    f"rollout.schedule={path!r} is of a run{when} with {listed(found)}; expected the same, as "
                    "what is sampled when follows from it"
                )


def _kept(events: Iterator[Event]) -> list[Event]:
    """Return the events that count: without those after a checkpoint that a later start went on from."""
    kept: list[Event] = []
    began: RunBegan | None = None
    for event in events:
        match event:
            case RunBegan(first=0):
                kept = [event]
            case RunBegan():
                began = event
            case Resumed() if began is not None:
                kept = [*_before(kept, event), began, event]
            case SliceSent() | WeightsLoaded() | BatchTaken() | RolloutFailed():
                kept.append(event)
            case _:
                pass
    return kept


def _before(kept: Sequence[Event], resumed: Resumed) -> list[Event]:
    """Return what counts of what happened before a start that went on."""
    if not resumed.kept:
        return [*kept[: _loaded_after(kept, resumed)]]
    again = [at for at, one in enumerate(kept) if isinstance(one, Resumed) and one.step == resumed.step]
    loads = [at for at, one in enumerate(kept) if isinstance(one, WeightsLoaded)]
    begin = next((at + 1 for at in loads if at > again[-1]), len(kept)) if again else _loaded_after(kept, resumed)
    end = next((at for at in loads if at >= begin), len(kept))
    return [*kept[:begin], *(one for one in kept[begin:end] if isinstance(one, SliceSent | RolloutFailed))]


def _loaded_after(kept: Sequence[Event], resumed: Resumed) -> int:
    """Return the place after the load of the weights of a checkpoint; 0 if there is none.

    Their version does not say which load that was: while a critic warms up, those of several steps have one.
    """
    takes = [at for at, one in enumerate(kept) if isinstance(one, BatchTaken) and one.step == resumed.step]
    after = takes[-1] if takes else 0
    loads = [
        at
        for at, one in enumerate(kept)
        if at >= after and isinstance(one, WeightsLoaded) and one.version == resumed.version
    ]
    return loads[0 if takes else -1] + 1 if loads else 0


def _failed(kept: Sequence[Event]) -> list[dict[FailureName, RolloutFailed]]:
    """Return the rollouts that failed, part by part."""
    found: list[dict[FailureName, RolloutFailed]] = [{}]
    for event in kept:
        if isinstance(event, Resumed):
            found.append({})
        elif isinstance(event, RolloutFailed) and event.why not in ("engine", "nonfinite"):
            found[-1][event.prompt, event.sample, event.validation] = event
    return found


def _origins(kept: Sequence[Event]) -> Iterator[Origin]:
    """Yield what each start was recorded with, once it has loaded weights."""
    began: RunBegan | None = None
    for event in kept:
        if isinstance(event, RunBegan):
            began = event
        elif isinstance(event, WeightsLoaded) and began is not None:
            yield Origin.read(began, event.num_ranks)
            began = None


def listed(differences: Sequence[str]) -> str:
    """Write differences one after the other, the first of them."""
    more = len(differences) - _MOST
    return ", ".join(differences[:_MOST]) + (f", and {more} more" if more > 0 else "")
