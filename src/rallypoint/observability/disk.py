"""What a run writes beside its checkpoints, and a disk that does not take it."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator

from rallypoint.errors import DiskError

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


@contextlib.contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Have whatever keeps a file from being written name it: what the system says of a write does not.

    Raises:
        DiskError: instead of any `OSError` of the block.
    """
    try:
        yield
    except OSError as error:
        remedy = "; make room on its disk" if error.errno in _NO_ROOM else ""
        raise DiskError(f"{os.fspath(path)} cannot be written: {error.strerror or error}{remedy}") from error
