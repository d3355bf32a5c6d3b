"""Draws a run's learning curve while the run goes on, in a process of its own.

    python -m rallypoint.display.draw METRICS PNG TITLE

A picture takes a second or two, mostly for importing matplotlib. Here that second is one of the lowest priority, so
that it is taken from idle cores, or else hardly at all; and nothing that goes wrong with it reaches the run.
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

FIRST_S, EVERY_S = 15.0, 60.0
"""Seconds from the beginning of the steps to the first picture, and between two."""


class CurveAsItGoes:
    """Keeps a run's picture at most a minute or so old."""

    def __init__(
        self,
        metrics: Path,
        png: Path,
        title: str,
        *,
        clock: Callable[[], float] = time.monotonic,
        start: Callable[[list[str]], subprocess.Popen[bytes]] | None = None,
    ) -> None:
        self._command = [sys.executable, "-m", "rallypoint.display.draw", str(metrics), str(png), title]
        self._clock, self._start = clock, start or _start
        self._due = clock() + FIRST_S
        self._drawing: subprocess.Popen[bytes] | None = None
        self._can_draw = start is not None or importlib.util.find_spec("matplotlib") is not None

    def refresh(self) -> None:
        """Begin a picture if it is time for one; returns at once, and never raises."""
        is_drawing = self._drawing is not None and self._drawing.poll() is None
        if not self._can_draw or is_drawing or self._clock() < self._due:
            return
        self._due = self._clock() + EVERY_S
        with contextlib.suppress(OSError):  # no process or no memory for one: the picture can wait
            self._drawing = self._start(self._command)

    def close(self) -> None:
        """End a picture that is being made: the last one is made by whoever ends the run."""
        if self._drawing is not None and self._drawing.poll() is None:
            self._drawing.kill()
            self._drawing.wait()


def _start(command: list[str]) -> subprocess.Popen[bytes]:
    # In a session of its own: a Ctrl-C is not meant for it.
    nowhere = subprocess.DEVNULL
    return subprocess.Popen(command, stdin=nowhere, stdout=nowhere, stderr=nowhere, start_new_session=True)


def main(metrics: str, png: str, title: str) -> None:
    """Draw once."""
    os.nice(19)
    from rallypoint.display.curve import save_curve

    save_curve(Path(metrics), Path(png), title)


if __name__ == "__main__":
    main(*sys.argv[1:])
