"""`rally train`."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from rallypoint.library.launch import launch


def train(recipe: str, overrides: Sequence[str], *, resume: bool, from_step: int | None = None) -> int:
    """Train, and return the exit status: 0 when all steps are done, 130 when interrupted."""
    _, finished = launch(recipe, overrides, Console(), resume=resume, from_step=from_step)
    return 0 if finished else 130
