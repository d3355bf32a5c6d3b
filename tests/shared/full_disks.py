"""A disk that takes no more, pretended by a limit of this process."""

import contextlib
import resource
from collections.abc import Iterator


@contextlib.contextmanager
def files_end_at(num_bytes: int) -> Iterator[None]:
    """Let no file of this process grow beyond so many bytes: writing more raises an OSError, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
