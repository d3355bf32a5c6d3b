"""What the loop tells a display.

A display is entered before anything slow begins and left on every way out:

    with make_progress(console) as progress:
        progress.start(run)
        progress.waiting("starting Ray")
        ...
        progress.finish(summary)

Calls may come in any order, from one thread. Texts may be anything, the model's own included.
"""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rallypoint.run.reports import RunInfo, StepReport, Summary


class Progress:
    """The face of every display; by itself it shows nothing."""

    def start(self, run: RunInfo) -> None:
        """Show a run that begins or is resumed."""

    def waiting(self, message: str) -> None:
        """Say what the run waits for, until the next step: `starting Ray`, `loading the model`."""

    def step(self, report: StepReport) -> None:
        """Show a step that is done."""

    def validation(self, step: int, score: float) -> None:
        """Show the validation score after some steps; step 0 is before training."""

    def note(self, message: str) -> None:
        """Show a warning; the summary repeats it."""

    def ending(self, message: str) -> None:
        """Say that the run ends after the current step, because somebody asked for it."""

    def finish(self, summary: Summary) -> None:
        """Show the summary; the last call."""

    def give_back(self) -> None:
        """Make the terminal usable at once, because the process is about to end; signal handlers call it, too."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the terminal as it was."""


class Silent(Progress):
    """Shows nothing, for tests and for programs that read the run folder instead."""
