"""One start of a run: its config is checked, its folder made, its loop run, its end told.

`rally train` and `rally.train` are the same start. Owns: which folders stay after a failure, and what is said then.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from rallypoint.config import LoadedConfig
from rallypoint.data.files import is_url
from rallypoint.data.hub import hub_as_found
from rallypoint.display.screen import can_redraw
from rallypoint.errors import (
    ConfigError,
    DataError,
    ModelError,
    PlacementError,
    RallyError,
    ResumeError,
    RewardError,
    RunFolderError,
    UnusableCheckpointError,
)
from rallypoint.prepare.inventory import look_around
from rallypoint.prepare.machine import choices, describe_choices
from rallypoint.prepare.preflight import bring_wanted, find_wanted, is_yet_to_start, load_checked
from rallypoint.recipes.interruption import Observer
from rallypoint.run.copies import refuse_taken
from rallypoint.run.folder import RunFolder, create_run, has_begun, remove_run
from rallypoint.run.mirror import sent_at_end

if TYPE_CHECKING:
    from rallypoint.display import Progress
    from rallypoint.prepare.material import Inputs

_WRONG_MATERIAL = (ConfigError, DataError, ModelError, PlacementError, RewardError)
"""What keeps a run from beginning and is not mended by trying again: its folder would only repeat it."""

_READING = "reading model and data"


def launch(
    recipe: str,
    overrides: Sequence[str],
    console: Console,
    *,
    resume: bool,
    from_step: int | None = None,
    progress: Progress | None = None,
    observer: Observer | None = None,
    in_words_of: Callable[[str], str] = str,
) -> tuple[RunFolder, bool]:
    """Train.

    Args:
        recipe: a shipped recipe, a YAML file, or the folder of a run.
        overrides: dotted keys and YAML values.
        console: for what is said before and after the run.
        resume: whether to go on from a checkpoint; a file of the user's whose run has no folder yet is begun, so that
            the same command starts it and goes on with it.
        from_step: of which step; see `loop.train`.
        progress: display; None for the one that fits the console.
        observer: see `loop.train`.
        in_words_of: gives what the console says in the words of the caller; as it is, in those of the command.

    Returns:
        The folder of the run, and whether all steps are done.
    """
    say = partial(console.print, soft_wrap=True, markup=False)
    if resume:
        if is_url(recipe):
            overrides = [f"trainer.runs_dir={recipe.rstrip('/').rpartition('/')[0]}", *overrides]
        recipe = bring_wanted(recipe, overrides, from_step)
    if resume and from_step is None and is_yet_to_start(recipe, overrides):
        say(f"no run of {recipe} to resume: a new one begins")
        resume = False
    if resume:
        loaded, folder = find_wanted(recipe, overrides, say=say)
    elif from_step is not None:
        raise ConfigError(("--from-step is for --resume: it names the checkpoint to go on from",))
    elif is_url(recipe) or Path(recipe).is_dir():
        raise ConfigError((f"{recipe} is the folder of a run: resume it with --resume, or name a recipe",))
    else:
        loaded = load_checked(recipe, overrides, choose=choices)
        folder = None
    with hub_as_found():
        return _launch(loaded, folder, console, progress, observer, in_words_of, resume=resume, from_step=from_step)


def _launch(
    loaded: LoadedConfig,
    folder: RunFolder | None,
    console: Console,
    progress: Progress | None,
    observer: Observer | None,
    in_words_of: Callable[[str], str],
    *,
    resume: bool,
    from_step: int | None,
) -> tuple[RunFolder, bool]:
    found = _examine(loaded, console)
    from rallypoint.display import make_progress
    from rallypoint.recipes.ending import draw, reported, summarise
    from rallypoint.recipes.loop import train

    if folder is None:
        loaded = found.dated(loaded)
        refuse_taken(loaded.config)
        folder = create_run(loaded)
    try:
        ended = sent_at_end(folder, loaded.config)
        with ended, reported(folder), progress or make_progress(console) as shown:
            finished = train(loaded, folder, shown, resume=resume, from_step=from_step, found=found, observer=observer)
            if finished:
                shown.finish(summarise(folder, loaded.config))
            else:
                draw(folder)
    except (RallyError, OSError, KeyboardInterrupt) as error:
        if isinstance(error, (RunFolderError, ResumeError, UnusableCheckpointError)):
            raise  # nothing was started
        if not resume and not has_begun(folder) and isinstance(error, (*_WRONG_MATERIAL, KeyboardInterrupt)):
            remove_run(folder)
            if isinstance(error, KeyboardInterrupt):
                console.print("interrupted before the first step: nothing was trained, and no folder is left")
            raise
        when = (
            "interrupted; go on with" if isinstance(error, KeyboardInterrupt) else "the run stopped; when it is mended"
        )
        console.print(in_words_of(f"{when}: rally train {folder.path} --resume"), soft_wrap=True)
        raise
    if not finished:
        how = f"interrupted, nothing is lost; go on with: rally train {folder.path} --resume"
        console.print(in_words_of(how), soft_wrap=True)
    return folder, finished


def _examine(loaded: LoadedConfig, console: Console) -> Inputs:
    """Look at everything that the run begins with, before a new one has a folder."""
    # A screen has its own line; anywhere else the first one is printed now, for the next comes after some seconds.
    if not can_redraw(console):
        console.print(f"{_READING} ...")
    with console.status(_READING) if can_redraw(console) else contextlib.nullcontext():
        # Only now torch, and with it the seconds that importing takes: the config is right.
        from rallypoint.prepare.material import examine

        found, config = examine(loaded.config), loaded.config
        chosen = describe_choices(loaded, look_around(config)) if config.cluster.device != "cpu" else ()
        return dataclasses.replace(found, notes=(*chosen, *found.notes))
