"""`rally train`."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from rallypoint.config import LoadedConfig
from rallypoint.display.screen import can_redraw
from rallypoint.errors import (
    ConfigError,
    DataError,
    DiskError,
    ModelError,
    PlacementError,
    RallyError,
    ResumeError,
    RewardError,
    RunFolderError,
    UnusableCheckpointError,
)
from rallypoint.recipes.machine import choices
from rallypoint.recipes.preflight import find_wanted, load_checked
from rallypoint.run.folder import RunFolder, create_run, has_begun, remove_run

if TYPE_CHECKING:
    from rallypoint.recipes.material import Found

_WRONG_MATERIAL = (ConfigError, DataError, ModelError, PlacementError, RewardError)
"""What keeps a run from beginning and is not mended by trying again: its folder would only repeat it."""


def train(recipe: str, overrides: Sequence[str], *, resume: bool, from_step: int | None = None) -> int:
    """Train, and return the exit status: 0 when all steps are done, 130 when interrupted."""
    console = Console()
    if resume:
        loaded, folder = find_wanted(recipe, overrides, say=partial(console.print, soft_wrap=True, markup=False))
    elif from_step is not None:
        raise ConfigError(("--from-step is for --resume: it names the checkpoint to go on from",))
    elif Path(recipe).is_dir():
        raise ConfigError((f"{recipe} is the folder of a run: resume it with --resume, or name a recipe",))
    else:
        loaded = load_checked(recipe, overrides, choose=choices)
        folder = None
    found = _examine(loaded, console)
    loaded = dataclasses.replace(loaded, config=found.settled(loaded.config))
    folder = folder or create_run(loaded)
    try:
        finished = _run(loaded, folder, console, found, resume=resume, from_step=from_step)
    except (RallyError, OSError, KeyboardInterrupt) as error:
        if isinstance(error, (RunFolderError, ResumeError, UnusableCheckpointError)):
            raise  # nothing was started
        if not resume and not has_begun(folder) and isinstance(error, (*_WRONG_MATERIAL, KeyboardInterrupt)):
            remove_run(folder)
            if isinstance(error, KeyboardInterrupt):
                console.print("interrupted before the first step: nothing was trained, and no folder is left")
            raise
        with contextlib.suppress(DiskError):  # which may be the very error
            folder.log(f"failed: {str(error) or type(error).__name__}")
        when = (
            "interrupted; go on with" if isinstance(error, KeyboardInterrupt) else "the run stopped; when it is mended"
        )
        console.print(f"{when}: rally train {folder.path} --resume", soft_wrap=True)
        raise
    if not finished:
        console.print(f"interrupted, nothing is lost; go on with: rally train {folder.path} --resume", soft_wrap=True)
    return 0 if finished else 130


def _examine(loaded: LoadedConfig, console: Console) -> Found:
    """Look at everything that the run begins with, before a new one has a folder."""
    # Only now torch, and with it the seconds that importing takes: the config is right.
    from rallypoint.recipes.material import examine

    with console.status("reading model and data") if can_redraw(console) else contextlib.nullcontext():
        return examine(loaded.config)


def _run(
    loaded: LoadedConfig, folder: RunFolder, console: Console, found: Found, *, resume: bool, from_step: int | None
) -> bool:
    from rallypoint.display import make_progress
    from rallypoint.recipes.ending import draw, summarise
    from rallypoint.recipes.loop import train as run

    with make_progress(console) as progress:
        finished = run(loaded, folder, progress, resume=resume, from_step=from_step, found=found)
        if finished:
            progress.finish(summarise(folder, loaded.config))
        else:
            draw(folder)
    return finished
