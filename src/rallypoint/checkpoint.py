"""Checkpoints: folders that are either whole or absent, and the digests and flushes that make sure of it.

A checkpoint is written to a folder with a temporary name, with a manifest of the size and digest of every file. All of
it is flushed to the disk, and one rename makes it visible. Loading verifies all of it first. safetensors and JSON, no
pickle.

    checkpoints/step_000020/
        config.json  model.safetensors  tokenizer.json ...   the actor: an ordinary Hugging Face folder
        critic/                                              the critic: another one
        training/                                            what only resuming needs
        manifest.json
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import xxhash

from rallypoint.disk import explain
from rallypoint.errors import CheckpointError

_LOG = logging.getLogger(__name__)
MANIFEST = "manifest.json"
_FORMAT = 1
_REMEDY = "the checkpoint is damaged"
_NUM_READERS = 8
"""Files that are read at once: a digest waits for the disk, and is computed outside of Python's lock."""
_NAME = re.compile(r"step_(\d{6,})")


def checkpoint_name(step: int) -> str:
    """Return the name of the folder of a step.

    >>> checkpoint_name(20)
    'step_000020'
    """
    return f"step_{step:06d}"


@contextlib.contextmanager
def writing(folder: Path, step: int, *, durable: bool = True) -> Iterator[Path]:
    """Yield a folder to write to, which becomes the checkpoint of a step if the block succeeds.

    Args:
        folder: of checkpoints.
        step: that it is of.
        durable: whether it outlives a power cut, for which all of it is flushed to the disk.

    Raises:
        CheckpointError: the disk is full or not writable; no partial checkpoint is left.
    """
    name = checkpoint_name(step)
    final, temporary, replaced = folder / name, folder / f".{name}.partial", folder / f".{name}.replaced"
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        folder.mkdir(exist_ok=True)  # in that of the run, which nobody makes again if it is gone
        temporary.mkdir()
        yield temporary
        _write_manifest(temporary, step)
        if durable:
            sync_below(temporary)
        shutil.rmtree(replaced, ignore_errors=True)
        if final.exists():
            final.rename(replaced)
        temporary.rename(final)
        if durable:
            sync(folder)
        shutil.rmtree(replaced, ignore_errors=True)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)  # so that the free space in the error is right
        raise CheckpointError(explain(final, error, _size(folder))) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        if replaced.exists() and not final.exists():
            replaced.rename(final)


def _size(folder: Path) -> int | None:
    """Estimate the size of the next checkpoint by the newest one; None without one."""
    with contextlib.suppress(OSError):  # the folder is gone, or on the disk that fails
        if there := visible(folder):
            files = (folder / checkpoint_name(there[-1])).rglob("*")
            return sum(path.stat().st_size for path in files if path.is_file())
    return None


def visible(folder: Path) -> list[int]:
    """Return the steps of all folders with the name of a checkpoint, whole or not, oldest first."""
    found = folder.iterdir() if folder.is_dir() else ()
    return steps_of(path.name for path in found if path.is_dir())


def steps_of(names: Iterable[str]) -> list[int]:
    """Return the steps that checkpoints of these names are of, oldest first; other names do not count."""
    return sorted(int(found[1]) for name in names if (found := _NAME.fullmatch(name)))


def steps(folder: Path) -> list[int]:
    """Return the steps of all checkpoints in a folder, oldest first; folders without a manifest do not count."""
    return [step for step in visible(folder) if (folder / checkpoint_name(step) / MANIFEST).is_file()]


def newest_whole(folder: Path, say: Callable[[str], None] = lambda _: None) -> int:
    """Return the step of the newest undamaged checkpoint; 0 if there is none.

    Args:
        folder: of checkpoints.
        say: called with a line about each one that is newer and damaged.
    """
    for step in reversed(steps(folder)):
        try:
            verify(folder / checkpoint_name(step))
        except CheckpointError as error:
            say(f"{error}; it is passed over")
        else:
            return step
    return 0


def recover(folder: Path) -> None:
    """Restore the name of a checkpoint that was being replaced when the save was killed."""
    for replaced in folder.glob(".step_*.replaced"):
        final = folder / replaced.name.removeprefix(".").removesuffix(".replaced")
        if not final.exists():
            replaced.rename(final)


def set_aside(folder: Path, after: int) -> list[Path]:
    """Rename the checkpoints after a step, so that they no longer count; return their new paths."""
    aside: list[Path] = []
    for name in (checkpoint_name(step) for step in visible(folder) if step > after):
        numbers = ("", *(f"-{number}" for number in range(2, 1000)))
        free = next(path for number in numbers if not (path := folder / f"{name}.aside{number}").exists())
        aside.append((folder / name).rename(free))
    return aside


def verify(checkpoint: Path, *, to_resume: bool = True) -> None:
    """Compare every file with the manifest.

    Args:
        checkpoint: its folder.
        to_resume: whether the state of optimizers is needed, too.

    Raises:
        CheckpointError: a file is missing, truncated or changed, or the manifest is missing or unreadable.
    """
    try:
        manifest = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))
        version, step = manifest["format"], manifest["step"]
        files = {name: (entry["size"], entry["xxh3_128"]) for name, entry in manifest["files"].items()}
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{checkpoint}: it has no {MANIFEST}, so it is not whole: a checkpoint of ours never appears without one, "
            f"but a copy that was interrupted does; {_REMEDY}"
        ) from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{checkpoint}: its {MANIFEST} cannot be read ({error}); {_REMEDY}") from error
    if version != _FORMAT:
        raise CheckpointError(f"{checkpoint}: expected format {_FORMAT}, found {version}")
    named = _NAME.fullmatch(checkpoint.name)
    if named and int(named.group(1)) != step:
        raise CheckpointError(f"{checkpoint}: its {MANIFEST} is that of step {step}; {_REMEDY}")
    needed = {name: file for name, file in files.items() if to_resume or not is_to_resume(name)}
    check_files(checkpoint, needed, _REMEDY)


def is_to_resume(name: str) -> bool:
    """Whether a file of a checkpoint has what only a run that goes on needs, and much of it."""
    return name.startswith("training/") and name.endswith(".safetensors")


def adopt(saved: Path, folder: Path) -> None:
    """Move a whole checkpoint that was not flushed to the disk, a snapshot, among those that are.

    Raises:
        CheckpointError: the folder is not writable.
    """
    try:
        sync_below(saved)
        folder.mkdir(exist_ok=True)
        saved.rename(folder / saved.name)
        sync(folder)
    except OSError as error:
        raise CheckpointError(explain(folder / saved.name, error)) from error


def prune(folder: Path, keep: int, *, best: int = 0, every: int | None = None) -> None:
    """Remove old checkpoints, and what killed saves left.

    Args:
        folder: of checkpoints.
        keep: number of the newest, which stay.
        best: step whose checkpoint stays; 0 for none.
        every: checkpoints of its multiples stay; None for none.
    """
    for ending in ("partial", "replaced"):
        for leftover in folder.glob(f".step_*.{ending}"):
            shutil.rmtree(leftover, ignore_errors=True)
    for name in map(checkpoint_name, doomed(steps(folder), keep, best=best, every=every)):
        # Renamed first: a half-removed checkpoint must not look like one.
        shutil.rmtree((folder / name).rename(folder / f".{name}.partial"))


def doomed(steps: Iterable[int], keep: int, *, best: int = 0, every: int | None = None) -> list[int]:
    """Return the steps whose checkpoints are to be removed, oldest first; see `prune`.

    >>> doomed([10, 20, 25, 30, 40, 50], 2, best=25, every=20)
    [10, 30]
    """
    found = sorted(steps)
    stay = {best, *(step for step in found if every and step % every == 0)}
    return [step for step in found[: max(0, len(found) - keep)] if step not in stay]


def best_of(scores: Mapping[int, float], steps: Iterable[int]) -> int:
    """Return the step with the highest score, the first of equal ones; 0 for none.

    >>> best_of({10: 0.5, 20: 0.7, 30: 0.7, 40: 0.9}, [10, 20, 30])
    20
    """
    return max(sorted(scores.keys() & set(steps)), key=scores.__getitem__, default=0)


def _write_manifest(folder: Path, step: int) -> None:
    manifest = {"format": _FORMAT, "step": step, "files": digests(folder, besides=MANIFEST)}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1))


Files = Mapping[str, tuple[int, str]]
"""Path of a file in its folder -> size in bytes, and xxh3-128 in hex."""


def weights_digest(checkpoint: Path) -> str:
    """Return a digest of the weights in a checkpoint, from its manifest: files of weights, by name and content."""
    files = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))["files"]
    weights = {name: entry["xxh3_128"] for name, entry in sorted(files.items()) if _is_weights(name)}
    return xxhash.xxh3_64_hexdigest(json.dumps(weights).encode())


def _is_weights(name: str) -> bool:
    return name.endswith(".safetensors") and not name.startswith("training/")


def digest(path: Path) -> str:
    """Return the xxh3-128 of a file in hex; it finds damage and edits, but is no signature."""
    found = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            found.update(block)
    return found.hexdigest()


def digests(folder: Path, *, besides: str) -> dict[str, dict[str, int | str]]:
    """Return size and digest of every file below a folder, as a manifest lists them.

    Args:
        folder: to read.
        besides: the file at its top to leave out: the manifest itself.
    """
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / besides)
    with ThreadPoolExecutor(_NUM_READERS) as threads:
        found = zip(paths, threads.map(digest, paths), strict=True)
        return {str(path.relative_to(folder)): {"size": path.stat().st_size, "xxh3_128": each} for path, each in found}


def check_files(folder: Path, files: Files, remedy: str) -> None:
    """Compare files with a manifest.

    Raises:
        CheckpointError: a file is missing, truncated or changed; it is named, with the remedy.
    """
    for name, (expected_size, _) in files.items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{path}: missing; {remedy}")
        size = path.stat().st_size
        if size != expected_size:
            raise CheckpointError(f"{path}: expected {expected_size} bytes, found {size}; {remedy}")
    with ThreadPoolExecutor(_NUM_READERS) as threads:
        found = threads.map(lambda name: digest(folder / name), files)
        for (name, (_, expected)), each in zip(files.items(), found, strict=True):
            if each != expected:
                raise CheckpointError(f"{folder / name}: its content has changed since it was saved; {remedy}")


def sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        _LOG.debug("flushed %s", path)
    finally:
        os.close(descriptor)


def sync_below(folder: Path) -> None:
    """Flush a folder and everything in it; its own name is an entry of its parent."""
    for path in (*folder.rglob("*"), folder):
        sync(path)
