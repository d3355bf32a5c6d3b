"""What follows a run from outside of the loop: it hears of each step, and may end the run, also from another thread."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping


class Observer:
    """Asks for nothing by itself; `rally.train` overrides `after_step`.

    `ask` may be called from any thread and at any time, also before the run has begun or after it has ended.
    """

    owns_process = True
    """Whether a second signal may end the process without unwinding, as the command's; in a program it raises."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ways: list[Callable[[], object]] = []
        self._num_asked = 0

    def after_step(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Take note of a step with all its metrics; return whether the run is to be saved and to end."""
        del step, metrics
        return False

    def ask(self) -> None:
        """Let the run save its state and end; a second time, end it at its next wait, without saving."""
        with self._lock:
            self._num_asked += 1
            if self._ways:
                self._ways[min(self._num_asked, 2) - 1]()

    @contextlib.contextmanager
    def ending(self, gently: Callable[[], None]) -> Iterator[None]:
        """Let `ask` reach the task and the event loop that this block is part of."""
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None, "a run is a task of its loop"
        with self._lock:
            self._ways = [lambda: loop.call_soon_threadsafe(gently), lambda: loop.call_soon_threadsafe(task.cancel)]
            if self._num_asked:
                gently()
        try:
            yield
        finally:
            with self._lock:
                self._ways = []
