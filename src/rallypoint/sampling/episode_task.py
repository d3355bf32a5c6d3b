"""The task of the event loop in which an episode runs: its end, and where it waits.

Owns: that an episode which is given up holds up nothing, even if it swallows its cancellation. Must not know: clients,
what an episode returns.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import traceback
import types

from rallypoint.sampling.episode_end import EpisodeFailed
from rallypoint.types import Trajectory

_HERE = os.path.dirname(__file__)
_PASSES = 10
"""Passes of the event loop in which an episode that is cancelled ends."""
_LEFT_BEHIND: set[asyncio.Task[Trajectory | EpisodeFailed]] = set()
"""Episodes that were cancelled and have not ended; an event loop alone does not keep them."""


class Ending(asyncio.Future[None]):
    """Is there when an episode has ended or is to be ended; whoever stops waiting for it cancels the episode.

    That is at once, as by `asyncio.gather`, so that it asks for nothing after all that was asked for was given up.
    """

    def __init__(self, running: asyncio.Task[Trajectory | EpisodeFailed], is_over: asyncio.Future[EpisodeFailed]):
        super().__init__()
        self._running = running
        for each in (running, is_over):
            each.add_done_callback(lambda _: self.done() or self.set_result(None))

    def cancel(self, msg: object = None) -> bool:
        """Cancel the episode, too."""
        self._running.cancel()
        return super().cancel(msg)


def leave(running: asyncio.Task[Trajectory | EpisodeFailed]) -> None:
    """Cancel an episode that is not over, and wait for it no longer."""
    if not running.done():
        _LEFT_BEHIND.add(running)
        running.add_done_callback(_LEFT_BEHIND.discard)
        running.cancel()


async def leave_for_good() -> None:
    """Let the end of the event loop not wait for episodes that swallowed their cancellation."""
    for _ in range(_PASSES):
        await asyncio.sleep(0)
    for task in [task for task in _LEFT_BEHIND if task.get_loop() is asyncio.get_running_loop()]:
        asyncio._unregister_task(task)  # or asyncio.run would wait for it


def where(waiting: object) -> str:
    """Return the traceback of where a coroutine waits: its own frames, and those of coroutines that it awaits."""
    frames: list[tuple[types.FrameType, int]] = []
    while inspect.iscoroutine(waiting) and waiting.cr_frame is not None:
        if os.path.dirname(waiting.cr_frame.f_code.co_filename) != _HERE:
            frames.append((waiting.cr_frame, waiting.cr_frame.f_lineno))
        waiting = waiting.cr_await
    lines = "".join(traceback.StackSummary.extract(frames).format()).rstrip()
    return f"Traceback (most recent call last):\n{lines}" if lines else ""
