"""A journal that is kept nowhere, whose messages a test hears."""

import os
from collections.abc import Callable
from pathlib import Path

from rallypoint.journal import Journal, Said


def heard(say: Callable[[str], object] = print) -> Journal:
    """Return it; `say` is called with each message."""
    journal = Journal(Path(os.devnull))
    journal.subscribe(lambda entry: say(entry.event.text) if isinstance(entry.event, Said) else None)
    return journal
