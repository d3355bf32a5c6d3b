"""The file `schedule.jsonl` of a run that samples ahead, as it is read: whose it is, and whether a run can repeat it.

Owns: what the file says of its run. Must not know: how calls are written down or repeated (`sampling/replay.py`), or
torch, as the file is read before anything is started.

The first line has the number of ranks that sample, and every key of the config that decides what they are asked for.
A run that was killed has the same again where it went on, with the prompts that were done:

    {"num_ranks": 2, "config": {"seed": 0, "rollout.num_prompts": 8, ...}}
    {"resumed": 20, "done": {"num_taken": 160, ...}, "num_ranks": 2, "config": {...}}
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rallypoint.config import RunConfig, shown, values_of
from rallypoint.errors import ScheduleError
from rallypoint.run.folder import anchored
from rallypoint.run.resume import is_free

SCHEDULE = "schedule.jsonl"

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
        values: dict[str, Any] = json.loads(json.dumps(dict(values_of(anchored(config)))))
        return cls(num_ranks, {key: value for key, value in values.items() if _decides(key)})

    @classmethod
    def read(cls, line: Mapping[str, Any]) -> Origin:
        """Read it from a line of the file."""
        return cls(int(line["num_ranks"]), dict(line["config"]), line.get("resumed"))

    @property
    def line(self) -> dict[str, Any]:
        """What the file has of it."""
        return {"num_ranks": self.num_ranks, "config": self.config}

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
    events: tuple[dict[str, Any], ...]
    """Lines about ranks."""
    takes: tuple[tuple[int, ...], ...] = ()
    """Prompts of each step; empty if steps were taken in order."""

    @property
    def num_ranks(self) -> int:
        """Ranks that sample."""
        return self.origins[0].num_ranks

    @classmethod
    def read(cls, path: Path) -> RecordedSchedule:
        """Read a file.

        Raises:
            ScheduleError: it is missing or damaged, or has no beginning.
        """
        named = f"rollout.schedule={str(path)!r}"
        try:
            lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
            if "resumed" in lines[0]:
                raise ScheduleError(
                    f"{named} begins after step {lines[0]['resumed']}, where its run was resumed: nothing was recorded "
                    "before, so it cannot be repeated; expected the schedule of a run that had rollout.max_staleness "
                    "from its start"
                )
            takes = tuple(tuple(line["take"]) for line in lines if "take" in line)
            events = tuple(line for line in lines[1:] if line.keys() & {"slice", "load", "resumed"})
            return cls(tuple(Origin.read(line) for line in lines if "num_ranks" in line), events, takes)
        except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            if isinstance(error, ScheduleError):
                raise
            why = "no such file" if isinstance(error, FileNotFoundError) else error
            raise ScheduleError(
                f"{named} cannot be read ({why}); expected {SCHEDULE} of a run with rollout.max_staleness"
            ) from error

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


def listed(differences: Sequence[str]) -> str:
    """Write differences one after the other, the first of them."""
    more = len(differences) - _MOST
    return ", ".join(differences[:_MOST]) + (f", and {more} more" if more > 0 else "")
