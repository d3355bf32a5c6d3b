"""`rally train`."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from rallypoint.errors import ConfigError, DiskError, RallyError, RunFolderError
from rallypoint.recipes.preflight import load_checked
from rallypoint.recipes.run_folder import create_run, newest_run, open_run, write_config


def train(recipe: str, overrides: Sequence[str], *, resume: bool) -> int:
    """Train, and return the exit status: 0 when all steps are done, 130 when interrupted."""
    if resume:
        path = Path(recipe) if (Path(recipe) / "config.yaml").is_file() else _newest(recipe, overrides)
        loaded, folder = load_checked(str(path), overrides), open_run(path)
        with folder.locked():
            write_config(folder, loaded.config)
    else:
        loaded = load_checked(recipe, overrides)
        if Path(recipe).is_dir():
            raise ConfigError((f"{recipe} is the folder of a run: resume it with --resume, or name a recipe",))
        folder = create_run(loaded)

    # Only now torch, and with it the seconds that importing takes: the config is right.
    from rallypoint.observability import make_progress
    from rallypoint.recipes.loop import summarise
    from rallypoint.recipes.loop import train as run

    console = Console()
    try:
        with make_progress(console) as progress:
            finished = run(loaded, folder, progress, resume=resume)
            if finished:
                progress.finish(summarise(folder, loaded.config))
    except (RallyError, OSError) as error:
        if not isinstance(error, RunFolderError):
            with contextlib.suppress(DiskError):  # which may be the very error
                folder.log(f"failed: {error}")
            console.print(f"the run stopped; when it is mended: rally train {folder.path} --resume", soft_wrap=True)
        raise
    if not finished:
        console.print(f"interrupted, nothing is lost; go on with: rally train {folder.path} --resume", soft_wrap=True)
    return 0 if finished else 130


def _newest(recipe: str, overrides: Sequence[str]) -> Path:
    loaded = load_checked(recipe, overrides)
    trainer = loaded.config.trainer
    return newest_run(trainer.name or loaded.name, Path(trainer.runs_dir).expanduser())
