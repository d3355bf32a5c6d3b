"""Writes that fail: errors that name the file, the reason, and the space that is needed and free."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError

from rallypoint.errors import DiskError

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_NUMBER = re.compile(r"\(os error (\d+)\)")
"""The system's error number in messages of libraries written in Rust."""


def explain(path: str | os.PathLike[str], error: Exception, needed: int | None = None) -> str:
    """Say what cannot be written and why; on a full disk, also the space needed and free.

    Args:
        path: of the file or folder.
        error: of the system, or of a library that passes it on.
        needed: bytes of it, where they are known.
    """
    number = error.errno if isinstance(error, OSError) else None
    found = _NUMBER.search(str(error))
    if number is None and found:
        number = int(found[1])
    why = str(error) if number is None else os.strerror(number)
    if number not in _NO_ROOM:
        return f"{os.fspath(path)} cannot be written: {why}"
    needs = "" if needed is None else f"it needs {_size(needed)}, "
    return (
        f"{os.fspath(path)} cannot be written: {why} ({needs}{_size(_num_free(Path(path)))} are free); "
        "make room on its disk"
    )


@contextlib.contextmanager
def naming(path: str | os.PathLike[str], needed: int | None = None) -> Iterator[None]:
    """Name the file in errors of the block: the system's errors on writes do not.

    Args:
        path: of the file.
        needed: bytes that are written, where they are known.

    Raises:
        DiskError: instead of any `OSError` of the block.
    """
    try:
        yield
    except DiskError:
        raise
    except OSError as error:
        raise DiskError(explain(path, error, needed)) from error


@contextlib.contextmanager
def naming_tensors(path: str | os.PathLike[str]) -> Iterator[None]:
    """Do the same for a file that safetensors writes, whose errors are no `OSError`.

    Raises:
        DiskError: instead of a `SafetensorError` of the block.
    """
    try:
        yield
    except SafetensorError as error:
        raise DiskError(explain(path, error)) from error


def _num_free(path: Path) -> int:
    """Return the bytes that are free for this user on the disk that a path is on, or would be."""
    there = next((each for each in path.absolute().parents if each.is_dir()), Path("/"))
    return shutil.disk_usage(there).free


def _size(num_bytes: int) -> str:
    """Write a number of bytes as a person would.

    >>> _size(900), _size(1_500), _size(84 * 2**30)
    ('900 B', '1.5 KiB', '84.0 GiB')
    """
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if num_bytes >= 2**power:
            return f"{num_bytes / 2**power:.1f} {unit}"
    return f"{num_bytes} B"
