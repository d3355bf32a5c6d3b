"""Work that is waited for until a deadline and no longer, in a thread that is left behind then.

Must not know: what the work is. A thread cannot be ended: what hangs goes on, and its result is thrown away.
"""

from __future__ import annotations

import itertools
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future, wait
from queue import SimpleQueue
from typing import TypeVar

from rallypoint.environments.outcome import DeadlineError, is_ours

ResultT = TypeVar("ResultT")


class BoundedThread:
    """A thread that does one piece of work after another; nobody waits for it at the end of the program."""

    def __init__(self) -> None:
        """Start it with its first work."""
        self._threads = DaemonThreads(1, "bounded")

    def do(self, work: Callable[[], ResultT], timeout_s: float) -> Future[ResultT]:
        """Return what work came to, or raised.

        Raises:
            DeadlineError: it took too long; the thread takes no more.
        """
        done = self._threads.submit(work)
        wait([done], min(timeout_s, threading.TIMEOUT_MAX))
        if not done.done():
            where = self._threads.where()
            self.leave()
            raise DeadlineError(timeout_s, where)
        return done

    def leave(self) -> None:
        """Let it end with the work under way."""
        self._threads.leave()


class DaemonThreads:
    """Threads that do pieces of work side by side; nobody waits for them at the end of the program."""

    def __init__(self, num: int, name: str) -> None:
        """Start none yet; each piece of work starts one, up to a number."""
        self._num, self._name = num, name
        self._threads: list[threading.Thread] = []
        self._asked: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._is_closed = threading.Event()

    def submit(self, work: Callable[[], ResultT]) -> Future[ResultT]:
        """Return what work will come to, or raise, once a thread is free; it is cancelled if they are closed before."""
        done: Future[ResultT] = Future()
        self._asked.put(lambda: self._settle(done, work))
        if len(self._threads) < self._num:
            name = f"{self._name}_{len(self._threads)}"
            self._threads.append(threading.Thread(target=self._serve, name=name, daemon=True))
            self._threads[-1].start()
        return done

    def pause(self, seconds: float) -> bool:
        """Sleep inside of some work; return whether there is reason to go on: False once they are closed."""
        return not self._is_closed.wait(seconds)

    def where(self) -> str:
        """Return the traceback of the user's frames in the work under way in the first thread."""
        frames = traceback.extract_stack(sys._current_frames().get(self._threads[0].ident or 0))
        users = itertools.dropwhile(lambda one: is_ours(one.filename) or one.filename == threading.__file__, frames)
        lines = "".join(traceback.format_list(list(users))).rstrip()
        return f"Traceback (most recent call last):\n{lines}" if lines else ""

    def close(self) -> None:
        """Cancel the work that waits, and let the threads end with what is under way."""
        self._is_closed.set()
        self.leave()

    def leave(self) -> None:
        """Let the threads end with all the work that they were given."""
        for _ in self._threads:
            self._asked.put(None)

    def _serve(self) -> None:
        while (work := self._asked.get()) is not None:
            work()

    def _settle(self, done: Future[ResultT], work: Callable[[], ResultT]) -> None:
        if self._is_closed.is_set():
            done.cancel()
        if done.set_running_or_notify_cancel():
            try:
                done.set_result(work())
            except BaseException as error:  # noqa: BLE001 - raised again where the result is awaited
                done.set_exception(error)


def within(timeout_s: float, work: Callable[[], ResultT]) -> ResultT:
    """Return what work comes to, done in a thread of its own.

    >>> within(60.0, lambda: 6 * 7)
    42

    Raises:
        DeadlineError: it took too long.
    """
    thread = BoundedThread()
    try:
        return thread.do(work, timeout_s).result()
    finally:
        thread.leave()
