"""Ctrl-C, so that a run ends with what it has."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Iterator


@contextlib.contextmanager
def interruptible() -> Iterator[asyncio.Event]:
    """Yield an event that the first Ctrl-C (or SIGTERM) sets; the second one ends the program at once."""
    event, loop = asyncio.Event(), asyncio.get_running_loop()
    numbers = (signal.SIGINT, signal.SIGTERM)

    def stop() -> None:
        event.set()
        for number in numbers:
            loop.remove_signal_handler(number)

    try:
        for number in numbers:
            loop.add_signal_handler(number, stop)
    except (NotImplementedError, RuntimeError, ValueError):
        pass  # not in a main thread: whoever started the thread handles signals
    try:
        yield event
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
