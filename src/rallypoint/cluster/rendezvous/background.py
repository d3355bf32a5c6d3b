"""Threads of a rendezvous, which look at something again and again until Python ends."""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable

_LAST_MOMENT_S = 5.0
_RUNNING: weakref.WeakKeyDictionary[threading.Thread, threading.Event] = weakref.WeakKeyDictionary()


def start(work: Callable[[], None], closing: threading.Event, name: str) -> None:
    """Do some work in a thread that ends soon after `closing` is set, as it is when Python ends.

    Python then waits for what is under way, as a thread that comes out of torch's store while Python ends makes it
    abort; but not for long, because a store that was stopped never answers.
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
