"""Digests of files, so that a changed bit is found, and the flushes that make files outlive a power cut.

xxh3 hashes faster than a disk reads. It finds damage and edits; it is no signature.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import xxhash

from rallypoint.errors import CheckpointError

Files = Mapping[str, tuple[int, str]]
"""Name of a file in its folder -> bytes, and xxh3-128 in hex."""


def digest(path: Path) -> str:
    """Return the xxh3-128 of a file, in hex."""
    found = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            found.update(block)
    return found.hexdigest()


def digests(folder: Path, *, besides: str) -> dict[str, dict[str, int | str]]:
    """Return size and digest of every file below a folder, as a manifest lists them.

    Args:
        folder: to read.
        besides: the file at its top that is left out: the manifest's own.
    """
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / besides)
    return {str(path.relative_to(folder)): {"size": path.stat().st_size, "xxh3_128": digest(path)} for path in paths}


def check_files(folder: Path, files: Files, remedy: str) -> None:
    """Compare files with what a manifest says of them.

    Raises:
        CheckpointError: one is missing, cut off or changed; it is named, and the remedy said.
    """
    for name, (expected_size, expected) in files.items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{path}: missing; {remedy}")
        size = path.stat().st_size
        if size != expected_size:
            raise CheckpointError(f"{path}: expected {expected_size} bytes, found {size}; {remedy}")
        if digest(path) != expected:
            raise CheckpointError(f"{path}: its content has changed since it was saved; {remedy}")


def sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_below(folder: Path) -> None:
    """Flush a folder with all that is in it; its own name is its parent's to flush."""
    for path in (*folder.rglob("*"), folder):
        sync(path)
