"""Writes that fail: errors that name the file, the reason, and the space that is needed and free; and their voice."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

from safetensors import SafetensorError

from rallypoint.errors import DiskError, first_line

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_NUMBER = re.compile(r"\(os error (\d+)\)")
"""The system's error number in messages of libraries written in Rust."""


_TELL_S = 60.0
"""Seconds between two lines about the same outage."""


@dataclasses.dataclass(slots=True)
class Outage:
    """A disk that takes no more, as its user sees it: a line a minute while that lasts, and one when it is over.

    >>> outage = Outage(print, "its lines wait in memory", clock=iter([0.0, 30.0, 61.0]).__next__)
    >>> for _ in range(3):
    ...     outage.lasts(OSError("no room"))
    no room; its lines wait in memory
    no room; its lines wait in memory
    >>> outage.ends("all lines are written")
    all lines are written
    >>> outage.ends("all lines are written")
    """

    say: Callable[[str], None]
    meanwhile: str
    """What happens until the disk takes something again."""
    clock: Callable[[], float] = time.monotonic
    _told: float | None = None

    def lasts(self, error: Exception) -> None:
        """Take note of a write that failed."""
        now = self.clock()
        if self._told is None or now - self._told >= _TELL_S:
            self._told = now
            self.say(f"{first_line(error)}; {self.meanwhile}")

    def ends(self, text: str) -> None:
        """Take note of a write that did not fail; the text is said if one did before."""
        if self._told is not None:
            self._told = None
            self.say(text)


def explain(path: str | os.PathLike[str], error: Exception, needed: int | None = None) -> str:
    """Describe what cannot be written and why; on a full disk, also the space needed and free.

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


Listed: TypeAlias = tuple[int, int, int, int, str]
"""Bytes of a file, and their digest: first byte, length of a run, bytes from one run to the next, runs; xxh3-128."""
_LIST = re.compile(r"\.(?P<name>.+)\.(?P<writer>\w+)\.list")


def write_list(path: Path, writer: str, parts: Sequence[Listed], total: int | None = None) -> None:
    """Write down beside a file what one of its writers has written, for the manifest of its folder.

    Args:
        path: of the file.
        writer: tells its lists apart.
        parts: what it wrote.
        total: sum over these, modulo 2**64, that depends on no layout of ranks; None for none.
    """
    path.with_name(f".{path.name}.{writer}.list").write_text(json.dumps([parts, total]))


def take_lists(folder: Path) -> dict[str, tuple[list[Listed], int | None]]:
    """Remove these lists from a folder, and return them joined, by the path of their file in it."""
    found: dict[str, tuple[list[Listed], int | None]] = {}
    for path in sorted(folder.rglob(".*.list")):
        if name := _LIST.fullmatch(path.name):
            file = path.with_name(name["name"]).relative_to(folder).as_posix()
            before, total = found.get(file, ([], None))
            parts, more = json.loads(path.read_text())
            found[file] = (
                sorted([*before, *(tuple(each) for each in parts)]),
                total if more is None else ((total or 0) + more) % 2**64,
            )
            path.unlink()
    return found


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
    """Do the same for a file that safetensors writes, whose errors are not `OSError`.

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
