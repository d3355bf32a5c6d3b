"""What the loop tells a display.

A display is entered before anything slow begins and left on every way out:

    with make_progress(console) as progress:
        journal.subscribe(progress.take)
        ...
        progress.finish(summary)

It is given the events of the run's journal, in their order, from any thread.
Texts may be anything, the model's own included.
"""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rallypoint.journal import Entry, RunBegan, Said, Shown, StepDone, Validated
from rallypoint.run.reports import RunInfo, StepReport, Summary


class Progress:
    """The face of every display; by itself it shows nothing."""

    _rollouts: Shown = Shown(step=0, rows=())
    _validated = "validation/score"

    def take(self, entry: Entry) -> None:
        """Show an event of the run."""
        match entry.event:
            case RunBegan() as began:
                run = RunInfo.of(began)
                self._validated = f"validation/{run.validated}"
                self.start(run)
            case Said(text=text, level="note"):
                first, _, more = text.partition("\n")
                self.note(f"{first} (more in logs/train.log)" if more else first)
            case Said(text=text, level="wait"):
                self.waiting(text)
            case Said(text=text, level="end"):
                self.ending(text)
            case Shown() as shown:
                self._rollouts = shown
            case StepDone() as done:
                self.step(StepReport.of(done, self._rollouts.rows if self._rollouts.step == done.step else ()))
            case Validated(step=step, metrics=metrics):
                self.validation(step, metrics[self._validated])
            case _:
                pass

    def start(self, run: RunInfo) -> None:
        """Show a run that begins or is resumed."""

    def waiting(self, message: str) -> None:
        """Show what the run waits for, until the next step: `starting Ray`, `loading the model`."""

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
