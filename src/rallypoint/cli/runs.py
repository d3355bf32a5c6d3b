"""`rally runs`: which runs there are."""

from __future__ import annotations

import time
from pathlib import Path

from rich.console import Console

from rallypoint.display.runs import print_runs
from rallypoint.run.overview import find_runs


def list_runs(folder: str) -> None:
    """Print the runs below a folder, the newest first."""
    console, found = Console(highlight=False), find_runs(Path(folder).expanduser())
    if not found:
        console.print(f"no runs in {Path(folder).absolute()}; start one with `rally train RECIPE`", markup=False)
        return
    print_runs(console, found, now=time.time())
