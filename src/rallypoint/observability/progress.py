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

from types import TracebackType
from typing import Protocol, Self

from rich.console import Console

from rallypoint.observability.panel import LivePanel
from rallypoint.observability.plain import PlainLines
from rallypoint.observability.reports import RunInfo, StepReport, Summary


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

    def finish(self, summary: Summary) -> None:
        """Show the summary; the last call."""
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

    def finish(self, summary: Summary) -> None:
        """Show nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


def make_progress(console: Console) -> Progress:
    """Return the panel for a terminal that can redraw, and plain lines for anything else."""
    can_draw = console.is_terminal and not console.is_dumb_terminal and console.encoding.startswith("utf")
    return LivePanel(console) if can_draw else PlainLines(console)
