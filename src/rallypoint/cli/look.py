"""`rally show`: what a run has sampled."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from rallypoint.display.rollouts import choose, print_rollouts
from rallypoint.recipes.preflight import newest_of
from rallypoint.run.rollouts import read_rollouts

_EACH = 2
_MAX_LINES = 12
"""Lines of each text, without --full."""


def show(
    run: str,
    *,
    step: int | None,
    best: int | None,
    worst: int | None,
    failed: int | None,
    validation: bool,
    full: bool,
) -> None:
    """Print rollouts of a step of a run, or of a recipe's newest run."""
    folder = Path(run) if Path(run).is_dir() else newest_of(run, ())
    rows = read_rollouts(folder, step, "validation" if validation else "step")
    if best is worst is failed is None:
        best = worst = failed = _EACH
    chosen = choose(rows, best=best or 0, worst=worst or 0, failed=failed or 0)
    print_rollouts(Console(highlight=False), rows, chosen, max_lines=None if full else _MAX_LINES)
