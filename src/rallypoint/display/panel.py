"""The live panel: one frame on a terminal that shows a run learning.

`LivePanel` owns the terminal while it is entered and gives it back on every way out; what it draws is `frame.render`.
It draws when something was reported, at most three times a second, and once a second for the clock.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console, ConsoleOptions, RenderResult
from rich.panel import Panel

from rallypoint.display.board import Board
from rallypoint.display.frame import render
from rallypoint.display.screen import Screen
from rallypoint.display.summary import print_summary
from rallypoint.run.reports import RunInfo, StepReport, Summary

REFRESH_S = 1 / 3
"""Reports closer together than this share a frame; with the clock's own that is four a second."""


class LivePanel:
    """Shows a run in one panel that is redrawn in place."""

    def __init__(self, console: Console, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._board = Board(clock)
        self._lock = threading.RLock()  # a handler of signals may come in between
        self._drawn = -math.inf
        self._screen = Screen(console, self._render)

    def start(self, run: RunInfo) -> None:
        """Show a run that begins or goes on."""
        with self._lock:
            self._board.start(run)
        self._draw()

    def waiting(self, message: str) -> None:
        """Say what is being waited for, and since when."""
        with self._lock:
            self._board.wait(message)
        self._draw()

    def step(self, report: StepReport) -> None:
        """Show a step that is done."""
        with self._lock:
            self._board.step(report)
        self._draw()

    def validation(self, step: int, score: float) -> None:  # noqa: ARG002 - the sparkline has no step axis
        """Show a validation score."""
        with self._lock:
            self._board.validate(score)
        self._draw()

    def note(self, message: str) -> None:
        """Show a warning; it is repeated in the summary."""
        with self._lock:
            self._board.note(message)
        self._draw(at_once=True)

    def ending(self, message: str) -> None:
        """Say that the run ends after the step under way, and stay with it."""
        with self._lock:
            self._board.end(message)
        self._draw(at_once=True)

    def finish(self, summary: Summary) -> None:
        """Replace the panel by the summary."""
        self._screen.stop(erase=True)
        print_summary(self._console, summary, self._board.notes)

    def give_back(self) -> None:
        """Make the terminal usable at once, because the process is about to end."""
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
            return render(self._board, width, height)

    def _draw(self, *, at_once: bool = False) -> None:
        """Redraw, unless it was done just now: then the next report or the clock will."""
        now = self._clock()
        if self._screen.is_started and (at_once or now - self._drawn >= REFRESH_S):
            self._drawn = now
            self._screen.refresh()
