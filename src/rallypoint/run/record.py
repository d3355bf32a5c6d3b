"""The record of what decides a run's weights, in each checkpoint: config, digests of files, versions of packages.

Owns: which files those are. Must not know: what follows from a change; `resume.py` does. Only content counts: a moved
file is the same, an edited one is not.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rallypoint.checkpoint import digest
from rallypoint.config import RunConfig
from rallypoint.data.files import fingerprint, is_url
from rallypoint.data.generators import generator_version, is_generator
from rallypoint.data.locate import files_of
from rallypoint.data.remote import here
from rallypoint.environments.given import GIVEN
from rallypoint.environments.reward import SHIPPED
from rallypoint.errors import CheckpointError, DataError
from rallypoint.run.data_sets import data_sets
from rallypoint.run.folder import RunFolder

Inputs = dict[str, dict[str, str]]
"""Config key -> name of a file -> what stands for its content: a digest, or the hub's revision."""

_MODEL_FILES = {".safetensors", ".json", ".txt", ".model", ".jinja", ".py"}
"""Endings of what is read of a model's folder: weights, config, tokenizer, template, code."""
MADE_LIST = "made.json"
"""In a folder that the run made for itself: its files with digests, and what it was made from."""
_MADE = {"model.create": "model", "data.generate": "data"}
_PACKAGES = ("rallypoint", "torch", "transformers", "tokenizers")

_OUTLINE_BYTES = 2**20

_RECORD = Path("training") / "run.json"
"""In a checkpoint."""


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    """Everything that decides the weights of a checkpoint."""

    config: Mapping[str, Any]
    """The whole tree, as JSON has it."""
    inputs: Inputs
    software: Mapping[str, str]

    @classmethod
    def of(cls, config: RunConfig, folder: RunFolder) -> Record:
        """Read all of it; `inputs` includes what the run has made for itself, if it has.

        Raises:
            DataError: a file cannot be read.
        """
        return cls(config.model_dump(mode="json"), external_inputs(config) | made_inputs(folder), software())

    def write(self, checkpoint_folder: Path) -> None:
        """Write it into a checkpoint that is being made."""
        text = json.dumps(dataclasses.asdict(self), indent=1, ensure_ascii=False)
        (checkpoint_folder / _RECORD).write_text(text, encoding="utf-8")

    @classmethod
    def read(cls, checkpoint_folder: Path) -> Record:
        """Return the record of a verified checkpoint.

        Raises:
            CheckpointError: it has no readable record.
        """
        try:
            found = json.loads((checkpoint_folder / _RECORD).read_text(encoding="utf-8"))
            return cls(dict(found["config"]), dict(found["inputs"]), dict(found["software"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{checkpoint_folder / _RECORD}: cannot be read ({error}), so it is not known what the checkpoint was "
                "made from; it may be of a version of rallypoint that kept no record"
            ) from error


def has_record(checkpoint_folder: Path) -> bool:
    """Whether a folder is a checkpoint of a run, with a record of what it was made from."""
    return (checkpoint_folder / _RECORD).is_file()


def external_inputs(config: RunConfig) -> Inputs:
    """Read the files that a config names.

    Args:
        config: with paths that are valid here.

    Raises:
        DataError: one cannot be read.
    """
    named = dict(_named(config))
    # Digests mostly wait for the disk, and large models have many files.
    with ThreadPoolExecutor(8) as threads:
        found = {key: {name: threads.submit(read) for name, read in files.items()} for key, files in named.items()}
        try:
            return {key: {name: each.result() for name, each in files.items()} for key, files in found.items()}
        except OSError as error:
            raise DataError(f"{error.filename}: cannot be read: {error.strerror}") from error


def software() -> dict[str, str]:
    """Return the versions of the packages that compute; other versions may change the last bits."""
    found: dict[str, str] = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:  # run from a folder that was never installed
            continue
    return found


def _named(config: RunConfig) -> Iterator[tuple[str, dict[str, Callable[[], str]]]]:
    for key in ("data.train", "data.validation"):
        files = [file for each in data_sets(config, key) for file in files_of(each)]
        if files:
            read = outline if key == "data.train" and config.data.stream_rows else digest
            yield key, {f"file {place}": _reader(file, read) for place, file in enumerate(files, start=1)}
    models: dict[str, str | None] = {**config.named_models}
    if config.model.lora is not None:
        models["model.lora.path"] = config.model.lora.path
    if config.model.tokenizer is not None and config.model.tokenizer.chat_template is not None:
        yield "model.tokenizer.chat_template", {"the template": _reader(config.model.tokenizer.chat_template)}
    for key, path in models.items():
        # A hub model that is not in the cache is compared by name only.
        if path is not None and (files := _model(path)):
            yield key, files
    for at, one in enumerate(config.rollout.tools):
        if "corpus" in one.parameters:
            yield f"rollout.episode.tools[{at}].corpus", {"the passages": _reader(one.parameters["corpus"], outline)}
    functions = {f"{section}.function": own.function for section, own in config.own_functions.items()}
    for key, spec in (functions | config.rollout.named_functions | config.reward.named_functions).items():
        file, colon, function = spec.rpartition(":")
        if spec in GIVEN:
            yield key, {"the function": lambda given=GIVEN[spec]: given.digest}
        elif colon and spec not in SHIPPED:
            yield key, {f"{Path(file).name}:{function}": _reader(Path(file))}


def _model(path: str) -> dict[str, Callable[[], str]]:
    folder = Path(here(path)).expanduser()
    if folder.is_dir():
        files = (file for file in folder.iterdir() if file.suffix in _MODEL_FILES and file.is_file())
        return {file.name: _reader(file) for file in sorted(files)}
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(path, "config.json")
    return {"revision": lambda: Path(cached).parent.name} if isinstance(cached, str) else {}


def _reader(path: str | Path, read: Callable[[Path], str] = digest) -> Callable[[], str]:
    """Return what reads a file's digest, or of one on another file system what tells that it has changed."""
    if is_generator(str(path)):
        return lambda: generator_version(str(path))
    return lambda: fingerprint(str(path)) if is_url(str(path)) else read(Path(path).expanduser())


def outline(path: Path) -> str:
    """Return a digest of a file's size, beginning and end, for one that is too large to be read at every start."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        found = hashlib.sha256(str(size).encode())
        for place in (0, max(0, size - _OUTLINE_BYTES)):
            file.seek(place)
            found.update(file.read(_OUTLINE_BYTES))
    return found.hexdigest()


def made_inputs(folder: RunFolder) -> Inputs:
    """Return the digests of what a run has made for itself, by the key that asked for it."""
    found: Inputs = {}
    for key, name in _MADE.items():
        listed = listed_in(folder.path / name)
        if listed is not None:
            found[key] = {file: str(entry["xxh3_128"]) for file, entry in listed["files"].items()}
    return found


def listed_in(folder: Path) -> dict[str, Any] | None:
    """Return the list of what is in a folder; None if there is no readable one."""
    try:
        found = json.loads((folder / MADE_LIST).read_text(encoding="utf-8"))
        entries = [(int(entry["size"]), str(entry["xxh3_128"])) for entry in found["files"].values()]
        return found if entries and isinstance(found["made_from"], dict) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
