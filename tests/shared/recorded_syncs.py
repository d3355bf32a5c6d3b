"""A record of the files and folders that are flushed to the disk."""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def recorded_syncs() -> Iterator[list[Path]]:
    """Yield the paths that `rallypoint.checkpoint.sync` flushes in the block, in order, by its debug log."""
    flushed: list[Path] = []

    class Record(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.msg == "flushed %s":
                assert isinstance(record.args, tuple)
                flushed.append(Path(str(record.args[0])))

    log, handler = logging.getLogger("rallypoint.checkpoint"), Record()
    before = log.level
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)
    try:
        yield flushed
    finally:
        log.setLevel(before)
        log.removeHandler(handler)
