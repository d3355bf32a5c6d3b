"""What a list of runs says of each: its recipe, its state, how far it is, and how good.

Owns: what states there are. Must not know: how they are drawn. Everything is read from the folder; nothing is written.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast

from rallypoint.config import read
from rallypoint.errors import ConfigError, RunFolderError
from rallypoint.journal import STEP, RunEnded
from rallypoint.run.copies import is_copy
from rallypoint.run.folder import RunFolder
from rallypoint.run.reports import REWARD, VALIDATION

State: TypeAlias = Literal["running", "elsewhere", "silent", "finished", "stopped", "failed", "killed", "damaged"]
"""`stopped`: by Ctrl-C or a callback, its state is saved. `failed`: by an error. `killed`: it ended without a word.
Of a run at a URL that has not ended nobody here knows whether its process lives: `elsewhere` if it was heard of in the
last minutes, `silent` if not.
"""
_SILENT_S = 300.0
"""Seconds without a further event at a URL after which a run is silent: one is sent once a minute, if there is one."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """One run in a list."""

    path: Path
    recipe: str
    state: State
    why: str = ""
    """Why it failed, in one line."""
    step: int = 0
    """Newest step."""
    num_steps: int = 0
    """Steps of the whole run."""
    scores: Sequence[tuple[int, float]] = ()
    """(step, score), oldest first: of validations, or mean rewards in a run without them."""
    is_validated: bool = False
    changed: float = 0.0
    """Time at which it wrote its newest metrics, or began; of one at a URL, of its newest event; since the epoch."""

    @property
    def last(self) -> float:
        """Newest score; NaN without one."""
        return self.scores[-1][1] if self.scores else math.nan

    @property
    def best(self) -> tuple[int, float]:
        """Step and score of the best; NaN without one."""
        finite = [one for one in self.scores if math.isfinite(one[1])]
        return max(finite, key=lambda one: one[1], default=(0, math.nan))


def find_runs(folder: Path) -> list[Overview]:
    """Return the runs below a folder, or the run that it is itself; the one that changed last comes first.

    Raises:
        RunFolderError: there is no such folder.
    """
    if not folder.is_dir():
        raise RunFolderError(f"{folder}: no such folder; expected one that holds runs, as trainer.runs_dir does")
    configs = [folder / "config.yaml"] if (folder / "config.yaml").is_file() else folder.glob("*/config.yaml")
    found = [overview(config.parent) for config in configs if not config.parent.name.startswith(".")]
    return sorted(found, key=lambda one: (-one.changed, one.path.name))


def state_of(run: RunFolder, ended: RunEnded | None, heard_s: float) -> State:
    """Return the state of a run that is not damaged.

    Args:
        run: its folder.
        ended: the end of its newest start, by its journal.
        heard_s: time of its newest event, in seconds since the epoch.
    """
    if run.is_in_use():
        return "running"
    if ended is not None:
        return ended.how
    if is_copy(run.path):
        return "elsewhere" if time.time() - heard_s < _SILENT_S else "silent"
    return "killed"


def overview(path: Path) -> Overview:
    """Return what there is to know of one run; a file that cannot be read makes it `damaged`."""
    run = RunFolder(path)
    newest = run.journal if run.journal.is_file() else run.config
    try:
        values = read(str(path)).values
        state = run.state()
    except (ConfigError, RunFolderError, OSError) as error:
        why = str(error)
        return Overview(path=path, recipe="?", state="damaged", why=why, changed=newest.stat().st_mtime)
    ended, records, heard_s = state.ended, state.records, state.heard_s or newest.stat().st_mtime
    name = VALIDATION if any(VALIDATION in record for record in records) else REWARD
    return Overview(
        path=path,
        recipe=str(values.get("recipe", "?")),
        state=state_of(run, ended, heard_s),
        why="" if ended is None else ended.why.partition("\n")[0],
        step=max((int(record[STEP]) for record in records), default=0),
        num_steps=_num_steps(values),
        scores=[(int(record[STEP]), record[name]) for record in records if name in record],
        is_validated=name == VALIDATION,
        changed=heard_s if is_copy(path) else newest.stat().st_mtime,
    )


def _num_steps(values: Mapping[str, Any]) -> int:
    trainer = values.get("trainer")
    found = cast("Mapping[str, object]", trainer).get("num_steps") if isinstance(trainer, Mapping) else None
    return found if isinstance(found, int) else 0
