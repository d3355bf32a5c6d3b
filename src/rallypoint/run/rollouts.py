"""The rollouts of every step, a parquet file for each, written by a thread.

Owns: how much room the files take. Must not know: their columns (`step_rollouts.py`), or who looks at them.

    rollouts/step_000040.parquet          a row for each rollout of step 40: its batch in order, then what was replaced
    rollouts/validation_000040.parquet    those of the validation after it
    rollouts/ahead/00000321.json          prompt 321, sampled ahead: what a run that is killed need not sample again

Consumes: the rollouts of a step. Produces: its file, whole or not at all. Waits for: steps. Unblocked by: `put`,
`close`. A file that cannot be written is left out and named, and the run goes on: no weight depends on it.

Files take `max_gib` at most. Beyond that the older steps are thinned out: of the steps around the one that is n steps
old, about every n/8-th stays, if eight of the newest have room.

>>> steps = list(range(1, 17))
>>> while len(steps) > 8:
...     steps.remove(least_wanted(steps, newest=16))
>>> steps
[4, 8, 10, 12, 13, 14, 15, 16]
"""

from __future__ import annotations

import contextlib
import functools
import re
import shutil
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from rallypoint.checkpoint import sync
from rallypoint.disk import explain
from rallypoint.errors import RunFolderError
from rallypoint.journal import Journal

if TYPE_CHECKING:
    import pyarrow as pa

    from rallypoint.run.step_rollouts import StepRollouts

Kind: TypeAlias = Literal["step", "validation"]

_NAME = re.compile(r"(step|validation)_(\d+)\.parquet")
_GIB = 2**30
_RESERVE = _GIB
"""Bytes of the disk that rollouts leave free: checkpoints and metrics need them more."""
_MAX_WAITING = _GIB
"""Bytes of rollouts that may wait for a slow disk."""
ROWS_PER_GROUP = 64
"""Rows that stand together in a file, so that one can be read without the others."""
_PATIENCE_S = 60.0
"""Seconds that a checkpoint, or the end of a run, waits for a slow disk."""


class RolloutFiles:
    """The files of a run, and the thread that writes them."""

    def __init__(
        self,
        folder: Path,
        *,
        max_gib: float,
        first: int,
        journal: Journal,
        num_free: Callable[[Path], int] = lambda folder: shutil.disk_usage(folder).free,
    ) -> None:
        """Remove the files of steps that are done again.

        Args:
            folder: of the run.
            max_gib: room for all files; 0 for no files.
            first: step of the checkpoint that the run goes on from.
            journal: of the run.
            num_free: bytes that are free on the disk of a folder.
        """
        self._folder, self._max_bytes = folder / "rollouts", max_gib * _GIB
        self._ahead = self._folder / "ahead"
        self._journal, self._num_free = journal, num_free
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._lock, self._num_waiting = threading.Lock(), 0
        self._told: set[str] = set()
        self._sizes: dict[Path, int] = {}
        for file in self._folder.glob("*"):
            if file.suffix == ".part" or (_NAME.fullmatch(file.name) and step_of(file) > first):
                file.unlink(missing_ok=True)
            elif _NAME.fullmatch(file.name):
                self._sizes[file] = file.stat().st_size
        self._thread = threading.Thread(target=self._work, name="rollouts", daemon=True)
        self._thread.start()

    def put(self, step: int, rollouts: StepRollouts, kind: Kind = "step") -> None:
        """Have the rollouts of a step written, and return at once."""
        if not self._max_bytes:
            return
        size = rollouts.num_bytes
        with self._lock:
            if has_room := self._num_waiting + size <= _MAX_WAITING or not self._num_waiting:
                self._num_waiting += size
        if not has_room:
            self._tell("slow", f"{kind} {step} has no file: the disk is slower than the steps")
            return

        def write() -> None:
            try:
                self._write(self._folder / f"{kind}_{step:06d}.parquet", lambda: rollouts.table(step))
            finally:
                with self._lock:
                    self._num_waiting -= size

        self._jobs.put(write)

    def keep(self, index: int, write: Callable[[], str]) -> None:
        """Have a group that no step was trained on written, and return at once."""
        if self._max_bytes:
            self._jobs.put(lambda: self._keep(self._ahead / f"{index:08d}.json", write))

    def _keep(self, file: Path, write: Callable[[], str]) -> None:
        try:
            self._ahead.mkdir(parents=True, exist_ok=True)
            if self._num_free(self._ahead) >= _RESERVE:
                file.with_suffix(".part").write_text(write(), encoding="utf-8")
                file.with_suffix(".part").replace(file)
        except OSError as error:
            self._tell("ahead", f"{explain(file, error)}; after a kill it is sampled again")

    def forget(self, indices: Iterable[int]) -> None:
        """Have groups that were kept removed."""
        for index in indices:
            self._jobs.put(lambda file=self._ahead / f"{index:08d}.json": self._remove(file))

    def _remove(self, file: Path) -> None:
        with contextlib.suppress(OSError):
            file.unlink(missing_ok=True)

    def kept(self) -> dict[int, str]:
        """Return the groups that were kept, by the index of their prompt."""
        self.flush()
        found = dict[int, str]()
        for file in sorted(self._ahead.glob("*.json")):
            with contextlib.suppress(OSError):
                found[int(file.stem)] = file.read_text(encoding="utf-8", errors="replace")
        return found

    def flush(self, timeout_s: float = _PATIENCE_S) -> None:
        """Wait until all that was put is written, so that a checkpoint has no step without its rollouts."""
        done = threading.Event()
        self._jobs.put(done.set)
        if not done.wait(timeout_s):
            self._tell("hangs", f"the disk has not taken those of the last steps for {timeout_s:g} s")

    def close(self) -> None:
        """Write what is left, and end the thread."""
        self._jobs.put(None)
        self._thread.join(_PATIENCE_S)
        with contextlib.suppress(OSError):  # unless groups are left
            self._ahead.rmdir()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    def _write(self, file: Path, make: Callable[[], pa.Table]) -> None:
        import pyarrow.parquet as pq

        part = file.with_suffix(".part")
        try:
            self._folder.mkdir(exist_ok=True)
            pq.write_table(make(), part, compression="zstd", row_group_size=ROWS_PER_GROUP)
            size = part.stat().st_size
            if not self._make_room(file, size):
                part.unlink()
                return
            sync(part)
            part.replace(file)
        except Exception as error:  # noqa: BLE001 - the next step is written all the same
            part.unlink(missing_ok=True)
            self._tell("failed", f"{explain(file, error)}; the run goes on without it")
            return
        self._sizes[file] = size

    def _make_room(self, file: Path, size: int) -> bool:
        """Thin out older files until one more has room; return whether it has."""
        if self._num_free(self._folder) < _RESERVE:
            self._tell("full", f"{file.name} is left out: less than 1 GiB would be free on its disk")
            return False
        if size > self._max_bytes:
            self._tell("large", f"{file.name} is left out: it alone is larger than tracking.rollouts_gib")
            return False
        used = sum(found for path, found in self._sizes.items() if path != file)
        while used + size > self._max_bytes:
            self._tell("thinned", "older steps are thinned out, since tracking.rollouts_gib is used up")
            steps = [step_of(path) for path in self._sizes]
            step = least_wanted(steps, newest=step_of(file))
            for path in [path for path in self._sizes if step_of(path) == step]:
                path.unlink(missing_ok=True)
                used -= self._sizes.pop(path)
        return True

    def _tell(self, what: str, message: str) -> None:
        """Say it once in each start of a run."""
        if what not in self._told:
            self._told.add(what)
            self._journal.say(f"rollouts: {message}")


def least_wanted(steps: Sequence[int], *, newest: int) -> int:
    """Return the step to remove first: the older, the rounder (in powers of two) a step must be to stay."""
    return min(steps, key=lambda step: ((step & -step or 2**40) / (newest - step + 1), step))


def step_of(file: Path) -> int:
    """Return the step that a file is of."""
    return int(file.stem.rpartition("_")[2])


def rollout_files(run: Path, kind: Kind = "step") -> dict[int, Path]:
    """Return the files of a run by their step, oldest first."""
    files = [file for file in (run / "rollouts").glob(f"{kind}_*.parquet") if _NAME.fullmatch(file.name)]
    return {step_of(file): file for file in sorted(files, key=step_of)}


def read_rollouts(run: Path, step: int | None = None, kind: Kind = "step") -> list[dict[str, Any]]:
    """Return the rollouts of a step, each with all columns by name.

    Args:
        run: folder of the run.
        step: None for the newest.
        kind: those that were trained on, or those of the validation after the step.

    Raises:
        RunFolderError: there are none of that step, or the file is damaged.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    files = rollout_files(run, kind)
    if not files or step not in (None, *files):
        raise RunFolderError(
            f"{run}: rollouts/ has no {kind} {'' if step is None else step}; it has {_ranges(files) or 'none'} "
            "(tracking.rollouts_gib; older steps are thinned out)"
        )
    file = files[max(files) if step is None else step]
    try:
        rows: list[Mapping[str, Any]] = pq.read_table(file).to_pylist(maps_as_pydicts="strict")
    except (OSError, pa.ArrowException) as error:
        raise RunFolderError(f"{file} cannot be read: {error}") from error
    return [dict(row) for row in rows]


@functools.lru_cache(maxsize=128)
def scores_in(file: Path, changed: float) -> list[tuple[str, int, float | None]]:
    """Return name, prompt and score of each rollout of a file; what was read is kept.

    Args:
        file: of a step or a validation.
        changed: when it changed last.

    Raises:
        RunFolderError: it is damaged.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    del changed
    try:
        with pq.ParquetFile(file) as opened:
            columns = opened.read(["name", "prompt_index", "score"], use_threads=False).to_pydict()
    except (OSError, pa.ArrowException) as error:
        raise RunFolderError(f"{file} cannot be read: {error}") from error
    return list(zip(*columns.values(), strict=True))


def _ranges(steps: Sequence[int] | Mapping[int, object]) -> str:
    """Write steps as a person would.

    >>> _ranges([1, 2, 3, 8, 10, 11])
    '1-3, 8, 10-11'
    """
    found: list[list[int]] = []
    for step in steps:
        if found and step == found[-1][-1] + 1:
            found[-1].append(step)
        else:
            found.append([step])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in found)
