"""One thread that makes all calls to Ray that may block.

Ray's client waits without a deadline, and without handling signals, for two daemons: the raylet of this machine, which
keeps the object store, and the GCS of the cluster, which knows places, names and ends. If one of them is stopped or
gone, the calling thread does not return. So the driver's own threads never call Ray for that. They wait for this
thread, report what they wait for, and raise at a limit.

Consumes: questions, one after another. Waits for: Ray. Unblocked by: Ray's answer. Those who ask wait no longer than
the limit, and then nothing is asked any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from rallypoint.cluster.ray_daemons import Fault
from rallypoint.cluster.waiting import Wait
from rallypoint.errors import RayLostError

AnswerT = TypeVar("AnswerT")

_LOOK_S = 1.0
_HURRIED_LIMIT_S = 3.0
"""Seconds to wait for a Ray with a fault after the user has asked to end the run."""
_TIMES_IF_WELL = 10
"""How many limits Ray may take while no fault is seen: a full store or a busy machine is slow with data."""

_ABANDONED = threading.Event()


def is_held_by_ray() -> bool:
    """Whether this process is tied for good to a Ray that was lost: an orderly end would wait there, or crash."""
    return _ABANDONED.is_set()


class Ask(Protocol):
    """See `RayThread.ask`."""

    def __call__(self, what: str, question: Callable[[], AnswerT], *, needs_gcs: bool = True) -> AnswerT:
        """Run a call to Ray in the thread, and wait for its answer."""
        ...


class RayThread:
    """The thread, and the ways to ask."""

    def __init__(
        self,
        *,
        limit_s: float,
        fault: Callable[[], Fault | None] = lambda: None,
        note_busy: Callable[[int], None] = lambda _: None,
        say: Callable[[str], None] = print,
        clock: Callable[[], float] = time.monotonic,
        look_s: float = _LOOK_S,
    ) -> None:
        """Begin with nothing to ask; the thread starts with the first question.

        Args:
            limit_s: seconds that an answer may take while Ray has a fault; ten times as long while none is seen.
            fault: looks at Ray's daemons; None if nothing is wrong, as far as can be seen.
            note_busy: called with a number when a question begins, and with 0 when it is over.
            say: called, from any thread, with one line about what is waited for.
            clock: seconds that never go back.
            look_s: seconds between two looks at the clock and at Ray's daemons.
        """
        self._limit_s, self._fault, self._say = limit_s, fault, say
        self._note_busy, self._clock, self._look_s = note_busy, clock, look_s
        self._questions: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._faulty: Wait | None = None
        self._is_hurried = False
        self.lost: RayLostError | None = None
        """Why nothing is asked any more."""

    def ask(self, what: str, question: Callable[[], AnswerT], *, needs_gcs: bool = True) -> AnswerT:
        """Run a call to Ray in the thread, and wait for its answer.

        Args:
            what: what is waited for, in words, as in "Ray to take the arguments of actor.update".
            question: runs in this thread, and may raise.
            needs_gcs: whether only the GCS can answer; data between processes that run needs the raylet alone.

        Raises:
            RayLostError: a daemon of Ray's that is needed is gone, or there was no answer within the limit.
        """
        self.check(what, needs_gcs=needs_gcs)
        answer, wait, has_told_user = self.put(question), self._wait(what), False
        while not _is_over(answer, self._look_s):
            if self.lost is not None:  # another thread has found that out
                raise RayLostError(str(self.lost))
            wait.look()
            found, is_hurried = self._fault(), self._is_hurried or _is_cancelled()
            wait.limit_s = self._limit(is_hurried=is_hurried) if found else _TIMES_IF_WELL * self._limit_s
            if wait.is_over or (found is not None and found.is_gone and (found.is_raylet or needs_gcs)):
                why = found or "Ray gives no sign of life"
                raise self.lose(f"{why}; this program has waited {wait.waited_s:.0f} s for {what}")
            if is_hurried and not has_told_user:
                has_told_user = True
                self._say(f"interrupted: {wait.line(str(found or ''))}")
            wait.say_if_due(str(found or ""))
        error = answer.exception()
        if error is not None and (found := self._fault()) is not None and (found.is_raylet or needs_gcs):
            why = f"{found}; this program waited for {what}"
            raise (self.lose(why) if found.is_raylet else RayLostError(why)) from error
        return answer.result()

    def check(self, what: str, *, needs_gcs: bool = True) -> None:
        """Raise if there is no point in asking.

        Raises:
            RayLostError: Ray is lost, the raylet is gone, or the GCS is and is needed.
        """
        if self.lost is not None:
            raise RayLostError(str(self.lost))
        if (found := self._fault()) is not None and found.is_gone and (found.is_raylet or needs_gcs):
            why = f"{found}; this program needs it for {what}"
            raise self.lose(why) if found.is_raylet else RayLostError(why)

    def put(self, question: Callable[[], Any]) -> Future[Any]:
        """Queue a call to Ray; nobody waits for its answer."""
        answer: Future[Any] = Future()
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="ray", daemon=True)
                self._thread.start()
        self._questions.put((question, answer))
        return answer

    def hurry(self) -> None:
        """Wait only seconds for a Ray with a fault from now on; safe in a signal handler."""
        self._is_hurried = True

    def close(self) -> None:
        """Ask nothing more, and end the thread after what was asked."""
        self.lose("this program has left Ray")
        self._questions.put(None)
        if self._thread is not None:
            self._thread.join()

    def abandon(self) -> None:
        """Leave Ray as it is, and the thread where it is."""
        self.lose("Ray was left as it was")
        _ABANDONED.set()

    def lose(self, why: str) -> RayLostError:
        """Make no more calls to Ray; return the reason, which is the first one given."""
        self.lost = self.lost or RayLostError(why)
        return RayLostError(str(self.lost))

    def look(self) -> RayLostError | None:
        """Return why nothing can go on, if that is so; call it once per beat while workers work."""
        found = self._fault()
        if found is None:
            self._faulty = None
            return self.lost
        if self._faulty is None or self._faulty.what != found.what:
            self._faulty = self._wait(found.what)
            if not found.is_raylet:
                self._say(f"{found}; steps go on, but nothing new can be placed, and Ray does not notice what dies")
        waited_s = self._faulty.look()
        if found.is_raylet and (found.is_gone or waited_s >= self._limit(is_hurried=self._is_hurried)):
            self.lose(f"{found}{'' if found.is_gone else f', for {waited_s:.0f} s'}")
        return self.lost

    def _wait(self, what: str) -> Wait:
        return Wait(what, self._limit_s, self._say, longest_gap_s=3 * _LOOK_S, clock=self._clock)

    def _limit(self, *, is_hurried: bool) -> float:
        return min(self._limit_s, _HURRIED_LIMIT_S) if is_hurried else self._limit_s

    def _run(self) -> None:
        number = 0
        while (asked := self._questions.get()) is not None:
            question, answer = asked
            number += 1
            self._note_busy(number)
            try:
                answer.set_result(question())
            except BaseException as error:  # noqa: BLE001 - every error goes to the caller
                answer.set_exception(error)
            finally:
                self._note_busy(0)
                del asked, question, answer  # arguments may be large


def _is_over(answer: Future[Any], look_s: float) -> bool:
    """Wait a moment for an answer; an interpreter that waits like this hears signals."""
    with contextlib.suppress(TimeoutError):
        answer.exception(look_s)
    return answer.done()


def _is_cancelled() -> bool:
    """Whether the asking task is being cancelled, as asyncio does at the first Ctrl-C; it cannot notice itself."""
    with contextlib.suppress(RuntimeError):  # no event loop runs in this thread
        task = asyncio.current_task()
        return task is not None and task.cancelling() > 0
    return False
