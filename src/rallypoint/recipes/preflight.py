"""A config and the files that it names, checked together before anything is started; and the config of a resumed run.

Nothing here imports torch or ray, and none of the user's code is run. `rally train FOLDER --resume` takes the folder's
config. `rally train mine.yaml --resume` takes the newest run of that recipe, the file as it is now, and what was set on
the command line at the start. Both lay the command line of this start over it. `run/resume.py` decides whether the run
may go on with it.
"""

from __future__ import annotations

import functools
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from rallypoint import checkpoint as checkpoints
from rallypoint.cluster.capacity import memory_bytes
from rallypoint.config import (
    COMMAND_LINE,
    LoadedConfig,
    Problem,
    RunConfig,
    TrainerConfig,
    load_config,
    read,
    row_limit,
    shown,
    values_of,
)
from rallypoint.config.automatic import Choose
from rallypoint.config.shape import SIZES, shape_of
from rallypoint.data.digits import make_task
from rallypoint.data.files import check_dataset_rows
from rallypoint.data.locate import check_dataset_path, files_of, is_local
from rallypoint.environments.episodes import check_episode_spec
from rallypoint.environments.reward import check_reward_spec
from rallypoint.errors import ConfigError, DataError, EngineError, ScheduleError
from rallypoint.extras import find_missing, find_unusable
from rallypoint.install import BUILDS, find_engine
from rallypoint.observability.trackers import find_tracker_problem
from rallypoint.plan.role_memory import cache_bytes_per_token
from rallypoint.recipes.machine import choices
from rallypoint.run.data_sets import data_sets
from rallypoint.run.folder import RunFolder, Start, anchored, newest_run, open_run
from rallypoint.run.recorded_schedule import RecordedSchedule
from rallypoint.run.trust import unsigned
from rallypoint.user_code import find_misfits


def load_checked(
    name: str,
    overrides: Sequence[str] = (),
    *,
    choose: Choose | None = None,
    draft: bool = False,
    with_weights: bool = True,
) -> LoadedConfig:
    """Load a config whose files are there.

    Args:
        name: a shipped recipe, a YAML file, or the folder of a run.
        overrides: dotted keys and YAML values, such as `actor.optimizer.lr=3e-4`.
        choose: chooses values of automatic keys that nobody set; see `load_config`.
        draft: whether keys that are required may still be missing.
        with_weights: whether folders of models must have weights, which a plan for another machine does not need.

    Raises:
        ConfigError: everything that is wrong, at once.
    """
    look = file_problems if with_weights else functools.partial(file_problems, with_weights=False)
    return load_config(name, overrides, look=look, choose=choose, draft=draft)


def file_problems(config: RunConfig, *, with_weights: bool = True) -> Iterator[Problem]:
    """Yield every named file that is missing, empty or not what it should be."""
    for name, path in config.named_models.items():
        yield from _model(name, path, with_weights)
        yield from _positions(name, path, config)
    if config.model.lora is not None and config.model.lora.path is not None:
        yield from _adapter("model.lora.path", config.model.lora.path)
    for name in ("data.train", "data.validation"):
        yield from _data(name, config)
    yield from _generated(config)
    yield from _cache(config)
    yield from _schedule(config)
    if config.cluster.runtime == "ray" and (problem := find_missing("ray", "ray")) is not None:
        yield Problem(
            ("cluster.runtime",),
            f"cluster.runtime=ray {problem}, or run everything in one process with cluster.runtime=inline",
        )
    if config.rollout.serve is not None:
        for name in ("starlette", "uvicorn"):
            if (problem := find_unusable(name, "serve")) is not None:
                yield Problem(("rollout.serve",), f"rollout.serve={config.rollout.serve} {problem}")
    if config.rollout.engine in BUILDS:
        try:
            find_engine(config.rollout.engine)
        except EngineError as error:
            yield Problem(("rollout.engine",), f"rollout.engine={config.rollout.engine!r}: {error}")
    yield from _functions(config)
    wrong = [
        f"{name} {problem}"
        for name in (config.tracking.to if config.tracking else ())
        if (problem := find_tracker_problem(name))
    ]
    yield from (Problem(("tracking.to",), f"tracking: {problem}") for problem in wrong)
    yield from _runs_dir(Path(config.trainer.runs_dir).expanduser())
    name = config.trainer.name
    if name is not None and (Path(name).name != name or name.startswith(".") or not name.isprintable() or not name):
        yield Problem(("trainer.name",), f"trainer.name={name!r}: expected a plain folder name without `/`")


def _functions(config: RunConfig) -> Iterator[Problem]:
    for one in config.reward.all_functions:
        if (problem := check_reward_spec(one.function, one.parameters)) is not None:
            key = "reward.function" if one.function == config.reward.function else "reward.functions"
            yield Problem((key,), f"{key}={one.function!r}: {problem}")
    episode = config.rollout.episode
    if episode is not None and (problem := check_episode_spec(episode)) is not None:
        yield Problem(("rollout.episode",), f"rollout.episode={episode!r}: {problem}")
    for section, own in config.own_functions.items():
        for misfit in find_misfits(own.function, "tokens" if section == "loss" else "rewards", own.parameters):
            keys = (f"{section}.function", f"{section}.parameters")
            yield Problem(keys, f"{section}.function={own.function!r}: {misfit}")


def _runs_dir(runs: Path) -> Iterator[Problem]:
    """Try to make a folder in the nearest existing one, and remove it."""
    there = next(path for path in (runs.absolute(), *runs.absolute().parents) if os.path.lexists(path))
    named = f"trainer.runs_dir={str(runs)!r}"
    if not there.is_dir():
        what = "is a file" if there == runs.absolute() else f"lies below {there}, which is a file"
        yield Problem(("trainer.runs_dir",), f"{named} {what}; expected a folder")
        return
    try:
        Path(tempfile.mkdtemp(prefix=".rally-", dir=there)).rmdir()
    except OSError as error:
        yield Problem(
            ("trainer.runs_dir",),
            f"{named}: nothing can be written to {there} ({error.strerror}); name a folder of yours on another disk",
        )


def is_hub_name(path: str) -> bool:
    """Whether a model's path can only name a repository on the Hugging Face hub.

    >>> is_hub_name("Qwen/Qwen3-0.6B"), is_hub_name("./model"), is_hub_name("a/b/c")
    (True, False, False)
    """
    return path.count("/") == 1 and not path.startswith((".", "/", "~")) and not Path(path).parent.exists()


def _model(name: str, path: str, with_weights: bool) -> Iterator[Problem]:
    folder = Path(path).expanduser()
    if is_hub_name(path):
        return
    if not folder.is_dir():
        what = " is a file, expected a folder" if folder.exists() else f": no such folder (looked in {Path.cwd()})"
        yield Problem((name,), f"{name}={path!r}{what}; a Hugging Face folder has config.json and *.safetensors")
        return
    config = folder / "config.json"
    if (folder / "adapter_config.json").is_file() and not config.is_file():
        yield Problem(
            (name,),
            f"{name}={path!r} is an adapter, not a model: train it further with model.lora.path, on the model that it "
            "was made for, or merge it into that model with `rally export`",
        )
        return
    if not config.is_file():
        yield Problem((name,), f"{name}={path!r}: {_no_model(path)}")
        return
    try:
        content = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        yield Problem((name,), f"{name}={path!r}: config.json is not valid JSON ({error})")
        return
    if not isinstance(content, dict) or "model_type" not in content:
        yield Problem((name,), f"{name}={path!r}: config.json has no model_type, so transformers cannot load it")
        return
    if wrong := [f"{size}={content[size]!r}" for size in SIZES if size in content and not _is_size(content[size])]:
        yield Problem(
            (name,), f"{name}={path!r}: config.json has {', '.join(wrong)}; expected whole numbers of at least 1"
        )
    if with_weights and not any(folder.glob("*.safetensors")):
        yield Problem((name,), f"{name}={path!r}: no *.safetensors in it (pickled .bin weights are not loaded)")


def _no_model(path: str) -> str:
    """Say what a folder without config.json is: a run, whose newest checkpoint is meant, or nothing that is known."""
    folder = Path(path).expanduser()
    if not (folder / "config.yaml").is_file():
        return "not a Hugging Face folder, config.json is missing in it"
    found = checkpoints.visible(folder / "checkpoints")
    if not found:
        return "the folder of a run, which has no checkpoint yet; expected a Hugging Face folder"
    newest = Path("checkpoints") / checkpoints.checkpoint_name(found[-1])
    if (folder / newest / "adapter_config.json").is_file():
        return (
            f"the folder of a run that trained adapters; merge them first, `rally export {path} merged`, or train them "
            f"further with model.lora.path={path.rstrip('/')}/{newest} on the model that they were made for"
        )
    return f"the folder of a run; its newest model is {path.rstrip('/')}/{newest}"


def _is_size(value: object) -> bool:
    return isinstance(value, int) and value >= 1


def _adapter(name: str, path: str) -> Iterator[Problem]:
    folder = Path(path).expanduser()
    missing = [file for file in ("adapter_config.json", "adapter_model.safetensors") if not (folder / file).is_file()]
    if not folder.is_dir():
        yield Problem(
            (name,), f"{name}={path!r}: no such folder (looked in {Path.cwd()}); expected one that PEFT saved"
        )
    elif missing:
        yield Problem((name,), f"{name}={path!r}: not an adapter in PEFT's format, it lacks {' and '.join(missing)}")


def _positions(name: str, path: str, config: RunConfig) -> Iterator[Problem]:
    """Compare the rows with the length that a local model supports; what comes from the hub is looked at later."""
    file = Path(path).expanduser() / "config.json"
    try:
        if not file.is_file():
            return
        longest = json.loads(file.read_text(encoding="utf-8")).get("max_position_embeddings")
    except (OSError, ValueError, AttributeError, RecursionError):
        return
    # Prompts that may be dropped or cut are measured against what the model supports, one by one.
    least = 2 if config.trains_on_files else config.rollout.max_response_tokens + 1
    needed = config.max_row_tokens if config.data.on_too_long == "error" else least
    if isinstance(longest, int) and longest < needed:
        keys, made_of = row_limit(config)
        yield Problem(
            (*keys, name),
            f"{made_of} make{'s' * (len(keys) == 1)} rows of up to {config.max_row_tokens} tokens; expected at most "
            f"{longest}, which is what {name}={path!r} supports, or data.on_too_long=drop or truncate",
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
        yield Problem(
            ("rollout.cache_tokens",),
            f"rollout.cache_tokens={num_tokens}: the keys and values of {num_tokens:,} tokens take "
            f"{num_tokens * each / 2**20:,.0f} MiB, but this machine has {there / 2**20:,.0f} MiB; expected at most "
            f"{there // each}, and much fewer than all rows have will do: those that find no memory wait",
        )


def _schedule(config: RunConfig) -> Iterator[Problem]:
    """Read the schedule that is to be repeated, and compare the config with that of its run."""
    if config.rollout.schedule is None or not config.rollout.max_staleness:
        return
    try:
        recorded = RecordedSchedule.read(Path(config.rollout.schedule).expanduser())
        recorded.check(config.rollout.schedule, config)
    except ScheduleError as error:
        yield Problem(("rollout.schedule",), str(error))


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
            yield Problem((name,), f"{name}: {problem}")


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


def load_named(
    recipe: str, overrides: Sequence[str], *, choose: Choose = choices, with_weights: bool = True
) -> LoadedConfig:
    """Return a checked config; that of a run folder only if its user has named the code that it names.

    Raises:
        ConfigError: the config is wrong, or the folder of somebody else's run names code.
    """
    loaded = load_checked(recipe, overrides, choose=choose, with_weights=with_weights)
    if _is_run(recipe):
        named = {key for key, origin in loaded.origins.items() if origin == COMMAND_LINE}
        _refuse_foreign(loaded, RunFolder(Path(recipe).absolute()), named)
    return loaded


def _is_run(recipe: str) -> bool:
    return (Path(recipe) / "config.yaml").is_file()


def _refuse_foreign(loaded: LoadedConfig, folder: RunFolder, named: Set[str]) -> None:
    """Refuse code that only a run folder names, unless this user started that run."""
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


def newest_of(recipe: str, overrides: Sequence[str]) -> Path:
    """Return the folder of the run of a recipe that was started last.

    Raises:
        RunFolderError: there is none.
    """
    source = read(recipe, overrides)
    trainer: Mapping[str, Any] = source.values.get("trainer") or {}
    name, runs_dir = trainer.get("name") or source.name, trainer.get("runs_dir") or TrainerConfig().runs_dir
    return newest_run(str(name), Path(str(runs_dir)).expanduser())


def _sets(overrides: Sequence[str], key: str) -> bool:
    """Whether one of the overrides sets a key or a section around it."""
    return any(f"{key}.".startswith(f"{one.partition('=')[0]}.") for one in overrides)
