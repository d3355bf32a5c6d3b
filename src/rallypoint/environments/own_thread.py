"""A thread for functions of the user's that may block or hang, for which nobody waits at the end of the process.

Must not know: what they do. asyncio's own threads would not do: they are few, a checkpoint is flushed on them, and the
end of the loop waits for each.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any


class OwnThread:
    """Calls functions one after another; a process does not wait at its end for one that hangs."""

    def __init__(self, name: str) -> None:
        self._name, self._is_running = name, False
        self._jobs: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()

    async def call(self, function: Callable[..., Any], *arguments: object) -> Any:
        """Return what a function returns; one that is async runs here."""
        if inspect.iscoroutinefunction(function):
            return await function(*arguments)
        found = await asyncio.wrap_future(self._put(lambda: function(*arguments)))
        return await found if inspect.isawaitable(found) else found

    def begin(self, function: Callable[[], Any] | None) -> None:
        """Have a function called some time, unless it is async and so would have to be awaited."""
        if function is not None and not inspect.iscoroutinefunction(function):
            self._put(function)

    def end(self) -> None:
        """Let the thread end after its last call."""
        self._jobs.put(None)

    def _put(self, job: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        self._jobs.put((future, job))
        if not self._is_running:
            self._is_running = True
            threading.Thread(target=self._work, name=f"episode {self._name}", daemon=True).start()
        return future

    def _work(self) -> None:
        while (asked := self._jobs.get()) is not None:
            future, job = asked
            try:
                result, error = job(), None
            except StopIteration as raised:  # which no coroutine may raise
                result, error = None, RuntimeError(f"StopIteration: {raised}")
            except BaseException as raised:  # noqa: BLE001 - see `call`
                result, error = None, raised
            if not future.set_running_or_notify_cancel():
                continue
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)
