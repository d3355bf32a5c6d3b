"""One plain line per step, for log files and pipes: no colour, no control codes, stable columns."""

from __future__ import annotations

import io
import math
import time
from collections.abc import Callable

from rich.console import Console

from rallypoint.display.progress import Progress
from rallypoint.display.state import Board, tokens_per_s
from rallypoint.display.summary import print_summary
from rallypoint.display.text import clean, clock_time
from rallypoint.observability.numbers import compact, counted, number
from rallypoint.run.reports import RunInfo, StepReport, Summary

WIDTHS = {"actor/loss": 7, "actor/approx_kl": 6}
"""Cells of a scalar's number; of others 5."""

LIKENESS: dict[int, str] = str.maketrans({"█": "#", "━": "-", "→": "->", "▲": "!", "·": "-", "…": "..."})


class PlainLines(Progress):
    """Writes to the console's file what the panel would draw."""

    def __init__(self, console: Console, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._file, self._encoding = console.file, console.encoding
        self._page = Console(file=io.StringIO(), color_system=None, force_terminal=False, width=80)
        self._state = Board(clock)
        self._advised: set[str] = set()
        """Words of health whose advice was given: once is enough for a log."""

    def start(self, run: RunInfo) -> None:
        """Write the run's name and folder."""
        self._state.start(run)
        parts = [f"{run.algorithm} {run.name}", counted(run.num_steps, "step")]
        parts += [f"resumed at step {run.first_step}"] if run.first_step > 1 else []
        parts += [run.detail, str(run.run_dir)]
        self._write("  ".join(clean(part) for part in parts if part))

    def waiting(self, message: str) -> None:
        """Write what is being waited for."""
        self._state.wait(message)
        self._write(f"{clean(message)} ...")

    def step(self, report: StepReport) -> None:
        """Write the step's line."""
        self._state.step(report)
        self._write(step_line(self._state, report))
        for finding in self._state.health:
            if finding.advice and finding.words not in self._advised:
                self._advised.add(finding.words)
                amount = "" if math.isnan(finding.value) else f" ({finding.name} {finding.value:.3g})"
                self._write(f"  {finding.words}{amount}: {finding.advice}")

    def validation(self, step: int, score: float) -> None:
        """Write a validation score."""
        self._state.validate(score)
        what = "validation loss" if self._state.validation_label == "val loss" else "validation"
        self._write(f"{what} after step {step}: {number(score)}")

    def note(self, message: str) -> None:
        """Write a warning."""
        self._state.note(message)
        self._write(f"note: {clean(message)}")

    def ending(self, message: str) -> None:
        """Write that the run ends after the step under way."""
        self._write(clean(message))

    def finish(self, summary: Summary) -> None:
        """Write the summary."""
        with self._page.capture() as page:
            print_summary(self._page, summary, self._state.notes)
        self._write(page.get().rstrip("\n"))

    def _write(self, line: str) -> None:
        """Write and flush; a file that cannot take our drawings gets their likeness in ASCII."""
        if not self._encoding.startswith("utf"):
            line = line.translate(LIKENESS).encode(self._encoding, "replace").decode(self._encoding)
        self._file.write(line + "\n")
        self._file.flush()


def step_line(state: Board, report: StepReport) -> str:
    """Write one step in columns that stay where they are from the first step to the last."""
    num_steps = state.run.num_steps if state.run is not None else report.step
    digits = len(str(num_steps))
    # One that is missing in a step is shown as a dash.
    scalars = [
        _cell(label, number(report.scalars.get(name)), 5 if at == 0 else WIDTHS.get(name, 5))
        for at, (name, label) in enumerate(state.watched)
    ]
    cells = [
        f"step {report.step:>{digits}}/{num_steps}",
        scalars[0],
        _cell("val", number(state.validation), 5),
        *scalars[1:],
        _cell("tok/s", compact(speed) if math.isfinite(speed := tokens_per_s(report)) else "-", 4),
        f"{report.seconds:>5.2f} s",
        f"eta {clock_time(state.eta_s)}",
        ", ".join(finding.words for finding in state.health),
    ]
    return "  ".join(cells)


def _cell(label: str, value: str, width: int) -> str:
    return f"{label} {value:>{width}}"
