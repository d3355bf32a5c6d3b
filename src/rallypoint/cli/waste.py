"""`rally waste`: seconds and tokens of a run that bought nothing, by cause."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table

from rallypoint.cli.runs import run_of
from rallypoint.display.summary import in_short
from rallypoint.journal import read_journal
from rallypoint.observability.numbers import counted
from rallypoint.run.folder import RunFolder
from rallypoint.run.waste import account


def print_waste(run: str) -> None:
    """Print a line for each cause, the most seconds first, and their shares of the run."""
    console, found = Console(highlight=False), account(read_journal(RunFolder(run_of(run)).journal))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="dim")
    for name in ("cause", "", "tokens", "seconds"):
        table.add_column(name, justify="left" if name == "cause" else "right", no_wrap=True)
    for waste in found.wastes:
        how_often = counted(waste.num, waste.unit) if waste.num else ""
        table.add_row(waste.cause, how_often, f"{waste.tokens:,}" if waste.tokens else "", f"{waste.seconds:,.1f}")
    table.add_row("of the run", "", f"{found.tokens:,}", f"{found.seconds:,.1f}", style="dim")
    console.print(table)
    console.print(f"for nothing: {in_short(found)}" if found.wastes else "nothing was wasted", markup=False)
