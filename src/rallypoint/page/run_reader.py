"""A run as the page reads it: its journal, followed while it grows.

Owns: what of the journal is kept in memory. Must not know: panels, HTTP. A damaged line ends what can be read, and is
said; what stands before it is there.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Self

from rallypoint.config import RunConfig
from rallypoint.errors import RunFolderError
from rallypoint.journal import (
    STEP,
    BatchTaken,
    Entry,
    GroupDropped,
    GroupScored,
    JournalTail,
    Later,
    RolesRestarted,
    RolesStarted,
    RunBegan,
    RunState,
    StepDone,
    fold,
)
from rallypoint.observability.health import Health, health
from rallypoint.observability.trend import FLAT_STEPS, REWARD, RewardTrend
from rallypoint.run.folder import RunFolder
from rallypoint.run.reports import config_of
from rallypoint.run.troubles import Trouble, troubles
from rallypoint.run.waste import Account, account


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """A run as it was when its journal had so many lines; several threads may read it."""

    folder: RunFolder
    name: str
    """What the page calls it."""
    version: int
    """Number of changes that were seen before; of the same version, everything is the same."""
    damage: str
    """What is wrong with the journal; empty if nothing is."""
    entries: Sequence[Entry]
    """All events but those of groups and slices, oldest first."""
    _places: Mapping[int, Sequence[int]]
    """Step -> places of the groups that were scored since the batch before."""
    _unused: Sequence[int]
    """Places of the groups that no step was trained on."""
    _read: Callable[[int], Entry]

    @functools.cached_property
    def state(self) -> RunState:
        """What the journal says of the run."""
        return fold(self.entries)

    @functools.cached_property
    def steps(self) -> Mapping[int, Mapping[str, float]]:
        """Step -> all that was measured in it, and after it; oldest first."""
        found: dict[int, dict[str, float]] = {}
        trend = RewardTrend(num_warmup_steps=0 if self.config is None else self.config.num_warmup_steps)
        for record in self.state.records:
            found.setdefault(int(record[STEP]), {}).update(record)
        for step in sorted(self.state.steps):
            trend.add(found[step])
            if REWARD in found[step]:
                found[step][FLAT_STEPS] = trend.num_flat_steps
        return dict(sorted(found.items()))

    @functools.cached_property
    def findings(self) -> Mapping[int, Sequence[Health]]:
        """Step -> what there is to say about its health."""
        return {step: health(self.steps[step]) for step in sorted(self.state.steps)}

    @functools.cached_property
    def config(self) -> RunConfig | None:
        """The config of the newest start; None if this version cannot read it."""
        return config_of(self.state.began)

    @functools.cached_property
    def processes(self) -> Mapping[str, Sequence[str]]:
        """Role -> number and node of the process of each rank, those that were made anew among them."""
        found: dict[str, Sequence[str]] = {}
        for entry in self.entries:
            if isinstance(entry.event, RolesStarted | RolesRestarted):
                found |= entry.event.processes
        return found

    @functools.cached_property
    def account(self) -> Account:
        """What `rally waste` counts. A group that a step was trained on is no waste, so its line is not read."""
        return account(self._with_unused)

    @functools.cached_property
    def troubles(self) -> Sequence[Trouble]:
        """What `rally doctor RUN` finds."""
        return troubles(self._with_unused, self.folder)

    @functools.cached_property
    def _with_unused(self) -> Sequence[Entry]:
        return sorted([*self.entries, *map(self._read, self._unused)], key=lambda entry: entry.number)

    @property
    def is_running(self) -> bool:
        """Whether a process trains in it at this moment."""
        return self.folder.is_in_use()

    @property
    def rollouts_changed(self) -> str:
        """When files of rollouts came or went last, in nanoseconds; cheaper than their names."""
        folder = self.folder.path / "rollouts"
        return str(folder.stat().st_mtime_ns) if folder.is_dir() else ""

    def around(self, step: int) -> list[Entry]:
        """Return what a trace of a step is drawn from: no other steps, and the groups of this one."""
        others = (one for one in self.entries if not isinstance(one.event, StepDone) or one.event.step == step)
        groups = map(self._read, self._places.get(step, ()))
        return sorted([*others, *groups], key=lambda entry: entry.number)


class RunReader:
    """Follows one run; safe to be used by several threads."""

    def __init__(self, path: Path, name: str | None = None) -> None:
        """Read what is there.

        Args:
            path: folder of the run.
            name: what the page calls it; by default that of the folder.
        """
        self.folder = RunFolder(path)
        self.name = name or path.absolute().name
        self._tail = JournalTail(self.folder.journal, later=(GroupScored.__name__, "SliceSent"))
        self._entries = list[Entry]()
        self._places = dict[int, Sequence[int]]()
        self._since = list[int]()
        """Groups that were scored since the newest batch."""
        self._waiting = dict[int, int]()
        """Prompt -> its group, which no step has taken yet."""
        self._unused = list[int]()
        self._lock = threading.Lock()
        self._read = functools.lru_cache(maxsize=2**14)(self._tail.at)
        self._now = Snapshot(self.folder, self.name, 0, "", (), {}, (), self._read)

    @classmethod
    def several(cls, paths: Sequence[Path]) -> list[Self]:
        """Return a reader for each folder; of two with the same name, the second is called by its path."""
        names = Counter(path.absolute().name for path in paths)
        return [cls(path, str(path) if names[path.absolute().name] > 1 else None) for path in dict.fromkeys(paths)]

    def now(self) -> Snapshot:
        """Read what is new, and return all of it."""
        with self._lock:
            is_new, damage = False, ""
            try:
                for found in self._tail.read():
                    self._take(found)
                    is_new = True
            except (RunFolderError, OSError) as error:
                damage = str(error)
            if is_new or damage != self._now.damage:
                self._now = Snapshot(
                    folder=self.folder,
                    name=self.name,
                    version=self._now.version + 1,
                    damage=damage,
                    entries=tuple(self._entries),
                    _places=dict(self._places),
                    _unused=(*self._unused, *self._waiting.values()),
                    _read=self._read,
                )
            return self._now

    def _take(self, found: Entry | Later) -> None:
        if isinstance(found, Later):
            if found.prompt is not None:
                self._since.append(found.place)
                self._waiting[found.prompt] = found.place
            return
        self._entries.append(found)
        match found.event:
            case BatchTaken(step=step, prompts=prompts):
                self._places[step], self._since = self._since, []
                for prompt in prompts:
                    self._waiting.pop(prompt, None)
            case GroupDropped(prompt=prompt) if prompt in self._waiting:
                self._unused.append(self._waiting.pop(prompt))
            case RunBegan():
                self._unused += self._waiting.values()
                self._since, self._waiting = [], {}
            case _:
                pass
