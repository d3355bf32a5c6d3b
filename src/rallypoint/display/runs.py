"""A list of runs on a screen: name, recipe, state, step, scores, age."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich import box
from rich.console import Console
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


def print_runs(console: Console, runs: Sequence[Overview], *, now: float) -> None:
    """Print a line for each run, and below the reasons of those that failed.

    Args:
        console: to print to.
        runs: in the order of the lines.
        now: seconds since the epoch, for ages.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="dim")
    table.add_column("run", overflow="fold")
    table.add_column("recipe", no_wrap=True)
    table.add_column("state", no_wrap=True)
    for name in ("step", "score", "best"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("age", justify="right", no_wrap=True)
    for run in runs:
        mark, style = _STYLES[run.state]
        step, best = run.best
        curve = "".join(sparkline([score for _, score in run.scores], _CURVE_CELLS))
        table.add_row(
            Text(clean(run.path.name), "bold"),
            clean(run.recipe),
            Text(f"{mark} {run.state}", style),
            f"{run.step}/{run.num_steps}",
            Text(_number(run.last) + ("*" if run.scores and not run.is_validated else ""), PALETTE["reward"]),
            Text.assemble(_number(best), (f" @{step}", "dim") if run.scores else ""),
            Text(curve, PALETTE["validation"]),
            Text(age(now - run.changed), "dim"),
        )
    console.print(table)
    if any(run.scores and not run.is_validated for run in runs):
        console.print("* mean reward of a step: the run has no validation", style="dim")
    for run in runs:
        if run.why:
            said = shorten(f"{clean(run.path.name)}: {clean(run.why)}", _MAX_WHY)
            console.print(Text(said, PALETTE["wrong"]), soft_wrap=True)


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
