"""The folder that a run leaves behind.

runs/NAME/
    config.yaml      every key with its value
    journal.jsonl    how it was launched, and what happened, event by event
    metrics.jsonl    one line a step
    rollouts/        step_000020.parquet: the rollouts of a step; validation_000020.parquet: those of a validation
    checkpoints/     step_000020/: a Hugging Face folder and the state to resume from
    snapshots/       the state after the newest step, while the run goes on
    logs/            train.log, and Ray's own logs below ray/
    published/       weights on their way to the rollout role, while the run goes on
    model/ data/     what the run made for itself, if it did
    report.html      the page of the run in one file, when it has ended
    curve.png        reward and validation score
    summary.txt      the whole summary, if its terminal had no room for it
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import platform
import re
import shlex
import shutil
import struct
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rallypoint.checkpoint import sync, sync_below
from rallypoint.config import COMMAND_LINE, LoadedConfig, RunConfig, values_of
from rallypoint.config.source import to_yaml
from rallypoint.data.locate import is_local
from rallypoint.disk import naming
from rallypoint.environments.reward import SHIPPED
from rallypoint.errors import DiskError, RunFolderError
from rallypoint.journal import (
    Entry,
    Journal,
    Launched,
    RunBegan,
    RunEnded,
    RunState,
    Said,
    fold,
    read_journal,
)
from rallypoint.run.trust import sign

_START_S = 3600.0
"""Seconds; no start takes longer to make a folder."""
_FLOCK = "hhlli0l"
"""C's `struct flock` of Linux: type, whence, start, length, process."""
_HELD = set[Path]()
"""Files whose locks this process has."""


class _Inside:
    """What has a name in the folder of a run: its path."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, run: RunFolder, kind: object) -> Path:
        return run.path / self._name


@dataclasses.dataclass(frozen=True, slots=True)
class RunFolder:
    """The folder of a run, and the paths in it."""

    path: Path
    """Absolute once it was made or opened: processes of a cluster have other working directories."""

    config = _Inside("config.yaml")
    """The resolved config."""
    journal = _Inside("journal.jsonl")
    """What happened, event by event; see `rallypoint.journal`."""
    metrics = _Inside("metrics.jsonl")
    """One JSON line a step."""
    checkpoints = _Inside("checkpoints")
    """Folder of checkpoints."""
    snapshots = _Inside("snapshots")
    """Folder of the newest snapshot; see `recipes/saving.py`."""
    logs = _Inside("logs")
    """Folder of logs."""
    model = _Inside("model")
    """The model that the run made for itself."""
    data = _Inside("data")
    """The data set that the run made for itself."""
    published = _Inside("published")
    """Weights for the rollout role, while the run goes on; see rollout.weights=folder."""
    curve = _Inside("curve.png")
    """The picture of the learning curve."""
    report = _Inside("report.html")
    """The page of the run in one file, when it has ended."""
    endpoint_key = _Inside("endpoint.key")
    """The key for callers of the run's endpoint; the file exists while the endpoint is open."""

    def state(self) -> RunState:
        """Return what the journal says of the run.

        Raises:
            RunFolderError: it is damaged.
        """
        return fold(read_journal(self.journal))

    def log(self, message: str) -> None:
        """Append a line with the time to logs/train.log.

        Raises:
            DiskError: the disk is full or not writable.
        """
        path = self.logs / "train.log"
        with naming(path), path.open("a", encoding="utf-8") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {message}\n")

    def try_log(self, message: str) -> None:
        """Do as `log`, but for a disk that takes nothing: the run will meet that itself."""
        with contextlib.suppress(DiskError):
            self.log(message)

    def take(self, entry: Entry) -> None:
        """Write what a person reads of an event into logs/train.log."""
        match entry.event:
            case RunBegan(first=first):
                self.log(f"begun after step {first}")
            case RunEnded(how=how, why=why):
                self.log(f"{how}: {why}" if why else how)
            case Said(text=text, level=level) if level != "wait":
                self.log(text)
            case _:
                pass

    def is_in_use(self) -> bool:
        """Whether a process is training in it; False also where that cannot be seen.

        The lock is asked for and never taken, so that a resume at that moment finds it free.
        """
        lock = self.path / ".lock"
        if lock.resolve() in _HELD:  # to open and close the file would end this process's lock
            return True
        try:
            with lock.open("rb") as file:
                found = fcntl.fcntl(file, fcntl.F_GETLK, struct.pack(_FLOCK, fcntl.F_WRLCK, 0, 0, 0, 0))
        except OSError:
            return False
        return struct.unpack(_FLOCK, found)[0] != fcntl.F_UNLCK

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes out of the folder; the lock ends with the process, however that ends.

        It is a POSIX lock, which belongs to the process: a child that outlives its parent does not hold it, as it would
        hold one of flock.

        Raises:
            RunFolderError: another process is training in it.
        """
        with (self.path / ".lock").open("a+") as file:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                file.seek(0)
                raise RunFolderError(
                    f"{self.path} is in use by process {file.read().strip() or '?'}; wait for it, end it, or give this "
                    "run a name of its own with trainer.name=... If that process is gone, and a file server keeps its "
                    f"lock, remove {file.name} and try again"
                ) from None
            file.truncate(0)
            file.write(f"{os.getpid()} on {platform.node()}")
            file.flush()
            held = Path(file.name).resolve()
            _HELD.add(held)
            try:
                yield
            finally:
                _HELD.discard(held)


def launched(loaded: LoadedConfig, before: Sequence[str] = ()) -> Launched:
    """Return the record of a command, with overrides of earlier ones unless they were given again."""
    config = anchored(loaded.config)
    values, raw = dict(values_of(config)), dict(values_of(loaded.config))
    paths = [f"{key}={json.dumps(value)}" for key, value in values.items() if value != raw[key]]
    given = [*loaded.overrides, *(one for one in paths if loaded.origins.get(_key(one)) == COMMAND_LINE)]
    last: dict[str, str] = {}
    for one in (*before, *given):
        last.pop(_key(one), None)
        last[_key(one)] = one
    return Launched(overrides=tuple(last.values()), signed=sign(config))


def create_run(loaded: LoadedConfig) -> RunFolder:
    """Make the folder of a new run; it appears with its config in it, or not at all.

    Raises:
        RunFolderError: it is there already, or cannot be made.
    """
    trainer = loaded.config.trainer
    runs_dir = trainer.local_dir.absolute()
    name = trainer.name or f"{loaded.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    names = [name, *(f"{name}-{number}" for number in range(2, 1000) if trainer.name is None)]
    partial = RunFolder(runs_dir / f".{name}.{os.getpid()}.partial")
    try:
        _clear_up(runs_dir)
        partial.logs.mkdir(parents=True)
        write_config(partial, loaded.config)
        with Journal(partial.journal) as journal:
            journal.append(launched(loaded))
        sync_below(partial.path)
        path = next((path for each in names if _appears(partial.path, path := runs_dir / each)), None)
        sync(runs_dir)
    except OSError as error:
        raise RunFolderError(f"{runs_dir / name} cannot be made: {error}") from error
    finally:
        shutil.rmtree(partial.path, ignore_errors=True)
    if path is None:
        path = runs_dir / name
        raise RunFolderError(
            f"{path} is there already; resume it with `rally train {path} --resume`, or choose another trainer.name"
        )
    return RunFolder(path)


def has_begun(folder: RunFolder) -> bool:
    """Whether a run has written its first line of metrics, which is before the first step."""
    return (folder.metrics.is_file() and folder.metrics.stat().st_size > 0) or folder.checkpoints.exists()


def remove_run(folder: RunFolder) -> None:
    """Remove the folder of a run that never began."""
    shutil.rmtree(folder.path, ignore_errors=True)


def open_run(path: Path) -> RunFolder:
    """Return the folder of a run that exists, with all that a run needs in it."""
    folder = RunFolder(path.absolute())
    folder.logs.mkdir(exist_ok=True)
    return folder


def write_config(folder: RunFolder, config: RunConfig) -> None:
    """Write every key with its value, whole or not at all; paths so that they hold from any working directory.

    Raises:
        DiskError: the disk is full or not writable.
    """
    values = anchored(config).model_dump(mode="json")
    _write_whole(folder.config, f"# The resolved config of this run.\n{to_yaml(values)}")


def anchored(config: RunConfig) -> RunConfig:
    """Return a config whose paths hold from any working directory, those of workers on other nodes included."""
    values = config.model_dump(mode="json")
    for section, name in (("model", "path"), ("critic", "path"), ("reward", "path"), ("trainer", "runs_dir")):
        values[section][name] = _absolute(values[section][name])
    if config.model.lora is not None:
        values["model"]["lora"]["path"] = _absolute(config.model.lora.path)
    if config.model.tokenizer is not None:
        values["model"]["tokenizer"]["chat_template"] = _absolute(config.model.tokenizer.chat_template)
    if config.teacher is not None:
        teacher = values["teacher"]
        teacher["path"] = _absolute(teacher["path"])
        teacher["by_source"] = {name: _absolute(path) for name, path in teacher["by_source"].items()}
    for one in values["reward"]["models"]:
        one["path"] = _absolute(one["path"])
    values["rollout"]["schedule"] = _absolute(config.rollout.schedule)
    for name in ("train", "validation"):
        values["data"][name] = [_anchored_set(one) for one in values["data"][name]]
    own = [(values[name], "function") for name in config.own_functions]
    rewards = [(one, "function") for one in (values["reward"], *values["reward"]["functions"])]
    tools = values["rollout"]["episode"]["tools"] if config.rollout.tools else ()
    for one in tools:
        if "corpus" in one["parameters"]:
            one["parameters"]["corpus"] = _absolute(one["parameters"]["corpus"])
        if "command" in one["parameters"]:
            one["parameters"]["command"] = _anchored_command(one["parameters"]["command"])
    episode = [(values["rollout"], "episode")] if config.rollout.own_episode else [(one, "function") for one in tools]
    for one, name in (*own, *rewards, *episode):
        file, colon, function = (one[name] or "").rpartition(":")
        if colon and one[name] not in SHIPPED:
            one[name] = f"{_absolute(file)}:{function}"
    return RunConfig.model_validate(values)


def _anchored_set(dataset: str | dict[str, Any]) -> str | dict[str, Any]:
    """Return a data set of a config whose path, if it is one of this machine, is absolute."""
    if isinstance(dataset, dict):
        return {**dataset, "path": _anchored_set(dataset["path"])}
    return str(_absolute(dataset)) if is_local(dataset) else dataset


def _anchored_command(command: str | list[str]) -> str | list[str]:
    """Return a command whose words that are files are absolute; its program is looked for in PATH unless it has a /."""
    words = shlex.split(command) if isinstance(command, str) else command
    anchored = [
        str(Path(word).absolute()) if Path(word).is_file() and (at or "/" in word) else word
        for at, word in enumerate(words)
    ]
    return command if anchored == words else shlex.join(anchored) if isinstance(command, str) else anchored


def named_run(name: str, runs_dir: Path) -> Path | None:
    """Return the folder that a name of a run stands for, as `rally runs` lists it: a folder itself, or one of those.

    None if there is none of that name.
    """
    for path in (Path(name).expanduser(), runs_dir / name):
        if (path / "config.yaml").is_file():
            return path
    return None


def newest_run(name: str, runs_dir: Path) -> Path:
    """Return the run of that name, or the one of a recipe of that name that was started last.

    Raises:
        RunFolderError: there is none.
    """
    runs = runs_of_name(name, [path.parent.name for path in runs_dir.glob("*/config.yaml")])
    if not runs:
        raise RunFolderError(f"no run of {name!r} in {runs_dir.absolute()}; start one with `rally train {name}`")
    return runs_dir / max(runs, key=lambda run: ((runs_dir / run / "config.yaml").stat().st_mtime, run))


def runs_of_name(name: str, runs: Sequence[str]) -> list[str]:
    """Return which of these folders are runs of that name, or of a recipe of that name, in order."""
    own = re.compile(rf"{re.escape(name)}(-\d{{8}}-\d{{6}}(-\d+)?)?")
    return sorted(run for run in runs if own.fullmatch(run))


def _absolute(path: str | None) -> str | None:
    """Return a path that does not depend on the working directory; hub names are returned as they are."""
    local = Path(path).expanduser() if path is not None else None
    return str(local.absolute()) if local is not None and local.exists() else path


def _clear_up(runs_dir: Path) -> None:
    """Remove what killed starts left; one of the last hour may still be running, maybe on another machine."""
    for leftover in runs_dir.glob(".*.partial"):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - leftover.stat().st_mtime > _START_S:
                shutil.rmtree(leftover, ignore_errors=True)


def _appears(partial: Path, final: Path) -> bool:
    """Give a folder its final name; False if a folder of that name exists and is not empty."""
    try:
        partial.rename(final)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            return False
        raise
    return True


def _write_whole(path: Path, text: str) -> None:
    """Replace a file atomically, also in case of a power cut."""
    partial = path.with_suffix(".partial")
    with naming(path):
        partial.write_text(text, encoding="utf-8")
        sync(partial)
        partial.replace(path)
        sync(path.parent)


def _key(override: str) -> str:
    return override.partition("=")[0]
