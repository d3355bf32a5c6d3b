"""A list of runs on a screen: name, recipe, state, step, scores, age."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from rallypoint.display.text import clean, shorten, sparkline
from rallypoint.display.theme import GREEN, PALETTE, SKY, VERMILION
from rallypoint.run.overview import Overview, State

_STYLES: dict[State, tuple[str, str]] = {
    "running": ("▶", f"bold {SKY}"),
    "finished": ("●", GREEN),
    "stopped": ("‖", PALETTE["watch"]),
    "failed": ("✖", f"bold {VERMILION}"),
    "killed": ("✖", VERMILION),
    "damaged": ("✖", VERMILION),
}
"""Mark and style of a state; the mark says the same without colour."""
_CURVE_CELLS, _MAX_WHY = 10, 200
_CURVE = " "
_SPARE = (_CURVE, "best", "age", "recipe", "score", "step")
"""Columns to do without where all do not fit, in this order."""


def print_runs(console: Console, runs: Sequence[Overview], *, now: float) -> None:
    """Print a line for each run, and below the reasons of those that failed.

    Args:
        console: to print to.
        runs: in the order of the lines.
        now: seconds since the epoch, for ages.
    """
    unbounded = console.options.update(width=10_000)
    tables = (_table(runs, now, without=_SPARE[:count]) for count in range(len(_SPARE) + 1))
    sized = [(table, Measurement.get(console, unbounded, table).maximum) for table in tables]
    table = next((table for table, width in sized if width <= console.width), sized[-1][0])
    console.print(table, crop=False, no_wrap=True)
    if any(run.scores and not run.is_validated for run in runs):
        console.print("* mean reward of a step: the run has no validation", style="dim")
    for run in runs:
        if run.why:
            said = shorten(f"{clean(run.path.name)}: {clean(run.why)}", _MAX_WHY)
            console.print(Text(said, PALETTE["wrong"]), soft_wrap=True)


def _table(runs: Sequence[Overview], now: float, without: Sequence[str]) -> Table:
    """Return it without some columns; a name is never cut, for it is what other commands take."""
    columns: dict[str, list[Text]] = {
        "run": [Text(clean(run.path.name), "bold") for run in runs],
        "recipe": [Text(clean(run.recipe)) for run in runs],
        "state": [Text(f"{_STYLES[run.state][0]} {run.state}", _STYLES[run.state][1]) for run in runs],
        "step": [Text(f"{run.step}/{run.num_steps}") for run in runs],
        "score": [Text(_score(run), PALETTE["reward"]) for run in runs],
        "best": [
            Text.assemble(_number(run.best[1]), (f" @{run.best[0]}", "dim") if run.scores else "") for run in runs
        ],
        _CURVE: [
            Text("".join(sparkline([score for _, score in run.scores], _CURVE_CELLS)), PALETTE["validation"])
            for run in runs
        ],
        "age": [Text(age(now - run.changed), "dim") for run in runs],
    }
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="dim")
    shown = [name for name in columns if name not in without]
    for name in shown:
        justify = "right" if name in {"step", "score", "best", "age"} else "left"
        cells = max(column.cell_len for column in columns[name])
        table.add_column(name.strip(), justify=justify, no_wrap=True, min_width=cells)
    for row in zip(*(columns[name] for name in shown), strict=True):
        table.add_row(*row)
    return table


def _score(run: Overview) -> str:
    return _number(run.last) + ("*" if run.scores and not run.is_validated else "")


def age(seconds: float) -> str:
    """Write how long ago something was, in its largest unit.

    >>> [age(seconds) for seconds in (-1.0, 59.0, 90.0, 7200.0, 200_000.0)]
    ['0 s', '59 s', '1 min', '2 h', '2 d']
    """
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{int(seconds // size)} {unit}"
    return f"{max(0, int(seconds))} s"


def _number(value: float) -> str:
    return f"{value:.3f}" if math.isfinite(value) else "-"
