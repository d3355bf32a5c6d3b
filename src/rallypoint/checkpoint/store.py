"""Checkpoints as folders that are either whole or not there.

A checkpoint is written into a folder of another name, every file is flushed to disk, a manifest with the
size and digest of each file is added, and one rename makes it visible. Loading verifies all of it first.
No pickle anywhere: safetensors and JSON.

    checkpoints/step_000020/
        config.json  model.safetensors  tokenizer.json ...   the actor: an ordinary Hugging Face folder
        critic/                                              the critic: another one
        training/                                            what resuming needs besides
        manifest.json
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import xxhash

from rallypoint.errors import CheckpointError

MANIFEST = "manifest.json"
_FORMAT = 1
_REMEDY = "the checkpoint is damaged: remove its folder to go on from the one before"
_NAME = re.compile(r"step_(\d{6,})")


def checkpoint_name(step: int) -> str:
    """Return the folder name of a step.

    >>> checkpoint_name(20)
    'step_000020'
    """
    return f"step_{step:06d}"


@contextlib.contextmanager
def writing(folder: Path, step: int) -> Iterator[Path]:
    """Yield a folder to write into; when the body ends well it becomes the checkpoint of that step.

    Raises:
        CheckpointError: the disk is full or not writable; no partial checkpoint stays behind.
    """
    name = checkpoint_name(step)
    final, temporary, replaced = folder / name, folder / f".{name}.partial", folder / f".{name}.replaced"
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        yield temporary
        _write_manifest(temporary, step)
        shutil.rmtree(replaced, ignore_errors=True)
        if final.exists():
            final.rename(replaced)
        temporary.rename(final)
        _sync(folder)
        shutil.rmtree(replaced, ignore_errors=True)
    except OSError as error:
        raise CheckpointError(f"{final}: cannot be written: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        if replaced.exists() and not final.exists():
            replaced.rename(final)


def steps(folder: Path) -> list[int]:
    """Return the steps of all checkpoints in a folder, oldest first; what has no manifest is none."""
    found = [_NAME.fullmatch(path.name) for path in folder.iterdir()] if folder.is_dir() else []
    return sorted(int(name.group(1)) for name in found if name and (folder / name.group(0) / MANIFEST).is_file())


def verify(checkpoint: Path) -> None:
    """Compare every file with the manifest.

    Raises:
        CheckpointError: a file is missing, cut off, changed, or the manifest itself is unreadable.
    """
    try:
        manifest = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))
        version, step = manifest["format"], manifest["step"]
        files = {name: (entry["size"], entry["xxh3_128"]) for name, entry in manifest["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{checkpoint}: its {MANIFEST} cannot be read ({error}); {_REMEDY}") from error
    if version != _FORMAT:
        raise CheckpointError(f"{checkpoint}: expected format {_FORMAT}, found {version}")
    named = _NAME.fullmatch(checkpoint.name)
    if named and int(named.group(1)) != step:
        raise CheckpointError(f"{checkpoint}: its {MANIFEST} is that of step {step}; {_REMEDY}")
    for name, (expected_size, digest) in files.items():
        path = checkpoint / name
        if not path.is_file():
            raise CheckpointError(f"{path}: missing; {_REMEDY}")
        size = path.stat().st_size
        if size != expected_size:
            raise CheckpointError(f"{path}: expected {expected_size} bytes, found {size}; {_REMEDY}")
        if _digest(path) != digest:
            raise CheckpointError(f"{path}: its content has changed since it was saved; {_REMEDY}")


def prune(folder: Path, keep: int) -> None:
    """Remove all but the newest checkpoints, and what an interrupted save left."""
    for ending in ("partial", "replaced"):
        for leftover in folder.glob(f".step_*.{ending}"):
            shutil.rmtree(leftover, ignore_errors=True)
    found = steps(folder)
    for name in map(checkpoint_name, found[: max(0, len(found) - keep)]):
        # Renamed first: a checkpoint that is half removed must not look like one.
        doomed = (folder / name).rename(folder / f".{name}.partial")
        shutil.rmtree(doomed)


def _write_manifest(folder: Path, step: int) -> None:
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    files = {str(path.relative_to(folder)): {"size": path.stat().st_size, "xxh3_128": _digest(path)} for path in paths}
    (folder / MANIFEST).write_text(json.dumps({"format": _FORMAT, "step": step, "files": files}, indent=1))
    for path in (folder / MANIFEST, *folder.rglob("*"), folder):
        _sync(path)


def _digest(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
