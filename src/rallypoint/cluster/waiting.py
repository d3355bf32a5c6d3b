"""Waits that report what they wait for: "waiting for X for 20 s of 60; missing Y".

Owns the time that has passed, the limit, and the words. Never blocks: its user does, and looks here in between.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable


class Wait:
    """One wait, from now on.

    >>> times = iter([0, 4, 11, 30])
    >>> wait = Wait("the node", 30, print, every_s=10, clock=lambda: next(times))
    >>> wait.look(), wait.is_over
    (4.0, False)
    >>> wait.say_if_due("missing rank 1")
    >>> wait.look(), wait.say_if_due("missing rank 1")
    waiting for the node for 11 s of 30; missing rank 1
    (11.0, None)
    >>> wait.look(), wait.is_over
    (30.0, True)
    """

    def __init__(
        self,
        what: str,
        limit_s: float,
        say: Callable[[str], None],
        *,
        every_s: float = 10.0,
        longest_gap_s: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin to wait.

        Args:
            what: what is waited for, as in "Ray to list its nodes".
            limit_s: seconds after which the wait is over; may be changed.
            say: called with a line.
            every_s: seconds between two lines.
            longest_gap_s: most seconds that count between two looks; in a longer gap this process was not running.
            clock: seconds that never go back.
        """
        self.what, self.limit_s = what, limit_s
        self._say, self._every_s, self._longest_gap_s, self._clock = say, every_s, longest_gap_s, clock
        self._looked_at, self._next_s = clock(), every_s
        self.waited_s = 0.0
        """Seconds up to the last look."""

    def look(self) -> float:
        """Look at the clock; return the seconds waited so far."""
        now = self._clock()
        self.waited_s += min(now - self._looked_at, self._longest_gap_s)
        self._looked_at = now
        return self.waited_s

    @property
    def is_over(self) -> bool:
        """Whether the limit is reached."""
        return self.waited_s >= self.limit_s

    @property
    def is_due(self) -> bool:
        """Whether the next line is to be said."""
        return self.waited_s >= self._next_s

    @property
    def has_spoken(self) -> bool:
        """Whether a line has been said."""
        return self._next_s > self._every_s

    @property
    def pause_s(self) -> float:
        """Seconds until the next line or the limit, whichever comes first."""
        return max(0.0, min(self._next_s, self.limit_s) - self.waited_s)

    def line(self, detail: str = "") -> str:
        """Return the line; `detail` is what is missing or known."""
        more = f"; {detail}" if detail else ""
        return f"waiting for {self.what} for {self.waited_s:.0f} s of {self.limit_s:g}{more}"

    def say_if_due(self, detail: str = "") -> None:
        """Say the line if it is due."""
        if self.is_due:
            self._next_s = self.waited_s + self._every_s
            self._say(self.line(detail))
