"""The task of the event loop in which an episode runs: its deadline, its end, and where it waits.

Owns: when an episode has taken too long, that one which is given up holds up nothing, even if it swallows its
cancellation, and that one which blocks the loop is told so. The time in which a response is sampled does not count, as
it depends on how much else there is to sample; that of tools does. Must not know: clients, what an episode returns.

A thread has the loop set an event now and then; if that takes long, it looks at what the loop's own thread is doing.
Tokens and turns cost nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import inspect
import math
import os
import sysconfig
import threading
import time
import traceback
import types
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, TypeVar

from rallypoint.environments.failures import EpisodeFailed
from rallypoint.types import Trajectory

ResultT = TypeVar("ResultT")

_HERE = os.path.dirname(__file__)
_OURS = str(Path(__file__).parents[1])
_CALLERS = tuple(os.path.join(_OURS, folder, "") for folder in ("sampling", "environments"))
"""Our folders whose frames stand between the loop and an episode."""
_LIBRARIES = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_WHAT_TO_DO = (
    "all other episodes, and the requests for their next turns, waited for it. Await what takes time: "
    "`await asyncio.to_thread(function, ...)` for a call that blocks, an async client for a service, a "
    "ProcessPoolExecutor for computations; or write the episode as a class with `def step`, which has a thread, or as "
    "a plain `def`, which has a process"
)
_PASSES = 10
"""Passes of the event loop in which an episode that is cancelled ends."""
_LONGEST_S = 1e6
"""Seconds after which a timer looks again; event loops have none of any length."""
_LEFT_BEHIND: set[asyncio.Task[Trajectory | EpisodeFailed]] = set()
"""Episodes that were cancelled and have not ended; an event loop alone does not keep them."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeLimits:
    """How long an episode may take for itself."""

    turn_s: float = math.inf
    """Seconds between two responses."""
    episode_s: float = math.inf
    """Seconds of all turns together."""
    hold: Callable[[], bool] = lambda: True
    """Whether they hold now; not in a run that repeats another, in which they did what they do."""


class OwnTime:
    """Counts the seconds of one episode, in a running event loop."""

    def __init__(self, limits: EpisodeLimits) -> None:
        """Begin to count."""
        self._loop = asyncio.get_running_loop()
        self.is_over: asyncio.Future[EpisodeFailed] = self._loop.create_future()
        """Why the episode is to be ended."""
        self._limits, self._num_paused = limits, 0
        self._total_s, self._since, self._is_counting = 0.0, self._loop.time(), True
        self._timer: asyncio.TimerHandle | None = None
        self._look()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count the time of the block; several may overlap."""
        self._num_paused += 1
        self._count()
        try:
            yield
        finally:
            self._num_paused -= 1
            if not self._num_paused and not self.is_over.done():
                self._since, self._is_counting = self._loop.time(), True
                if self._timer is None:
                    self._look()

    def _count(self) -> None:
        """Count up to now, and no further."""
        if self._is_counting:
            self._total_s, self._is_counting = self._total_s + self._loop.time() - self._since, False

    def stop(self) -> float:
        """Count no further; return the seconds so far."""
        self._count()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        return self._total_s

    def end(self, why: EpisodeFailed) -> None:
        """Have the episode ended."""
        if not self.is_over.done():
            self.is_over.set_result(why)

    def fail(self, error: BaseException) -> None:
        """Have the one who waits for the episode raise what is not the episode's own fault."""
        if self.is_over.done():
            return
        if isinstance(error, asyncio.CancelledError):
            self.is_over.cancel()
        else:
            self.is_over.set_exception(error)

    def _look(self) -> None:
        """End the episode if there were too many, else look again when there may be.

        While none are counted the timer stays, for the next turn: it can only come too early.
        """
        self._timer = None
        if not self._is_counting:
            return
        turn_s = self._loop.time() - self._since
        total_s = self._total_s + turn_s
        left_s = min(self._limits.turn_s - turn_s, self._limits.episode_s - total_s)
        if left_s <= 0 and self._limits.hold():
            if total_s >= self._limits.episode_s:
                said = f"took more than rollout.episode_timeout_s={self._limits.episode_s:g} s for itself"
            else:
                said = f"took more than rollout.turn_timeout_s={self._limits.turn_s:g} s without asking for a response"
            self.end(EpisodeFailed("timeout", f"the episode {said}"))
        else:
            self._timer = self._loop.call_later(min(left_s, _LONGEST_S) if left_s > 0 else 1.0, self._look)


class Ending(asyncio.Future[ResultT]):
    """What becomes of an episode, once that has ended or is to be ended; to cancel it is to cancel the episode.

    That is at once, as by `asyncio.gather`, so that it asks for nothing after all that was asked for was given up. A
    future costs less than a task that waits, and there is one for each rollout.
    """

    def __init__(
        self,
        running: asyncio.Task[Trajectory | EpisodeFailed],
        is_over: asyncio.Future[EpisodeFailed],
        close: Callable[[], float],
        make: Callable[[float], ResultT],
    ) -> None:
        """Wait.

        Args:
            running: the episode.
            is_over: see `OwnTime`.
            close: called once, at the end; cancels the episode if that goes on, and returns its seconds.
            make: given them, returns the result, unless there is an error to be raised.
        """
        super().__init__()
        self._awaited, self._close, self._make = (running, is_over), close, make
        for each in self._awaited:
            each.add_done_callback(self._end)

    def _let_go(self) -> float:
        own_s = self._close()
        for each in self._awaited:  # or `is_over`, which the episode refers to, would refer to the episode
            each.remove_done_callback(self._end)
        return own_s

    def _end(self, _: asyncio.Future[Any]) -> None:
        if self.done():
            return
        own_s, (running, is_over) = self._let_go(), self._awaited
        decides = is_over if is_over.done() else running
        if is_over.cancelled():
            super().cancel()
        elif not decides.cancelled() and (error := decides.exception()) is not None:
            self.set_exception(error)
        else:
            self.set_result(self._make(own_s))

    def cancel(self, msg: object = None) -> bool:
        """Cancel the episode, too."""
        if not self.done():
            self._let_go()
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


class BlockingWatch:
    """Watches the event loop of its thread until that is closed."""

    def __init__(
        self,
        say: Callable[[str], None],
        frames: Callable[[], Mapping[int, FrameType]],
        *,
        patience_s: float = 1.0,
        settle_s: float = 30.0,
    ) -> None:
        """Begin to watch the running loop.

        Args:
            say: given a line for the user, from another thread.
            frames: returns the innermost frame of each thread, `sys._current_frames`.
            patience_s: seconds that the loop may be busy without a word, and seconds between two looks.
            settle_s: seconds to wait for the end of what blocks before it is said, so that its duration can be.
        """
        self._loop, self._thread_id = asyncio.get_running_loop(), threading.get_ident()
        self._say, self._frames, self._patience_s, self._settle_s = say, frames, patience_s, settle_s
        self._told: set[CodeType] = set()
        threading.Thread(target=self._work, name="blocking", daemon=True).start()

    def _work(self) -> None:
        while True:
            time.sleep(self._patience_s)
            beat, began = threading.Event(), time.monotonic()
            try:
                self._loop.call_soon_threadsafe(beat.set)
            except RuntimeError:  # it is closed
                return
            while not beat.wait(self._patience_s) and not self._loop.is_closed():
                self._look(beat, began)

    def _look(self, beat: threading.Event, began: float) -> None:
        frame = self._frames().get(self._thread_id)
        if (found := blocking_frame(frame)) is None or found.f_code in self._told:
            return
        code, line = found.f_code, found.f_lineno
        self._told.add(code)
        del frame, found  # or what it holds would live as long as this waits
        has_ended = beat.wait(self._settle_s)
        seconds = f"{time.monotonic() - began:.1f} s" + ("" if has_ended else " so far")
        self._say(f"{code.co_filename}:{line}, {code.co_name} blocked the event loop for {seconds}: {_WHAT_TO_DO}")


def blocking_frame(frame: FrameType | None) -> FrameType | None:
    """Return the frame of an episode's own code that does not return; None if something else is being done.

    Args:
        frame: the innermost of the loop's thread.
    """
    while frame is not None and _is_of_a_library(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None or frame.f_code.co_filename.startswith(_OURS):
        return None
    found, is_of_loop = frame, False
    while (frame := frame.f_back) is not None and not is_of_loop:
        file = frame.f_code.co_filename
        if file.startswith(_OURS) and not file.startswith(_CALLERS):
            return None
        is_of_loop = file == asyncio.events.__file__
    return found if is_of_loop else None


def _is_of_a_library(file: str) -> bool:
    return file.startswith((*_LIBRARIES, "<")) and not file.startswith(_OURS)


async def together(works: Iterable[Awaitable[ResultT]]) -> list[ResultT]:
    """Return what all give; an error of one gives the others up."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
