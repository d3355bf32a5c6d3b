"""The numbers of a run: read from its journal, and written for people as one JSON object per line.

    {"step": 12, "time_s": 8.1, "reward/mean": 0.41, "actor/loss": null, "not_finite": {"actor/loss": "nan"}}

`time_s` counts the seconds that the run has been at work; a resumed run goes on from its last line.
JSON has no NaN and no infinity: such a value is written as null, and `not_finite` has what it was
(`nan`, `inf`, `-inf`), so that any JSON reader can read the file.

The file is derived: each start writes it anew from the journal, so that a torn, damaged or missing one is whole again,
and what we show of a run is read from the journal alone. Each line reaches the operating system before `take` returns;
lines that the disk does not take wait in memory. Several lines may belong to one step (training, then validation).
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Mapping
from io import FileIO
from pathlib import Path

from rallypoint.disk import naming
from rallypoint.errors import DiskError
from rallypoint.journal import STEP, TIME, CheckpointSaved, Entry, RunBegan, fold, read_journal
from rallypoint.journal.state import Measured, is_superseded

NOT_FINITE = "not_finite"


class MetricsLog:
    """Writes a run's `metrics.jsonl` from the events of its journal."""

    def __init__(self, path: Path, journal: Path) -> None:
        """Begin without a file: the event that begins a start writes it, from the file of the journal."""
        self.path, self._journal = path, journal
        self._before_s = self._began_s = 0.0
        self._file: FileIO | None = None
        self._unwritten = b""

    def take(self, entry: Entry) -> None:
        """Write what an event of the run has measured.

        Raises:
            ValueError: a metric has one of the names that a line needs for itself.
            DiskError: the disk is full or not writable; the lines are written with the next one.
        """
        match entry.event:
            case RunBegan(first=first):
                with contextlib.suppress(DiskError):
                    self.close()
                lines = self._standing(first)
                if lines is None:
                    state = fold([*read_journal(self._journal), entry])  # where it may not be written yet
                    lines = [_encode(record).encode() for record in state.records]
                self._before_s, self._began_s = (json.loads(lines[-1])[TIME] if lines else 0.0), entry.time_s
                self._file, self._unwritten = None, b"".join(lines)
            case event if isinstance(event, Measured):
                if taken := sorted({STEP, TIME, NOT_FINITE} & event.metrics.keys()):
                    raise ValueError(f"{taken[0]!r} is not allowed as a metric: every line has that field")
                time_s = round(self._before_s + entry.time_s - self._began_s, 3)
                self._unwritten += _encode({STEP: event.step, TIME: time_s, **event.metrics}).encode()
            case _:
                return
        self._write(is_saved=isinstance(entry.event, CheckpointSaved))

    def _standing(self, first: int) -> list[bytes] | None:
        """Return the lines that a further start in this process leaves standing; None at the first, or without them.

        The journal has them, too, and takes ever longer to read.
        """
        if self._file is None:
            return None
        try:
            lines = (self.path.read_bytes() + self._unwritten).splitlines(keepends=True)
            return [line for line in lines if not is_superseded(json.loads(line)[STEP], first)]
        except (OSError, ValueError, KeyError):  # somebody wrote to the file
            return None

    def _write(self, *, is_saved: bool = False) -> None:
        with naming(self.path, len(self._unwritten)):
            if self._file is None:
                part = self.path.with_name(self.path.name + ".part")
                part.write_bytes(self._unwritten)
                part.replace(self.path)
                self._file = self.path.open("ab", buffering=0)
                self._unwritten = b""
            while self._unwritten:
                self._unwritten = self._unwritten[self._file.write(self._unwritten) :]
            if is_saved:  # no power cut takes the lines of its steps
                os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file.

        Raises:
            DiskError: lines that waited could not be written.
        """
        if self._file is not None:
            with contextlib.closing(self._file):
                self._write()


def _encode(record: Mapping[str, float]) -> str:
    odd = {name: repr(float(value)) for name, value in record.items() if not math.isfinite(value)}
    line: dict[str, object] = {name: None if name in odd else _number(value) for name, value in record.items()}
    if odd:
        line[NOT_FINITE] = odd
    return json.dumps(line, allow_nan=False) + "\n"


def _number(value: float) -> float:
    return int(value) if isinstance(value, int) else float(value)
