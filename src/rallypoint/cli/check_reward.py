"""`rally check-reward`: what the reward of a run makes of answers that are known to be right or wrong."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from rallypoint.prepare.check_reward import SHOWN_ROWS, Kind, Report
from rallypoint.prepare.check_reward import check_reward as check
from rallypoint.prepare.preflight import load_named


def check_reward(recipe: str, overrides: Sequence[str], *, max_rows: int) -> int:
    """Print a table of answers, scores and times; return 1 if there is something to look at, else 0."""
    console = Console(highlight=False)
    config = load_named(recipe, overrides).config
    with console.status("") as status:

        def say(text: str) -> None:
            if console.is_terminal:
                status.update(escape(text))
            else:
                print(text, file=sys.stderr)

        report = check(config, max_rows=max_rows, say=say)
    console.print("[bold]nothing to worry about[/]" if not report.worries else "look at this before a run:")
    for worry in report.worries:
        console.print(escape(f"- {worry}"), soft_wrap=True)
    functions = ", ".join(one.function for one in config.reward.all_functions)
    console.print(f"[bold]{escape(functions)}[/]: right answers are the ground truth {escape(report.form)}")
    console.print(_table(report))
    if report.low:
        console.print(f"right answers below the maximum, {len(report.low)}:")
    for example, got in report.low[:SHOWN_ROWS]:
        truth = repr(example.ground_truth)
        shown = truth if len(truth) <= 80 else f"{truth[:80]} ..."
        console.print(escape(f"  {example.name}: {got}; ground truth {shown}"), soft_wrap=True)
    if len(report.low) > SHOWN_ROWS:
        console.print(f"  and {len(report.low) - SHOWN_ROWS} more")
    return int(bool(report.worries))


def _table(report: Report) -> Table:
    table = Table(box=None, header_style="bold")
    for name in ("answer", "calls", "mean", "min", "max", "no score", "mean ms", "max ms"):
        table.add_column(name, justify="left" if name == "answer" else "right", no_wrap=True)
    for kind in report.kinds:
        table.add_row(*_cells(kind))
    return table


def _cells(kind: Kind) -> list[str]:
    scores = kind.scores
    found = [f"{number:.4g}" for number in (kind.mean, min(scores), max(scores))] if scores else ["-"] * 3
    milliseconds = [1000 * seconds for seconds in kind.seconds]
    times = [f"{sum(milliseconds) / len(milliseconds):.1f}", f"{max(milliseconds):.1f}"]
    return [kind.name, str(len(kind.outcomes)), *found, str(len(kind.failures)), *times]
