"""The numbers of a run: read from its journal, and written for people as one JSON object per line.

    {"step": 12, "time_s": 8.1, "reward/mean": 0.41, "actor/loss": null, "not_finite": {"actor/loss": "nan"}}

`time_s` counts the seconds that the run has been at work; a resumed run goes on from its last line.
JSON has no NaN and no infinity: such a value is written as null, and `not_finite` has what it was
(`nan`, `inf`, `-inf`), so that any JSON reader can read the file and ours loses nothing.

Each line reaches the operating system before `write` returns: a killed process loses no line. At worst
the last one is torn (no newline at its end), and then it is left out by readers and removed by the
next writer. Lines that the disk does not take wait in memory. Several lines may belong to one step
(training, then validation). The file is derived: what we show of a run is read from its journal.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from rallypoint.disk import naming
from rallypoint.errors import DiskError, RunFolderError
from rallypoint.journal import CheckpointSaved, Entry, RolesStarted, RunBegan, StepDone, Validated

STEP, TIME, NOT_FINITE = "step", "time_s", "not_finite"


class MetricsLog:
    """Appends to a run's `metrics.jsonl`; continues the file when it is already there."""

    def __init__(self, path: str | os.PathLike[str], *, clock: Callable[[], float] = time.monotonic) -> None:
        """Open the file.

        Args:
            path: of it.
            clock: tells seconds.
        """
        self.path, self._clock = Path(path), clock
        self._unwritten = bytearray()
        if self.path.exists():
            self._rewrite(_whole_lines(self.path))
        self._open()

    def take(self, entry: Entry) -> None:
        """Write what an event of the run has measured; a start drops the lines of steps that are done again."""
        match entry.event:
            case RunBegan(first=first):
                self.truncate_after(first)
            case RolesStarted() | StepDone() | Validated() | CheckpointSaved() as event:
                self.write(event.step, event.metrics)
                if isinstance(event, CheckpointSaved):  # no power cut takes the lines of its steps
                    self.sync()
            case _:
                pass

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Append one line and hand it to the operating system.

        Raises:
            ValueError: a scalar has one of the names that a line needs for itself.
            DiskError: the disk is full or not writable; the line is written before the next one.
        """
        taken = sorted({STEP, TIME, NOT_FINITE} & scalars.keys())
        if taken:
            raise ValueError(f"{taken[0]!r} is no name for a metric: every line already has one")
        time_s = self._before_s + self._clock() - self._began
        self._unwritten += _encode(step, time_s, scalars).encode()
        self._write()

    def _write(self) -> None:
        with naming(self.path, len(self._unwritten)):
            if self._file.closed:  # by a start that could not write it
                self._file = self.path.open("ab", buffering=0)
            while self._unwritten:
                del self._unwritten[: self._file.write(self._unwritten)]

    def sync(self) -> None:
        """Flush all lines to the disk, so that no power cut takes those of steps that a checkpoint has.

        Raises:
            DiskError: the disk is full or not writable.
        """
        with naming(self.path):
            os.fsync(self._file.fileno())

    def truncate_after(self, step: int) -> None:
        """Drop the lines of later steps (and a torn last one), for a run that goes on from this step; 0: all lines.

        The new file takes the place of the old one at once: a kill in the middle leaves one or the other.
        """
        with contextlib.suppress(DiskError):
            self.close()
        self._unwritten.clear()
        kept = [line for line, record in _records(self.path) if 0 < step >= record[STEP]]
        self._rewrite(kept)
        self._open()

    def close(self) -> None:
        """Close the file."""
        with contextlib.closing(self._file):
            self._write()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self) -> None:
        """Open for appending, and count the time from where the last line stopped."""
        with naming(self.path):
            self._file = self.path.open("ab", buffering=0)
        records = _records(self.path)
        self._before_s = records[-1][1][TIME] if records else 0.0
        self._began = self._clock()

    def _rewrite(self, lines: list[str]) -> None:
        """Replace the file atomically, unless it already holds just these lines."""
        text = "".join(line + "\n" for line in lines)
        if text.encode() == self.path.read_bytes():
            return
        part = self.path.with_name(self.path.name + ".part")
        with naming(self.path):
            with part.open("w", encoding="utf-8", newline="\n") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            part.replace(self.path)


def measurements(entries: Iterable[Entry]) -> list[dict[str, float]]:
    """Return what a journal has of a run's numbers, oldest first, as `metrics.jsonl` has them.

    Args:
        entries: of the whole journal.
    """
    found, before_s, began_s = list[dict[str, float]](), 0.0, 0.0
    for entry in entries:
        match entry.event:
            case RunBegan(first=first):
                found = [record for record in found if 0 < first >= record[STEP]]
                before_s, began_s = found[-1][TIME] if found else 0.0, entry.time_s
            case RolesStarted() | StepDone() | Validated() | CheckpointSaved() as event:
                time_s = round(before_s + entry.time_s - began_s, 3)
                found.append({STEP: event.step, TIME: time_s, **event.metrics})
            case _:
                pass
    return found


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, float]]:
    """Return the lines of a metrics file, oldest first; NaN and infinities are as they were.

    Raises:
        RunFolderError: a line that is not the last is damaged.
    """
    return [record for _, record in _records(Path(path))]


def _encode(step: int, time_s: float, scalars: Mapping[str, float]) -> str:
    odd = {name: repr(float(value)) for name, value in scalars.items() if not math.isfinite(value)}
    record: dict[str, object] = {STEP: step, TIME: round(time_s, 3)}
    record |= {name: None if name in odd else _number(value) for name, value in scalars.items()}
    if odd:
        record[NOT_FINITE] = odd
    return json.dumps(record, allow_nan=False) + "\n"


def _number(value: float) -> float:
    return int(value) if isinstance(value, int) else float(value)


def _whole_lines(path: Path) -> list[str]:
    """Return the lines that end in a newline; what follows the last newline was torn by a kill."""
    return path.read_bytes().decode("utf-8", errors="replace").split("\n")[:-1]


def _records(path: Path) -> list[tuple[str, dict[str, float]]]:
    return [(line, _decode(path, row, line)) for row, line in enumerate(_whole_lines(path), start=1)]


def _decode(path: Path, row: int, line: str) -> dict[str, float]:
    try:
        record = json.loads(line)
        odd = record.pop(NOT_FINITE, {})
        restored = {name: float(odd.get(name, "nan")) if value is None else value for name, value in record.items()}
        restored[STEP], restored[TIME] = int(restored[STEP]), float(restored[TIME])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise RunFolderError(
            f"{path}, line {row} is damaged ({error}): repair or remove the line, the others are whole"
        ) from error
    return restored
