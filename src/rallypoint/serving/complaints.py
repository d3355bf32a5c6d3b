"""What a server complains about, a line at a time however many clients misbehave.

Owns: how often is written. Must not know: what is complained about, where lines go.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import time
from collections.abc import Callable

_SHORTEST_S, _LONGEST_S = 1.0, 60.0
_MOST_KINDS = 8


class Complaints(logging.Handler):
    """Writes the first complaint at once, and sums up what comes within the next second.

    While complaints keep coming the pauses between lines double up to a minute, so that an attack of a day is about
    1,500 lines. Used by one thread.

    >>> now, lines = [0.0], []
    >>> complaints = Complaints(lines.append, clock=lambda: now[0])
    >>> for _ in range(500): complaints("no HTTP")
    >>> now[0] = 1.0; complaints("too slow"); lines
    ['no HTTP', 'no HTTP (499 times in 1 s); too slow']
    """

    def __init__(self, say: Callable[[str], None], *, clock: Callable[[], float] = time.monotonic) -> None:
        """Write lines by `say`, whose own failures, as of a full disk, are nobody's concern here."""
        super().__init__(logging.WARNING)
        self._say, self._clock = say, clock
        self._counts: collections.Counter[str] = collections.Counter()
        self._num_more = 0
        self._said_at, self._pause_s = -_LONGEST_S, _SHORTEST_S
        self.logger = logging.Logger("rallypoint.serving", logging.WARNING)
        """Takes complaints from libraries; known to nobody else, so that no other handler hears them too."""
        self.logger.addHandler(self)

    def __call__(self, what: str) -> None:
        """Complain."""
        if what in self._counts or len(self._counts) < _MOST_KINDS:
            self._counts[what] += 1
        else:
            self._num_more += 1
        self.write_due()

    def emit(self, record: logging.LogRecord) -> None:
        """Complain with what a library logs."""
        self(self.format(record))

    def write_due(self) -> None:
        """Write what has been complained about, if it is time; to be called now and then."""
        waited = self._clock() - self._said_at
        if waited < self._pause_s:
            return
        if not self._counts:
            self._pause_s = _SHORTEST_S
            return
        over = f" in {waited:.0f} s" if waited < 2 * _LONGEST_S else ""
        parts = [what if num == 1 else f"{what} ({num:,} times{over})" for what, num in self._counts.items()]
        if self._num_more:
            parts.append(f"and {self._num_more:,} of other kinds")
        with contextlib.suppress(Exception):
            self._say("; ".join(parts))
        self._pause_s = min(2 * self._pause_s, _LONGEST_S) if waited < 2 * self._pause_s else _SHORTEST_S
        self._said_at = self._clock()
        self._counts.clear()
        self._num_more = 0
