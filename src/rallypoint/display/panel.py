"""The live panel: one frame on a terminal that shows a run learning.

`LivePanel` owns the terminal while it is entered and gives it back on every way out; what it draws is `frame.render`.
It draws when something was reported, at most three times a second, and once a second for the clock.
"""

from __future__ import annotations

import abc
import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Self, TypeVar

from rich.console import Console, ConsoleOptions, RenderResult
from rich.panel import Panel

from rallypoint.display.frame import render
from rallypoint.display.plain import PlainLines
from rallypoint.display.progress import Progress
from rallypoint.display.screen import Screen, can_redraw
from rallypoint.display.state import Board
from rallypoint.display.summary import print_summary
from rallypoint.run.reports import RunInfo, StepReport, Summary

ReportT = TypeVar("ReportT")

REFRESH_S = 1 / 3
"""Reports closer together than this share a frame; with the clock's own that is four a second."""


class DrawnPanel(Progress, abc.ABC):
    """Keeps the state of a run, and draws it anew when something was reported."""

    def __init__(self, clock: Callable[[], float], refresh_s: float) -> None:
        """Begin without a run.

        Args:
            clock: seconds.
            refresh_s: reports closer together than this share a picture, but those that are drawn at once.
        """
        self._clock, self._refresh_s, self._drawn = clock, refresh_s, -math.inf
        self._state = Board(clock)
        self._lock = threading.RLock()  # a signal handler may come in between

    def start(self, run: RunInfo) -> None:
        """See `Progress`, as for the other methods."""
        self._take(self._state.start, run, at_once=True)

    def waiting(self, message: str) -> None:
        """Count the seconds of the wait."""
        self._take(self._state.wait, message)

    def step(self, report: StepReport) -> None:
        """Redraw soon."""
        self._take(self._state.step, report)

    def validation(self, step: int, score: float) -> None:  # noqa: ARG002 - the sparkline has no step axis
        """Add the score to the sparkline."""
        self._take(self._state.validate, score)

    def note(self, message: str) -> None:
        """Redraw at once."""
        self._take(self._state.note, message, at_once=True)

    def ending(self, message: str) -> None:
        """Redraw at once, and keep the message."""
        self._take(self._state.end, message, at_once=True)

    def _take(self, take: Callable[[ReportT], None], report: ReportT, *, at_once: bool = False) -> None:
        """Take a report and redraw; if that was done just now, the next report redraws."""
        with self._lock:
            take(report)
        now = self._clock()
        if at_once or now - self._drawn >= self._refresh_s:
            self._drawn = now
            self._draw()

    @abc.abstractmethod
    def _draw(self) -> None:
        """Draw the state."""


class LivePanel(DrawnPanel):
    """Shows a run in one panel that is redrawn in place."""

    def __init__(self, console: Console, *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(clock, REFRESH_S)
        self._console = console
        self._screen = Screen(console, self._render)

    def finish(self, summary: Summary) -> None:
        """Replace the panel by the summary."""
        self._screen.stop(erase=True)
        print_summary(self._console, summary, self._state.notes)

    def give_back(self) -> None:
        """Show the cursor and the echo again."""
        self._screen.give_back()

    def __enter__(self) -> Self:
        self._screen.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._screen.stop()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self._render(options.max_width, console.size.height)

    def _render(self, width: int, height: int) -> Panel:
        with self._lock:
            return render(self._state, width, height)

    def _draw(self) -> None:
        if self._screen.is_started:
            self._screen.refresh()


def make_progress(console: Console, environment: Mapping[str, str] = os.environ) -> Progress:
    """Return the panel for a terminal that a person looks at, and plain lines for anything else."""
    return LivePanel(console) if can_redraw(console, environment) else PlainLines(console)
