"""What `--resume` is to go on with: the config of the run, with what its user has changed since.

`rally train FOLDER --resume` takes the folder's config. `rally train mine.yaml --resume` takes the newest run of that
recipe, and the file as it is now, with what was set on the command line at the start. Both lay the command line of this
start over it. Whether the run may go on so is for `resume.py` to say.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from rallypoint.config import COMMAND_LINE, LoadedConfig, RunConfig, TrainerConfig, load_config, read, shown, values_of
from rallypoint.errors import ConfigError
from rallypoint.recipes.machine import choices
from rallypoint.recipes.preflight import load_checked
from rallypoint.run.folder import RunFolder, Start, anchored, newest_run, open_run
from rallypoint.run.trust import unsigned


def find_wanted(recipe: str, overrides: Sequence[str], *, say: Callable[[str], None]) -> tuple[LoadedConfig, RunFolder]:
    """Return the config to go on with, checked, and the folder of the run.

    Args:
        recipe: the folder of a run, or a recipe of which the newest run is meant.
        overrides: of the command line.
        say: called with what else was taken over from the start of the run.

    Raises:
        RunFolderError: there is no run of that recipe.
        ConfigError: the config is wrong, or names code that this user has not named.
    """
    if _is_run(recipe):
        return load_named(recipe, overrides), open_run(Path(recipe))
    folder = open_run(_newest(recipe, overrides))
    start = Start.read(folder)
    taken = [one for one in start.overrides if not _sets(overrides, one.partition("=")[0])]
    if taken:
        say(f"{folder.path.name}: as on the command line of its start: {' '.join(taken)}")

    def as_before(_: RunConfig, left_open: tuple[str, ...]) -> dict[str, object]:
        values = dict(values_of(load_config(str(folder.path)).config))
        return {key: values[key] for key in left_open}

    loaded = load_checked(recipe, [*taken, *overrides], choose=as_before)
    named = {key for key, origin in loaded.origins.items() if origin != COMMAND_LINE or _sets(overrides, key)}
    _refuse_foreign(loaded, folder, named)
    return loaded, folder


def load_named(recipe: str, overrides: Sequence[str]) -> LoadedConfig:
    """Return a checked config; that of a run folder only if its user has named the code that it names.

    Raises:
        ConfigError: the config is wrong, or the folder of somebody else's run names code.
    """
    loaded = load_checked(recipe, overrides, choose=choices)
    if _is_run(recipe):
        named = {key for key, origin in loaded.origins.items() if origin == COMMAND_LINE}
        _refuse_foreign(loaded, RunFolder(Path(recipe).absolute()), named)
    return loaded


def _is_run(recipe: str) -> bool:
    return (Path(recipe) / "config.yaml").is_file()


def _refuse_foreign(loaded: LoadedConfig, folder: RunFolder, named: Set[str]) -> None:
    """Refuse code that only a run folder names, unless its user started that run."""
    code = unsigned(anchored(loaded.config), Start.read(folder).signed)
    foreign = {key: what for key, what in code.items() if key not in named}
    if foreign:
        values = dict(values_of(loaded.config))
        raise ConfigError(
            tuple(
                f"{key} ({what}) is code that {folder.path} names, and you did not start that run on this machine; "
                f"if you have read the code and trust it, name it yourself: {key}={shown(values[key])}"
                for key, what in foreign.items()
            )
        )


def _newest(recipe: str, overrides: Sequence[str]) -> Path:
    source = read(recipe, overrides)
    trainer: Mapping[str, Any] = source.values.get("trainer") or {}
    name, runs_dir = trainer.get("name") or source.name, trainer.get("runs_dir") or TrainerConfig().runs_dir
    return newest_run(str(name), Path(str(runs_dir)).expanduser())


def _sets(overrides: Sequence[str], key: str) -> bool:
    """Whether one of the overrides sets a key, or a section that it is in."""
    return any(f"{key}.".startswith(f"{one.partition('=')[0]}.") for one in overrides)
