"""A thread for functions of the user's that may block or hang, for which nobody waits at the end of the process.

Must not know: what they do. asyncio's own threads would not do: they are few, a checkpoint is flushed on them, and the
end of the loop waits for each.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

from rallypoint.environments.deadline import DaemonThreads


class OwnThread:
    """Calls functions one after another; a process does not wait at its end for one that hangs."""

    def __init__(self, name: str) -> None:
        self._threads = DaemonThreads(1, f"episode {name}")

    async def call(self, function: Callable[..., Any], *arguments: object) -> Any:
        """Return what a function returns; one that is async runs here."""
        if inspect.iscoroutinefunction(function):
            return await function(*arguments)
        found = await asyncio.wrap_future(self._threads.submit(lambda: _called(function, *arguments)))
        return await found if inspect.isawaitable(found) else found

    def begin(self, function: Callable[[], Any] | None) -> None:
        """Have a function called some time, unless it is async and so would have to be awaited."""
        if function is not None and not inspect.iscoroutinefunction(function):
            self._threads.submit(function)

    def end(self) -> None:
        """Let the thread end after its last call."""
        self._threads.leave()


def _called(function: Callable[..., Any], *arguments: object) -> Any:
    try:
        return function(*arguments)
    except StopIteration as error:  # which no coroutine may raise
        raise RuntimeError(f"StopIteration: {error}") from error
