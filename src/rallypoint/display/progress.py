"""What the user sees of a run: a protocol, and the display that fits the terminal.

A display is entered before anything slow begins and left on every way out:

    with make_progress(console) as progress:
        progress.start(run)
        progress.waiting("starting Ray")
        ...
        progress.finish(summary)

Calls may come in any order and from one thread. Texts may be anything, the model's own included.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console

from rallypoint.display.panel import LivePanel
from rallypoint.display.plain import PlainLines
from rallypoint.display.screen import is_ours
from rallypoint.run.reports import RunInfo, StepReport, Summary


class Progress(Protocol):
    """The face of every display."""

    def start(self, run: RunInfo) -> None:
        """Show a run that begins or goes on."""
        ...

    def waiting(self, message: str) -> None:
        """Say what is being waited for, until the next step: `starting Ray`, `loading the model`."""
        ...

    def step(self, report: StepReport) -> None:
        """Show a step that is done."""
        ...

    def validation(self, step: int, score: float) -> None:
        """Show a validation score, made after so many steps; 0 is before training."""
        ...

    def note(self, message: str) -> None:
        """Show a warning; it is repeated in the summary."""
        ...

    def ending(self, message: str) -> None:
        """Say that the run ends after the step under way, because somebody asked for it."""
        ...

    def finish(self, summary: Summary) -> None:
        """Show the summary; the last call."""
        ...

    def give_back(self) -> None:
        """Make the terminal usable at once, because the process is about to end; from a handler of signals, too."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Silent:
    """Shows nothing, for tests and for programs that read the run folder instead."""

    def start(self, run: RunInfo) -> None:
        """Show nothing."""

    def waiting(self, message: str) -> None:
        """Show nothing."""

    def step(self, report: StepReport) -> None:
        """Show nothing."""

    def validation(self, step: int, score: float) -> None:
        """Show nothing."""

    def note(self, message: str) -> None:
        """Show nothing."""

    def ending(self, message: str) -> None:
        """Show nothing."""

    def finish(self, summary: Summary) -> None:
        """Show nothing."""

    def give_back(self) -> None:
        """Nothing to give back."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


def make_progress(console: Console, environment: Mapping[str, str] = os.environ) -> Progress:
    """Return the panel for a terminal that a person looks at, and plain lines for anything else.

    A variable that asks for colours makes no terminal of a pipe. A notebook gives its `!` commands a terminal that only
    looks like one: it prints what is redrawn line after line, codes included. A job in the background has a terminal,
    but another program is drawing on it.
    """
    return LivePanel(console) if can_redraw(console, environment) else PlainLines(console)


def can_redraw(console: Console, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether somebody looks at a terminal on which lines can be written over."""
    is_able = console.is_terminal and not console.is_dumb_terminal and console.encoding.startswith("utf")
    return is_able and is_ours(console.file) and not _is_notebook(environment)


def _is_notebook(environment: Mapping[str, str]) -> bool:
    """Whether a Jupyter kernel started this: each sets one of these for the commands that it runs."""
    is_inline = environment.get("MPLBACKEND", "").startswith("module://matplotlib_inline")
    return is_inline or any(name in environment for name in ("JPY_PARENT_PID", "COLAB_RELEASE_TAG"))
