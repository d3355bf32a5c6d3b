"""One thread in which Ray is asked whatever it may keep its callers waiting for.

Ray's client waits without a deadline, and deaf to signals, for two processes: the raylet of this machine, which keeps
the store that data passes, and the GCS of the cluster, which knows places, names and ends. If one of them is stopped or
gone, the thread that asked does not come back. So it is never one that the driver needs: that one waits for this one,
with a voice and a limit, and raises.

Consumes: questions, one after another. Waits for: Ray. Unblocked by: Ray's answer; those who ask wait no longer than
the limit, and then nothing is asked any more.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from rallypoint.cluster.ray_daemons import Fault
from rallypoint.errors import RayLostError

AnswerT = TypeVar("AnswerT")

_LOOK_S = 1.0
_VOICE_EVERY_S = 10.0
_TIMES_IF_WELL = 10
"""A store that is full, or a busy machine, may take long with data, and all is well."""


_ABANDONED = threading.Event()


def is_held_by_ray() -> bool:
    """Whether this process is tied for good to a Ray that is not well: an orderly end would wait there, or crash."""
    return _ABANDONED.is_set()


class Patience:
    """How long something has been waited for; time in which this process itself stood still does not count."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Begin now."""
        self._clock, self._looked_at = clock, clock()
        self.waited_s = 0.0

    def look(self) -> float:
        """Return the seconds so far; call it at least every three times `_LOOK_S`."""
        now = self._clock()
        self.waited_s += min(now - self._looked_at, 3 * _LOOK_S)
        self._looked_at = now
        return self.waited_s


class RayThread:
    """The thread, and the ways to ask."""

    def __init__(
        self,
        *,
        limit_s: float,
        fault: Callable[[], Fault | None] = lambda: None,
        note_busy: Callable[[int], None] | None = None,
        say: Callable[[str], None] = print,
        clock: Callable[[], float] = time.monotonic,
        look_s: float = _LOOK_S,
    ) -> None:
        """Begin with nothing to ask; the thread starts with the first question.

        Args:
            limit_s: how long an answer may take where something is wrong; ten times as long where nothing is seen.
            fault: looks at Ray's processes; None when nothing is wrong, as far as can be seen.
            note_busy: called with a number when a question begins, and with 0 when it is over.
            say: called, from any thread, with one line about what is waited for.
            clock: seconds that never go back.
            look_s: how often those who wait look at the clock and at Ray's processes.
        """
        self._limit_s, self._ailment, self._say = limit_s, fault, say
        self._note_busy, self._clock, self._look_s = note_busy or _note_nothing, clock, look_s
        self._questions: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stopped: tuple[str, Patience] | None = None
        self.lost: RayLostError | None = None
        """Why nothing is asked any more."""

    def ask(self, what: str, question: Callable[[], AnswerT]) -> AnswerT:
        """Have Ray asked, and wait for the answer.

        Args:
            what: what is waited for, in words, as in "Ray to take the arguments of actor.update".
            question: runs in the lane's thread, and may raise.

        Raises:
            RayLostError: a process of Ray's is gone, or there was no answer within the limit.
        """
        if self.lost is not None:
            raise RayLostError(str(self.lost))
        answer = self.put(question)
        patience, voice_s = Patience(self._clock), _VOICE_EVERY_S
        while not _is_over(answer, self._look_s):
            if self.lost is not None:  # somebody else has found that out
                raise RayLostError(str(self.lost))
            waited_s, found = patience.look(), self._ailment()
            limit_s = self._limit_s if found is not None else _TIMES_IF_WELL * self._limit_s
            if waited_s >= limit_s or (found is not None and found.is_fatal):
                why = found or "Ray gives no sign of life"
                raise self.lose(f"{why}; this program has waited {waited_s:.0f} s for {what}")
            if waited_s >= voice_s:
                voice_s += _VOICE_EVERY_S
                self._say(f"waiting for {what} for {waited_s:.0f} s of {limit_s:.0f}{f': {found}' if found else ''}")
        error = answer.exception()
        if error is not None and (found := self._ailment()) is not None and found.ends_calls:
            raise self.lose(f"{found}; this program waited for {what}") from error
        return answer.result()

    def put(self, question: Callable[[], Any]) -> Future[Any]:
        """Have Ray asked when its turn comes; nobody waits for it."""
        answer: Future[Any] = Future()
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="ray", daemon=True)
                self._thread.start()
        self._questions.put((question, answer))
        return answer

    def abandon(self) -> None:
        """Leave Ray as it is, and the thread where it is."""
        self.lose("Ray was left as it was")
        _ABANDONED.set()

    def lose(self, why: str) -> RayLostError:
        """Have nothing asked any more; the first reason counts, and is returned."""
        self.lost = self.lost or RayLostError(why)
        return RayLostError(str(self.lost))

    def look(self) -> RayLostError | None:
        """Return why nothing can go on, if that is so; to be called in beats while workers work."""
        found = self._ailment()
        if found is None:
            self._stopped = None
            return self.lost
        if self._stopped is None or self._stopped[0] != found.what:
            self._stopped = found.what, Patience(self._clock)
            if not found.ends_calls:
                self._say(f"{found}; steps go on, but nothing new can be placed, and Ray does not notice what dies")
        waited_s = self._stopped[1].look()
        if found.is_fatal or (found.ends_calls and waited_s >= self._limit_s):
            self.lose(f"{found}{'' if found.is_fatal else f', for {waited_s:.0f} s'}")
        return self.lost

    def _run(self) -> None:
        number = 0
        while True:
            question, answer = self._questions.get()
            number += 1
            self._note_busy(number)
            try:
                answer.set_result(question())
            except BaseException as error:  # noqa: BLE001 - whatever it is belongs to who asked
                answer.set_exception(error)
            finally:
                self._note_busy(0)
                del question, answer  # arguments may be large


def _note_nothing(number: int) -> None:
    del number


def _is_over(answer: Future[Any], look_s: float) -> bool:
    """Wait a moment for an answer; an interpreter that waits like this hears signals."""
    with contextlib.suppress(TimeoutError):
        answer.exception(look_s)
    return answer.done()
