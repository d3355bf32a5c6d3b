"""Errors in a terminal: what was expected, what was found, what to do; no traceback for the user's own slips."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape

from rallypoint.errors import (
    ConfigError,
    DataError,
    ExportError,
    ModelError,
    RallyError,
    ResumeError,
    RewardError,
    RunFolderError,
)

WRONG_INPUT = (ConfigError, DataError, ExportError, ModelError, ResumeError, RewardError, RunFolderError)


def report(error: RallyError) -> int:
    """Print an error and return the exit status: 2 for wrong input, 1 for everything else."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(f"[bold red]error:[/] {escape(str(error))}")
    return 2 if isinstance(error, WRONG_INPUT) else 1
