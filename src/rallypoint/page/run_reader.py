"""A run as the page reads it: its journal, followed while it grows.

Owns: what of the journal is kept in memory. Must not know: panels, HTTP. A damaged line ends what can be read, and is
said; what stands before it is there.
"""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, cast

from rallypoint.config import RunConfig
from rallypoint.errors import RunFolderError
from rallypoint.journal import BatchTaken, Entry, GroupScored, JournalTail, RunBegan, RunState, fold
from rallypoint.observability.health import Health, health
from rallypoint.observability.trend import FLAT_STEPS, RewardTrend
from rallypoint.run.folder import RunFolder
from rallypoint.run.metrics_log import STEP, measurements
from rallypoint.run.reports import nested


class RunReader:
    """Reads one run; safe to be used by several threads."""

    def __init__(self, path: Path, name: str | None = None, *, is_ours: bool = False) -> None:
        """Read what is there.

        Args:
            path: folder of the run.
            name: what the page calls it; by default that of the folder.
            is_ours: whether this process trains in it, and is about to end.
        """
        self.folder = RunFolder(path)
        self.name = name or path.absolute().name
        self._is_ours = is_ours
        self.damage = ""
        """What is wrong with the journal; empty if nothing is."""
        self.version = 0
        """Changes with every change of what was read."""
        self.entries: list[Entry] = []
        """All events but those of groups, oldest first."""
        self._tail = JournalTail(self.folder.journal, later=(GroupScored.__name__, "SliceSent"))
        self._places: dict[int, list[int]] = {}
        self._open: list[int] = []
        self._lock = threading.RLock()
        self.refresh()

    @classmethod
    def several(cls, paths: Sequence[Path]) -> list[Self]:
        """Return a reader for each folder; of two with the same name, the second is called by its path."""
        names = Counter(path.absolute().name for path in paths)
        return [cls(path, str(path) if names[path.absolute().name] > 1 else None) for path in dict.fromkeys(paths)]

    def refresh(self) -> bool:
        """Read what is new; return whether there was anything."""
        with self._lock:
            before = len(self.entries), len(self._open), self.damage
            try:
                for found in self._tail.read():
                    self._take(found)
                self.damage = ""
            except (RunFolderError, OSError) as error:
                self.damage = str(error)
            has_changed = before != (len(self.entries), len(self._open), self.damage)
            if has_changed:
                self.version += 1
                for name in ("state", "steps", "findings", "config"):
                    self.__dict__.pop(name, None)
            return has_changed

    def _take(self, found: Entry | int) -> None:
        if isinstance(found, int):
            self._open.append(found)
            return
        self.entries.append(found)
        if isinstance(found.event, BatchTaken):
            self._places[found.event.step], self._open = self._open, []
        elif isinstance(found.event, RunBegan):
            self._open = []

    @property
    def is_running(self) -> bool:
        """Whether a process trains in it; of a process that asks about itself, not."""
        return not self._is_ours and self.folder.is_in_use()

    @functools.cached_property
    def state(self) -> RunState:
        """What the journal says of the run."""
        return fold(entry.event for entry in self.entries)

    @functools.cached_property
    def steps(self) -> Mapping[int, Mapping[str, float]]:
        """Step -> all that was measured in it, and after it; oldest first."""
        found: dict[int, dict[str, float]] = {}
        trend = RewardTrend(num_warmup_steps=0 if self.config is None else self.config.num_warmup_steps)
        for record in measurements(self.entries):
            found.setdefault(int(record[STEP]), {}).update(record)
        for step in sorted(self.state.steps):
            trend.add(found[step])
            found[step][FLAT_STEPS] = trend.num_flat_steps
        return dict(sorted(found.items()))

    @functools.cached_property
    def findings(self) -> Mapping[int, Sequence[Health]]:
        """Step -> what there is to say about its health."""
        return {step: health(self.steps[step]) for step in self.state.steps}

    @functools.cached_property
    def config(self) -> RunConfig | None:
        """The config of the newest start; None if this version cannot read it."""
        began = self.state.began
        if began is None:
            return None
        try:
            return RunConfig.model_validate(nested(cast("Mapping[str, Any]", began.config)))
        except ValueError:
            return None

    def groups(self, step: int) -> Iterator[GroupScored]:
        """Yield the groups that were scored since the batch before that of a step."""
        for place in self._places.get(step, ()):
            event = self._tail.at(place).event
            if isinstance(event, GroupScored):
                yield event

    def taken(self, step: int) -> BatchTaken | None:
        """Return how the trainer got the batch of a step, newest start first; None if it has not."""
        taken = (entry.event for entry in reversed(self.entries) if isinstance(entry.event, BatchTaken))
        return next((event for event in taken if event.step == step), None)
