"""The folder that a run leaves behind.

runs/NAME/
    config.yaml      every key with its value
    metrics.jsonl    one line a step
    rollouts/        step_000020.jsonl: a few rollouts of each step, in words
    checkpoints/     step_000020/: a Hugging Face folder and the state to resume from
    logs/            train.log, and Ray's own logs below ray/
    published/       weights on their way to the rollout role, while the run goes on
    model/ data/     what the run made for itself, if it did
    curve.png        reward and validation score
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rallypoint.config import LoadedConfig, RunConfig, to_yaml
from rallypoint.errors import RunFolderError
from rallypoint.observability.disk import naming


@dataclasses.dataclass(frozen=True, slots=True)
class RunFolder:
    """Where everything of a run lies."""

    path: Path
    """Absolute where it was made or opened: processes of a cluster have working directories of their own."""

    @property
    def config(self) -> Path:
        """The resolved config."""
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        """One JSON line a step."""
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        """Folder of checkpoints."""
        return self.path / "checkpoints"

    @property
    def logs(self) -> Path:
        """Folder of logs."""
        return self.path / "logs"

    @property
    def model(self) -> Path:
        """The model that the run made for itself."""
        return self.path / "model"

    @property
    def data(self) -> Path:
        """The data set that the run made for itself."""
        return self.path / "data"

    @property
    def published(self) -> Path:
        """Weights on their way to the rollout role, while the run goes on; see rollout.weights=folder."""
        return self.path / "published"

    @property
    def curve(self) -> Path:
        """The picture of the learning curve."""
        return self.path / "curve.png"

    @property
    def endpoint_key(self) -> Path:
        """What callers of a run that answers must have; there while it does."""
        return self.path / "endpoint.key"

    def write_rollouts(self, step: int, records: Sequence[Any]) -> None:
        """Write a few rollouts of a step, each a dataclass, replacing what an interrupted run left of it.

        Raises:
            DiskError: the disk is full or not writable.
        """
        if not records:
            return
        file = self.path / "rollouts" / f"step_{step:06d}.jsonl"
        lines = [json.dumps(dataclasses.asdict(record), ensure_ascii=False) for record in records]
        with naming(file):
            file.parent.mkdir(exist_ok=True)
            file.write_text("\n".join(lines) + "\n", encoding="utf-8")

    def log(self, message: str) -> None:
        """Append a line with the time to logs/train.log.

        Raises:
            DiskError: the disk is full or not writable.
        """
        path = self.logs / "train.log"
        with naming(path), path.open("a", encoding="utf-8") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {message}\n")

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes out of the folder; the lock ends with the process, however that ends.

        Raises:
            RunFolderError: another process is training in it.
        """
        with (self.path / ".lock").open("a+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                file.seek(0)
                raise RunFolderError(
                    f"{self.path} is in use by process {file.read().strip() or '?'}; wait for it, or give this run "
                    "a name of its own with trainer.name=..."
                ) from None
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
            yield


def create_run(loaded: LoadedConfig) -> RunFolder:
    """Make the folder of a new run and write its config.

    Raises:
        RunFolderError: it is there already, or cannot be made.
    """
    trainer = loaded.config.trainer
    runs_dir = Path(trainer.runs_dir).expanduser().absolute()
    path = runs_dir / (trainer.name or f"{loaded.name}-{time.strftime('%Y%m%d-%H%M%S')}")
    if trainer.name is None:
        path = _free(path)
    try:
        path.mkdir(parents=True)
    except FileExistsError:
        raise RunFolderError(
            f"{path} is there already; resume it with `rally train {path} --resume`, or choose another trainer.name"
        ) from None
    except OSError as error:
        raise RunFolderError(f"{path} cannot be made: {error}") from error
    folder = RunFolder(path)
    write_config(folder, loaded.config)
    return folder


def open_run(path: Path) -> RunFolder:
    """Return the folder of a run that exists, with all that a run needs in it."""
    folder = RunFolder(path.absolute())
    folder.logs.mkdir(exist_ok=True)
    return folder


def write_config(folder: RunFolder, config: RunConfig) -> None:
    """Write every key with its value, whole or not at all; paths so that they hold from any working directory."""
    partial = folder.config.with_suffix(".partial")
    values = anchored(config).model_dump(mode="json")
    with naming(folder.config):
        folder.logs.mkdir(exist_ok=True)
        partial.write_text(f"# The resolved config of this run.\n{to_yaml(values)}", encoding="utf-8")
        partial.rename(folder.config)


def anchored(config: RunConfig) -> RunConfig:
    """Return a config whose paths hold from any working directory, those of workers on other nodes included."""
    values = config.model_dump(mode="json")
    for section, name in (("model", "path"), ("critic", "path"), ("reward", "path"), ("trainer", "runs_dir")):
        values[section][name] = _absolute(values[section][name])
    if config.model.lora is not None:
        values["model"]["lora"]["path"] = _absolute(config.model.lora.path)
    for name in ("train", "validation"):
        values["data"][name] = [_absolute(path) for path in values["data"][name]]
    file, colon, function = (config.reward.function or "").rpartition(":")
    if colon:
        values["reward"]["function"] = f"{_absolute(file)}:{function}"
    return RunConfig.model_validate(values)


def newest_run(name: str, runs_dir: Path) -> Path:
    """Return the run of that name, or the one of a recipe of that name that was started last.

    Raises:
        RunFolderError: there is none.
    """
    own = re.compile(rf"{re.escape(name)}(-\d{{8}}-\d{{6}}(-\d+)?)?")
    runs = [path.parent for path in runs_dir.glob("*/config.yaml") if own.fullmatch(path.parent.name)]
    if not runs:
        raise RunFolderError(
            f"no run of {name!r} in {runs_dir.absolute()} to resume; start one with `rally train {name}`"
        )
    return max(runs, key=lambda path: ((path / "config.yaml").stat().st_mtime, path.name))


def _absolute(path: str | None) -> str | None:
    """Return a path that does not depend on the working directory; names on the hub stay what they are."""
    local = Path(path).expanduser() if path is not None else None
    return str(local.absolute()) if local is not None and local.exists() else path


def _free(path: Path) -> Path:
    """Return the path, or with a number behind it when two runs start in the same second."""
    candidates = (path if n == 1 else path.with_name(f"{path.name}-{n}") for n in range(1, 1000))
    return next((candidate for candidate in candidates if not candidate.exists()), path)
