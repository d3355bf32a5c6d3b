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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import xxhash

from rallypoint.disk import Listed, explain, take_lists
from rallypoint.errors import CheckpointError

_LOG = logging.getLogger(__name__)
MANIFEST = "manifest.json"
_FORMAT, _READ = 2, (1, 2)
"""Format that is written, and those that are read: 1 had one digest a file."""
_REMEDY = "the checkpoint is damaged"
_NUM_READERS = 8
"""Files that are read at once: a digest waits for the disk, and is computed outside of Python's lock."""
_BLOCK_BYTES = 1 << 22
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
        files = {name: (entry["size"], _expected(entry)) for name, entry in manifest["files"].items()}
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{checkpoint}: it has no {MANIFEST}, so it is not whole: a checkpoint of ours never appears without one, "
            f"but a copy that was interrupted does; {_REMEDY}"
        ) from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{checkpoint}: its {MANIFEST} cannot be read ({error}); {_REMEDY}") from error
    if version not in _READ:
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
    files: dict[str, dict[str, Any]] = {}
    for name, (parts, total) in take_lists(folder).items():
        files[name] = {"size": (folder / name).stat().st_size, "parts": parts}
        if total is not None:
            files[name]["sum"] = f"{total:016x}"
    files |= digests(folder, besides=(MANIFEST, *files))
    manifest = {"format": _FORMAT, "step": step, "files": dict(sorted(files.items()))}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1))


Files = Mapping[str, tuple[int, str | list[Listed]]]
"""Path of a file in its folder -> size in bytes, and xxh3-128 in hex, of all of it or of parts that are all of it."""


def _expected(entry: Mapping[str, Any]) -> str | list[Listed]:
    """Return the digests of a file in a manifest.

    Raises:
        ValueError: its parts are not all of it.
    """
    if "parts" not in entry:
        return entry["xxh3_128"]
    parts: list[Listed] = [(int(a), int(b), int(c), int(d), str(e)) for a, b, c, d, e in entry["parts"]]
    if sum(length * count for _, length, _, count, _ in parts) != entry["size"]:
        raise ValueError("the parts of a file are not all of it")
    return parts


def digested(checkpoint: Path) -> str:
    """Return a digest of the weights in a checkpoint, from its manifest: files of weights, by name and content.

    It depends on the names, types, shapes and bits of all tensors, and not on which ranks wrote which parts of them. In
    a checkpoint of before sums were taken it is that of the parts.
    """
    files = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))["files"]
    weights = {name: _digest_of(entry) for name, entry in sorted(files.items()) if _is_weights(name)}
    return xxhash.xxh3_64_hexdigest(json.dumps(weights).encode())


def _digest_of(entry: Mapping[str, Any]) -> str | list[Any]:
    parts = _expected(entry)
    return [parts[0][-1], entry["sum"]] if "sum" in entry else parts  # the first part is the header


def _is_weights(name: str) -> bool:
    return name.endswith(".safetensors") and not name.startswith("training/")


def digest(path: Path) -> str:
    """Return the xxh3-128 of a file in hex; it finds damage and edits, but is not a signature."""
    found = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            found.update(block)
    return found.hexdigest()


def is_as_listed(path: Path, parts: Sequence[Listed]) -> bool:
    """Whether a file has the bytes that ranks took digests of while they wrote it; it is read once, in order.

    Two ranks have written columns of a matrix: 0 1 | 2 3 / 4 5 | 6 7, after a header of 8 bytes. Their parts are
    (8, 2, 4, 2) and (10, 2, 4, 2): runs of 2 bytes, 4 bytes apart, two of them.
    """
    waiting, active, place = sorted(parts, reverse=True), list[tuple[Listed, Any]](), 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            view, end = memoryview(block), place + len(block)
            while waiting and waiting[-1][0] < end:
                active.append((waiting.pop(), xxhash.xxh3_128()))
            for (start, length, stride, count, _), found in active:
                for index in range(max(0, (place - start - length) // stride + 1) if stride else 0, count):
                    begin = start + index * stride
                    if begin >= end:
                        break
                    found.update(view[max(0, begin - place) : max(0, begin + length - place)])
            if any(_ends(part) <= end and found.hexdigest() != part[-1] for part, found in active):
                return False
            active, place = [one for one in active if _ends(one[0]) > end], end
    return not active and all(part[3] == 0 for part in waiting)


def _ends(part: Listed) -> int:
    start, length, stride, count, _ = part
    return start + (count - 1) * stride + length


def digests(folder: Path, *, besides: Collection[str]) -> dict[str, dict[str, int | str]]:
    """Return size and digest of every file below a folder, as a manifest lists them.

    Args:
        folder: to read.
        besides: paths in it to leave out: that of the manifest itself.
    """
    paths = sorted(
        path for path in folder.rglob("*") if path.is_file() and str(path.relative_to(folder)) not in besides
    )
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
        found = threads.map(lambda name: _is_same(folder / name, files[name][1]), files)
        for name, is_same in zip(files, found, strict=True):
            if not is_same:
                raise CheckpointError(f"{folder / name}: its content has changed since it was saved; {remedy}")


def _is_same(path: Path, expected: str | list[Listed]) -> bool:
    return digest(path) == expected if isinstance(expected, str) else is_as_listed(path, expected)


def sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        _LOG.debug("flushed %s", path)
    finally:
        os.close(descriptor)


def sync_below(folder: Path) -> None:
    """Flush a folder and everything in it. Its own name is in its parent folder, which is not flushed."""
    for path in (*folder.rglob("*"), folder):
        sync(path)
