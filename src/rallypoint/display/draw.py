"""Draws a run's learning curve while the run goes on, in a process of its own.

    python -m rallypoint.display.draw RUN

A picture takes a second or two, mostly for importing matplotlib. This process has the lowest priority, so that it takes
hardly any time from a busy machine; and no error of it reaches the run.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from rallypoint.journal import Entry, RolesStarted, RunEnded, StepDone

FIRST_S, EVERY_S = 15.0, 60.0
"""Seconds from the beginning of the steps to the first picture, and between two."""


class CurveAsItGoes:
    """Keeps a run's picture at most a minute or so old."""

    def __init__(
        self,
        run: Path,
        *,
        clock: Callable[[], float] = time.monotonic,
        start: Callable[[list[str]], subprocess.Popen[bytes]] | None = None,
    ) -> None:
        self._command = [sys.executable, "-P", "-m", "rallypoint.display.draw", str(run)]
        self._clock, self._start = clock, start or _start
        self._due = clock() + FIRST_S
        self._drawing: subprocess.Popen[bytes] | None = None
        self._can_draw = start is not None or importlib.util.find_spec("matplotlib") is not None

    def take(self, entry: Entry) -> None:
        """Draw after steps; the end of the run draws the last picture itself."""
        match entry.event:
            case RolesStarted():
                self._due = self._clock() + FIRST_S
            case StepDone():
                self.refresh()
            case RunEnded():
                self.close()
            case _:
                pass

    def refresh(self) -> None:
        """Start drawing if a picture is due; returns at once and never raises."""
        is_drawing = self._drawing is not None and self._drawing.poll() is None
        if not self._can_draw or is_drawing or self._clock() < self._due:
            return
        self._due = self._clock() + EVERY_S
        with contextlib.suppress(OSError):  # no process or no memory for one: the picture can wait
            self._drawing = self._start(self._command)

    def close(self) -> None:
        """Stop a picture that is being made: the end of the run draws the last one."""
        if self._drawing is not None and self._drawing.poll() is None:
            self._drawing.kill()
            self._drawing.wait()


def _start(command: list[str]) -> subprocess.Popen[bytes]:
    # In a session of its own, which Ctrl-C does not reach.
    nowhere = subprocess.DEVNULL
    return subprocess.Popen(command, stdin=nowhere, stdout=nowhere, stderr=nowhere, start_new_session=True)


def main(run: str) -> None:
    """Draw once."""
    os.nice(19)
    from rallypoint.display.curve import save_curve
    from rallypoint.run.folder import RunFolder

    save_curve(RunFolder(Path(run)))


if __name__ == "__main__":
    main(*sys.argv[1:])
