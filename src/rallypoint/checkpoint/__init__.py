"""State that survives."""

from rallypoint.checkpoint.files import check_files, digest, digests, sync, sync_below
from rallypoint.checkpoint.store import (
    MANIFEST,
    checkpoint_name,
    newest,
    newest_whole,
    prune,
    recover,
    set_aside,
    steps,
    verify,
    visible,
    writing,
)

__all__ = [
    "MANIFEST",
    "check_files",
    "checkpoint_name",
    "digest",
    "digests",
    "newest",
    "newest_whole",
    "prune",
    "recover",
    "set_aside",
    "steps",
    "sync",
    "sync_below",
    "verify",
    "visible",
    "writing",
]
