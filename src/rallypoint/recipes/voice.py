"""What a run says: to the user, to logs/train.log, and to the journal.

Owns: that each message is in all three. Must not know: what is said. May be called from any thread.
"""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Iterator

from rallypoint.config import RunConfig, values_of
from rallypoint.display import Progress
from rallypoint.errors import DiskError
from rallypoint.journal import Entry, Journal, RunBegan, RunEnded, Said
from rallypoint.journal.events import Ending
from rallypoint.run.folder import RunFolder
from rallypoint.run.record import software


class Voice:
    """Says a line to the user, and records the whole message."""

    def __init__(self, folder: RunFolder, progress: Progress, journal: Journal) -> None:
        """Take where to say and to record."""
        self._folder, self._progress, self.journal = folder, progress, journal

        journal.subscribe(self._take)

    def __call__(self, message: str) -> None:
        """Say a message; of one with several lines the first."""
        self.journal.say(message)

    def note(self, message: str) -> None:
        """Record a message that is not shown."""
        self.journal.say(message, level="log")

    def _take(self, entry: Entry) -> None:
        if isinstance(entry.event, Said):
            self._folder.log(entry.event.text)
            first, _, more = entry.event.text.partition("\n")
            if entry.event.level == "note":
                self._progress.note(f"{first} (more in logs/train.log)" if more else first)

    @contextlib.contextmanager
    def start(self, first: int, config: RunConfig) -> Iterator[None]:
        """Record the beginning of a start; and, if the block raises, its end."""
        self._folder.log(f"begun after step {first}")
        machine = f"{platform.platform()} {platform.processor()}".rstrip()
        began = RunBegan(first=first, config=dict(values_of(config)), software=software(), machine=machine)
        self.journal.append(began)
        try:
            yield
        except BaseException as error:
            with contextlib.suppress(DiskError):  # which may be the very error
                self.end("failed", str(error) or type(error).__name__)
            raise

    def end(self, how: Ending, why: str = "") -> None:
        """Record how the start has ended."""
        self._folder.log(f"{how}: {why}" if why else how)
        self.journal.append(RunEnded(how=how, why=why))
