"""A config and the files that it names, checked together before anything is started; and the config of a resumed run.

Nothing here imports torch or ray, and none of the user's code is run. `rally train FOLDER --resume` takes the folder's
config. `rally train mine.yaml --resume` takes the newest run of that recipe, the file as it is now, and what was set on
the command line at the start. Both lay the command line of this start over it. `run/resume.py` decides whether the run
may go on with it.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from rallypoint.cluster.capacity import memory_bytes
from rallypoint.config import (
    COMMAND_LINE,
    LoadedConfig,
    Problem,
    RunConfig,
    TrainerConfig,
    load_config,
    read,
    shipped_recipes,
    shown,
    values_of,
)
from rallypoint.config.automatic import Choose
from rallypoint.config.shape import shape_of
from rallypoint.data.digits import make_task
from rallypoint.data.files import check_dataset_rows, is_url
from rallypoint.data.locate import check_dataset_path, files_of, is_local
from rallypoint.data.remote import check_url
from rallypoint.environments.agents import check_agent_spec, is_agent
from rallypoint.environments.episodes import check_episode_spec
from rallypoint.environments.reward import NEEDS, check_reward_spec
from rallypoint.environments.shipped.mcp_servers import PACKAGE
from rallypoint.environments.shipped.passages import check_passages
from rallypoint.environments.shipped.tools import check_tool
from rallypoint.errors import ConfigError, DataError, EngineError, RunFolderError, ScheduleError
from rallypoint.extras import find_missing, find_unusable
from rallypoint.install import BUILDS, find_engine
from rallypoint.observability.trackers import find_tracker_problem
from rallypoint.prepare.machine import choices
from rallypoint.prepare.model_folders import adapter_problems, model_problems, position_problems
from rallypoint.prepare.role_memory import cache_bytes_per_token
from rallypoint.run.copies import bring, names_of_runs
from rallypoint.run.data_sets import data_sets
from rallypoint.run.folder import RunFolder, anchored, named_run, newest_run, open_run, runs_of_name
from rallypoint.run.recorded_schedule import RecordedSchedule
from rallypoint.run.trust import unsigned
from rallypoint.user_code import find_misfits

_BARE_NAME = re.compile(r"[\w-]+")
"""What may be the name of runs, and is not a path."""


def load_checked(
    name: str,
    overrides: Sequence[str] = (),
    *,
    choose: Choose | None = None,
    draft: bool = False,
    elsewhere: bool = False,
) -> LoadedConfig:
    """Load a config whose files are there.

    Args:
        name: a shipped recipe, a YAML file, or the folder of a run.
        overrides: dotted keys and YAML values, such as `actor.optimizer.lr=3e-4`.
        choose: chooses values of automatic keys that nobody set; see `load_config`.
        draft: whether keys that are required may still be missing.
        elsewhere: whether the config is for another machine, which may have files and packages that are not here.

    Raises:
        ConfigError: everything that is wrong, at once.
    """
    look = _problems_elsewhere if elsewhere else file_problems
    return load_config(name, overrides, look=look, choose=choose, draft=draft)


def _problems_elsewhere(config: RunConfig) -> Iterator[Problem]:
    return (problem for problem in file_problems(config) if not problem.is_local)


def file_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield every named file that is missing, empty or not what it should be."""
    for name, path in config.named_models.items():
        yield from model_problems(name, path)
        yield from position_problems(name, path, config)
    if config.model.lora is not None and config.model.lora.path is not None:
        yield from adapter_problems("model.lora.path", config.model.lora.path, config.model.path)
    for name in ("data.train", "data.validation"):
        yield from _data(name, config)
    yield from _generated(config)
    yield from _cache(config)
    yield from _schedule(config)
    if config.cluster.runtime == "ray" and (problem := find_missing("ray", "ray")) is not None:
        yield Problem.of(
            f"^cluster.runtime=ray {problem}, or run everything in one process with cluster.runtime=inline",
            is_local=True,
        )
    own = config.rollout.own_episode
    episode = own if own and is_agent(own) else None
    for key, value in (("rollout.serve", config.rollout.serve), ("rollout.episode", episode)):
        for name in ("starlette", "uvicorn") if value is not None else ():
            if (problem := find_unusable(name, "serve")) is not None:
                yield Problem.of(f"^{key}={value} {problem}", is_local=True)
    if config.rollout.engine in BUILDS:
        try:
            find_engine(config.rollout.engine)
        except EngineError as error:
            yield Problem.of(f"^rollout.engine={config.rollout.engine!r}: {error}", is_local=True)
    yield from _functions(config)
    wrong = [
        f"{name} {problem}"
        for name in (config.tracking.to if config.tracking else ())
        if (problem := find_tracker_problem(name))
    ]
    yield from (Problem(("tracking.to",), f"tracking: {problem}", is_local=True) for problem in wrong)
    if is_url(config.trainer.runs_dir) and (problem := check_url(config.trainer.runs_dir)) is not None:
        yield Problem.of(f"^trainer.runs_dir: {problem}", is_local=True)
    yield from _runs_dir(config.trainer.local_dir)
    name = config.trainer.name
    if name is not None and (Path(name).name != name or name.startswith(".") or not name.isprintable() or not name):
        yield Problem.of(f"^trainer.name={name!r}: expected a plain folder name without `/`")


def _functions(config: RunConfig) -> Iterator[Problem]:
    for one in config.reward.all_functions:
        if (problem := check_reward_spec(one.function, one.parameters)) is not None:
            key = "reward.function" if one.function == config.reward.function else "reward.functions"
            lacks = one.function in NEEDS and find_unusable(*NEEDS[one.function]) is not None
            yield Problem.of(f"^{key}={one.function!r}: {problem}", is_local=lacks or not _is_here(one.function))
    episode = config.rollout.own_episode
    check = check_agent_spec if episode is not None and is_agent(episode) else check_episode_spec
    if episode is not None and (problem := check(episode)) is not None:
        yield Problem.of(f"^rollout.episode={episode!r}: {problem}", is_local=not _is_here(episode))
    for at, one in enumerate(config.rollout.tools):
        where = f"rollout.episode.tools[{at}]"
        if (problem := check_tool(one.function, one.parameters)) is not None:
            yield Problem(("rollout.episode",), f"{where}: {problem}", is_local=not _is_here(one.function))
        elif one.function == "search" and (problem := check_passages(str(one.parameters["corpus"]))) is not None:
            yield Problem(("rollout.episode",), f"{where}: {problem}")
        elif one.function == "mcp" and (problem := find_missing(*PACKAGE)) is not None:
            yield Problem(("rollout.episode",), f"{where}: mcp {problem}", is_local=True)
    for section, own in config.own_functions.items():
        for misfit in find_misfits(own.function, "tokens" if section == "loss" else "rewards", own.parameters):
            keys = (f"{section}.function", f"{section}.parameters")
            text = f"{section}.function={own.function!r}: {misfit}"
            yield Problem(keys, text, is_local=not _is_here(own.function))


def _is_here(function: str) -> bool:
    """Whether there is a file of a function's name `file.py:function`; also of a name without one."""
    file = function.rpartition(":")[0]
    return not file or Path(file).expanduser().exists()


def _runs_dir(runs: Path) -> Iterator[Problem]:
    """Try to make a folder in the nearest existing one, and remove it."""
    there = next(path for path in (runs.absolute(), *runs.absolute().parents) if os.path.lexists(path))
    named = f"trainer.runs_dir={str(runs)!r}"
    if not there.is_dir():
        what = "is a file" if there == runs.absolute() else f"lies below {there}, which is a file"
        yield Problem(("trainer.runs_dir",), f"{named} {what}; expected a folder", is_local=True)
        return
    try:
        Path(tempfile.mkdtemp(prefix=".rally-", dir=there)).rmdir()
    except OSError as error:
        yield Problem(
            ("trainer.runs_dir",),
            f"{named}: nothing can be written to {there} ({error.strerror}); name a folder of yours on another disk",
            is_local=True,
        )


def _generated(config: RunConfig) -> Iterator[Problem]:
    """Compare the digit tasks with their number and with the limits; the digits tokenizer has a token a character."""
    made = config.data.generate
    if made is None or config.trains_on_files:
        return
    task = make_task(made.task, num_digits=made.num_digits)
    last = task.prompt(task.num_prompts - 1)
    if made.num_validation_prompts >= task.num_prompts:
        yield Problem(
            ("data.generate.num_validation_prompts", "data.generate.task", "data.generate.num_digits"),
            f"data.generate.num_validation_prompts={made.num_validation_prompts}: {made.task} with num_digits="
            f"{made.num_digits} has {task.num_prompts} distinct prompts, and some must be left for training; "
            f"expected at most {task.num_prompts - 1}",
        )
    num_prompt_tokens, num_answer_tokens = len(last) + 2, len(task.answer(last))
    if config.model.create is not None and config.data.max_prompt_tokens < num_prompt_tokens:
        yield Problem(
            ("data.max_prompt_tokens", "data.generate.task", "data.generate.num_digits"),
            f"data.max_prompt_tokens={config.data.max_prompt_tokens} cannot hold the prompts of data.generate; "
            f"expected at least {num_prompt_tokens} ({last!r} and the marks of its two roles)",
        )
    if config.rollout.max_response_tokens < num_answer_tokens:
        yield Problem(
            ("rollout.max_response_tokens", "data.generate.task", "data.generate.num_digits"),
            f"rollout.max_response_tokens={config.rollout.max_response_tokens} cannot hold the answers of "
            f"data.generate; expected at least {num_answer_tokens} ({task.answer(last)!r})",
        )


def _cache(config: RunConfig) -> Iterator[Problem]:
    """Compare the KV cache of a process with the memory of this machine, if that is where it will be."""
    if "rollout" not in config.roles:
        return
    num_tokens, shape = config.rollout.cache_tokens, shape_of(config)
    is_here = config.cluster.address is None and config.cluster.device == "cpu"
    if num_tokens is None or shape is None or not is_here:
        return
    each, there = cache_bytes_per_token(config, shape), memory_bytes()
    if num_tokens * each > there:
        yield Problem.of(
            f"^rollout.cache_tokens={num_tokens}: the keys and values of {num_tokens:,} tokens take "
            f"{num_tokens * each / 2**20:,.0f} MiB, but this machine has {there / 2**20:,.0f} MiB; expected at most "
            f"{there // each}, and much fewer than all rows have will do: those that find no memory wait",
            is_local=True,
        )


def _schedule(config: RunConfig) -> Iterator[Problem]:
    """Read the schedule that is to be repeated, and compare the config with that of its run."""
    if config.rollout.schedule is None or not config.rollout.max_staleness:
        return
    path = Path(config.rollout.schedule).expanduser()
    try:
        RecordedSchedule.read(path).check(config.rollout.schedule, config)
    except ScheduleError as error:
        yield Problem(("rollout.schedule",), str(error), is_local=not path.exists())


def _data(name: str, config: RunConfig) -> Iterator[Problem]:
    """Look at what is on this machine; other file systems and the hub are asked when prompts are read."""
    for dataset in data_sets(config, name):
        problem = check_dataset_path(dataset.path)
        if problem is None and is_local(dataset.path):
            try:
                problem = check_dataset_rows(files_of(dataset)[0])
            except DataError as error:
                problem = str(error)
        if problem is not None:
            lacks = is_local(dataset.path) and not Path(dataset.path).expanduser().exists()
            yield Problem.of(f"^{name}: {problem}", is_local=lacks)


def find_wanted(recipe: str, overrides: Sequence[str], *, say: Callable[[str], None]) -> tuple[LoadedConfig, RunFolder]:
    """Return the checked config to resume with, and the folder of the run.

    Args:
        recipe: the folder of a run, or a recipe, for its newest run.
        overrides: of the command line.
        say: called with a line about overrides that were kept from the start of the run.

    Raises:
        RunFolderError: there is no run of that recipe.
        ConfigError: the config is wrong, or names code that this user has not named.
    """
    if _is_run(recipe):
        return load_named(recipe, overrides), open_run(Path(recipe))
    folder = open_run(newest_of(recipe, overrides))
    taken = [one for one in folder.state().launched.overrides if not _sets(overrides, one.partition("=")[0])]
    if taken:
        say(f"{folder.path.name}: as on the command line of its start: {' '.join(taken)}")

    def as_before(_: RunConfig, left_open: tuple[str, ...]) -> dict[str, object]:
        values = dict(values_of(load_config(str(folder.path)).config))
        return {key: values[key] for key in left_open if key in values}  # without those of roles that it lacks

    loaded = load_checked(recipe, [*taken, *overrides], choose=as_before)
    named = {key for key, origin in loaded.origins.items() if origin != COMMAND_LINE or _sets(overrides, key)}
    _refuse_foreign(loaded, folder, named)
    return loaded, folder


def load_named(
    recipe: str, overrides: Sequence[str], *, choose: Choose = choices, elsewhere: bool = False
) -> LoadedConfig:
    """Return a checked config; that of a run folder only if its user has named the code that it names.

    Raises:
        ConfigError: the config is wrong, or the folder of somebody else's run names code.
    """
    loaded = load_checked(recipe, overrides, choose=choose, elsewhere=elsewhere)
    if _is_run(recipe):
        named = {key for key, origin in loaded.origins.items() if origin == COMMAND_LINE}
        _refuse_foreign(loaded, RunFolder(Path(recipe).absolute()), named)
    return loaded


def _is_run(recipe: str) -> bool:
    return (Path(recipe) / "config.yaml").is_file()


def _refuse_foreign(loaded: LoadedConfig, folder: RunFolder, named: Set[str]) -> None:
    """Refuse code that only a run folder names, unless this user started that run."""
    code = unsigned(anchored(loaded.config), folder.state().launched.signed)
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


def is_yet_to_start(recipe: str, overrides: Sequence[str]) -> bool:
    """Return whether a recipe is a file, or has a name for its run, and there is no run of it."""
    if _is_run(recipe) or not (Path(recipe).is_file() or _sets(overrides, "trainer.name")):
        return False
    try:
        newest_of(recipe, overrides)
    except RunFolderError:
        return True
    return False


def newest_of(recipe: str, overrides: Sequence[str]) -> Path:
    """Return the folder of the run of that name, or of the run of a recipe that was started last.

    Raises:
        RunFolderError: there is none.
    """
    if recipe not in shipped_recipes() and (named := named_run(recipe, Path(TrainerConfig().runs_dir))) is not None:
        return named
    try:
        source = read(recipe, overrides)
    except ConfigError:
        if not _BARE_NAME.fullmatch(recipe):
            raise
        runs_dir = Path(TrainerConfig().runs_dir)
        with contextlib.suppress(RunFolderError):
            return newest_run(recipe, runs_dir)
        raise RunFolderError(
            f"{recipe}: no recipe, and no run of that name in {runs_dir.absolute()}; `rally runs` lists runs"
        ) from None
    trainer: Mapping[str, Any] = source.values.get("trainer") or {}
    runs_dir = TrainerConfig(runs_dir=str(trainer.get("runs_dir") or TrainerConfig().runs_dir)).local_dir
    return newest_run(str(trainer.get("name") or source.name), runs_dir)


def bring_wanted(recipe: str, overrides: Sequence[str], from_step: int | None) -> str:
    """Fetch the run to go on with if its folder is at a URL; return what it is called on this machine.

    Raises:
        RunFolderError: it cannot be fetched.
    """
    if is_url(recipe):
        return str(bring(recipe, TrainerConfig().local_dir, from_step))
    if _is_run(recipe):
        return recipe
    with contextlib.suppress(ConfigError):  # said by whoever reads it next
        source = read(recipe, overrides)
        trainer: Mapping[str, Any] = source.values.get("trainer") or {}
        url = str(trainer.get("runs_dir") or "").rstrip("/")
        if is_url(url) and (names := runs_of_name(str(trainer.get("name") or source.name), names_of_runs(url))):
            bring(f"{url}/{names[-1]}", TrainerConfig().local_dir, from_step)
    return recipe


def _sets(overrides: Sequence[str], key: str) -> bool:
    """Whether one of the overrides sets a key or a section around it."""
    return any(f"{key}.".startswith(f"{one.partition('=')[0]}.") for one in overrides)
