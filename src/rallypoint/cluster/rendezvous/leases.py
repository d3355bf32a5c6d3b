"""Leases: who is alive, judged by counters that have to move, and the threads that move them.

A lease is measured in looks by the one observer that keeps the room, not in seconds of a clock. So clocks of two
machines are never compared, and an observer that was itself stopped for a minute takes one look when it wakes and
blames nobody.

>>> leases = Leases()
>>> [leases.look({"a": 7, "b": beat}) for beat in range(6)]
[[], [], [], [], ['a'], ['a']]
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable, Mapping

LOOKS_PER_LEASE = 4
"""How often per lease its holder renews it, and the observer looks."""

_LAST_MOMENT_S = 5.0
_RUNNING: weakref.WeakKeyDictionary[threading.Thread, threading.Event] = weakref.WeakKeyDictionary()


class Leases:
    """Remembers how long each counter has stood still."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[int, int]] = {}

    def look(self, counters: Mapping[str, int]) -> list[str]:
        """Take a look, `LOOKS_PER_LEASE` times per lease; return whose counter stood still for a whole lease.

        Args:
            counters: by incarnation, how often it has renewed its lease; incarnations that are missing are forgotten.
        """
        seen: dict[str, tuple[int, int]] = {}
        for holder, counter in counters.items():
            before, num_still = self._seen.get(holder, (counter, -1))
            seen[holder] = (counter, num_still + 1 if counter == before else 0)
        self._seen = seen
        return [holder for holder, (_, num_still) in seen.items() if num_still >= LOOKS_PER_LEASE]


def start_thread(work: Callable[[], None], closing: threading.Event, name: str) -> None:
    """Do some work in a thread that ends soon after `closing` is set, which happens at the latest when Python ends.

    Python then waits for the thread, because one that returns from torch's store during shutdown makes it abort; but
    not for long, because a store that was stopped never answers.
    """
    thread = threading.Thread(target=work, name=name, daemon=True)
    _RUNNING[thread] = closing
    thread.start()


@atexit.register
def _end() -> None:
    running = dict(_RUNNING)
    for closing in running.values():
        closing.set()
    until = time.monotonic() + _LAST_MOMENT_S
    for thread in running:
        thread.join(max(0.0, until - time.monotonic()))
