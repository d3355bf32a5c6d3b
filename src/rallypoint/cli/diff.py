"""`rally diff`: where two runs part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from rallypoint.config import shown
from rallypoint.journal import Change
from rallypoint.observability.numbers import counted
from rallypoint.recipes.preflight import newest_of
from rallypoint.run.comparison import compare_runs


def print_difference(a: str, b: str) -> bool:
    """Print what differs in config and packages, and the first step and place in which two runs part.

    Returns:
        Whether the steps that both have done are equal.
    """
    console, found = Console(highlight=False), compare_runs(_run_of(a), _run_of(b))

    def say(line: str) -> None:
        console.print(line, markup=False, soft_wrap=True)

    _list(say, "config", found.config)
    _list(say, "config, on which no weight depends", found.free)
    _list(say, "files", found.files)
    _list(say, "packages and machine", found.around)
    compared = f"{counted(found.num_compared, 'step')} that both have done"
    if found.first is None:
        say(f"equal in the {compared}" if found.num_compared else "nothing to compare: no step that both have done")
        return True
    say(f"first difference: step {found.first.step}, {found.first.what}, of the {compared}")
    for line in found.where or (f"{found.first.of_a}  |  {found.first.of_b}",):
        say(f"  {line}")
    return False


def _list(say: Callable[[str], None], title: str, changes: Sequence[Change]) -> None:
    if changes:
        say(title)
        for one in changes:
            say(f"  {one.key}: {shown(one.of_a)}  |  {shown(one.of_b)}")


def _run_of(name: str) -> Path:
    return Path(name) if Path(name).is_dir() else newest_of(name, ())
