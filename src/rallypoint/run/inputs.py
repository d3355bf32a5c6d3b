"""The files outside of the config that decide a run's bits, by the digests of what is in them.

Owns: which files those are. Must not know: what is done when one has changed; `resume.py` does. What counts is the
content: a file that was moved is the same, one that was edited is another.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache

from rallypoint.checkpoint import digest
from rallypoint.config import RunConfig
from rallypoint.errors import DataError
from rallypoint.run.folder import RunFolder

Inputs = dict[str, dict[str, str]]
"""Config key -> name of a file -> what stands for its content: a digest, or the hub's revision."""

_MODEL_FILES = {".safetensors", ".json", ".txt", ".model", ".jinja", ".py"}
"""Endings of what is read of a model's folder: weights, config, tokenizer, template, code."""
MADE_LIST = "made.json"
"""In a folder that the run made for itself: what is in it, with digests, and what it was made from."""
_MADE = {"model.create": "model", "data.generate": "data"}
_PACKAGES = ("rallypoint", "torch", "transformers", "tokenizers")


def external_inputs(config: RunConfig) -> Inputs:
    """Read the files that a config names.

    Args:
        config: with paths that hold from here.

    Raises:
        DataError: one cannot be read.
    """
    named = dict(_named(config))
    # A digest is waiting for the disk mostly, and large models have many files.
    with ThreadPoolExecutor(8) as threads:
        found = {key: {name: threads.submit(read) for name, read in files.items()} for key, files in named.items()}
        try:
            return {key: {name: each.result() for name, each in files.items()} for key, files in found.items()}
        except OSError as error:
            raise DataError(f"{error.filename}: cannot be read: {error.strerror}") from error


def software() -> dict[str, str]:
    """Return the versions of the packages that compute; with others the last bits may differ."""
    found: dict[str, str] = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:  # run from a folder that was never installed
            continue
    return found


def _named(config: RunConfig) -> Iterator[tuple[str, dict[str, Callable[[], str]]]]:
    for key, paths in (("data.train", config.data.train), ("data.validation", config.data.validation)):
        if paths:
            yield key, {f"file {place}": _reader(Path(path)) for place, path in enumerate(paths, start=1)}
    models = {"model.path": config.model.path} | {f"{role}.path": path for role, path in config.own_models.items()}
    if config.model.lora is not None:
        models["model.lora.path"] = config.model.lora.path
    for key, path in models.items():
        if path is not None and (files := _model(path)):  # of a hub's model that is not here only the name is compared
            yield key, files
    file, colon, function = (config.reward.function or "").rpartition(":")
    if colon:
        yield "reward.function", {f"{Path(file).name}:{function}": _reader(Path(file))}


def _model(path: str) -> dict[str, Callable[[], str]]:
    folder = Path(path).expanduser()
    if folder.is_dir():
        files = (file for file in folder.iterdir() if file.suffix in _MODEL_FILES and file.is_file())
        return {file.name: _reader(file) for file in sorted(files)}
    cached = try_to_load_from_cache(path, "config.json")
    return {"revision": lambda: Path(cached).parent.name} if isinstance(cached, str) else {}


def _reader(path: Path) -> Callable[[], str]:
    return lambda: digest(path.expanduser())


def made_inputs(folder: RunFolder) -> Inputs:
    """Return the digests of what a run has made for itself, by the key that asked for it."""
    found: Inputs = {}
    for key, name in _MADE.items():
        listed = listed_in(folder.path / name)
        if listed is not None:
            found[key] = {file: str(entry["xxh3_128"]) for file, entry in listed["files"].items()}
    return found


def listed_in(folder: Path) -> dict[str, Any] | None:
    """Return the list of what is in a folder; None if there is none that could be read."""
    try:
        found = json.loads((folder / MADE_LIST).read_text(encoding="utf-8"))
        entries = [(int(entry["size"]), str(entry["xxh3_128"])) for entry in found["files"].values()]
        return found if entries and isinstance(found["made_from"], dict) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
