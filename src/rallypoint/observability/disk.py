"""What a run writes beside its checkpoints, and a disk that does not take it."""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Iterator

from safetensors import SafetensorError

from rallypoint.errors import DiskError

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_NUMBER = re.compile(r"\(os error (\d+)\)")
"""How a library that is written in Rust says what the system said."""


@contextlib.contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Have whatever keeps a file from being written name it: what the system says of a write does not.

    Raises:
        DiskError: instead of any `OSError` of the block.
    """
    try:
        yield
    except DiskError:
        raise
    except OSError as error:
        raise _named(path, error.strerror or str(error), error.errno) from error


@contextlib.contextmanager
def naming_tensors(path: str | os.PathLike[str]) -> Iterator[None]:
    """Do the same for a file that safetensors writes, whose errors are no `OSError`.

    Raises:
        DiskError: instead of a `SafetensorError` of the block.
    """
    try:
        yield
    except SafetensorError as error:
        found = _NUMBER.search(str(error))
        number = int(found[1]) if found else None
        raise _named(path, str(error) if number is None else os.strerror(number), number) from error


def _named(path: str | os.PathLike[str], why: str, number: int | None) -> DiskError:
    remedy = "; make room on its disk" if number in _NO_ROOM else ""
    return DiskError(f"{os.fspath(path)} cannot be written: {why}{remedy}")
