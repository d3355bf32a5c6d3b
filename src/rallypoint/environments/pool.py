"""A reward function, or an agent, at work, in processes that can be ended.

Owns: how many processes there are, and which call goes to which. Must not know: batches, tensors. It needs the standard
library only, so that a config can be checked with it before torch is there.

See docs/decisions/0023-rewards-in-processes.md.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Generic

from rallypoint.environments.child import Child
from rallypoint.environments.futures import dealt
from rallypoint.environments.reward import Wants
from rallypoint.environments.worker import CallT, Effort, OutcomeT, WorkerTask
from rallypoint.errors import RewardError

MAX_PROCESSES, MAX_WAITING = 16, 128
"""More are started only by `reward.num_processes`: of a function that computes, and of one that mostly waits."""
_LEAST_S = 0.02
"""Mean seconds of calls for which more processes are worth their start."""
_STARTS_S = 5.0
"""Seconds of a core that the processes which start at once may take; each has a deadline, and calls wait for it."""


def units(calls: Sequence[CallT], wants: Wants) -> list[Sequence[CallT]]:
    """Cut calls into those that the function is given at once."""
    if wants.scope == "response":
        return [(call,) for call in calls]
    if wants.scope == "batch":
        return [calls]
    return [tuple(group) for _, group in itertools.groupby(calls, key=lambda call: call.group)]


@dataclasses.dataclass(slots=True)
class Width:
    """How many processes may work at once: `least`, and more for a function that mostly waits.

    After as many calls as there may be processes, those calls say how to go on. If they took 20 ms on average and
    computed for less than a quarter of it, twice as many may work, as long as all together compute no more than `least`
    processes could. If they computed for more than half of it, only `least` may.

    >>> width = Width(least=2, most=128)
    >>> for _ in range(2 + 4):
    ...     width.note(Effort(took_s=0.2, computed_s=0.001))
    >>> width.now
    8
    """

    least: int
    most: int
    num_bytes: float = math.inf
    """Memory that all processes together may have, by that of the largest."""
    now: int = dataclasses.field(init=False)
    _efforts: list[Effort] = dataclasses.field(init=False, default_factory=list[Effort])

    def __post_init__(self) -> None:
        self.now = self.least

    def note(self, effort: Effort) -> None:
        """Count a call that was answered."""
        self._efforts.append(effort)
        if len(self._efforts) < self.now:
            return
        efforts, self._efforts = self._efforts, []
        took_s, computed_s = sum(one.took_s for one in efforts), sum(one.computed_s for one in efforts)
        if computed_s > took_s / 2:
            self.now = self.least
        elif took_s >= _LEAST_S * len(efforts) and computed_s < took_s / 4:
            useful = self.least * took_s / max(computed_s, 1e-9)
            bearable = self.num_bytes / max(1, *(one.num_bytes for one in efforts))
            self.now = max(self.now, int(min(2 * self.now, self.most, useful, bearable)))


def _automatic() -> Width:
    from rallypoint.cluster.capacity import memory_bytes, num_cores  # here, because a config is checked without it

    least = min(num_cores(), MAX_PROCESSES)
    return Width(least, max(least, MAX_WAITING), memory_bytes() / 8)


class Pool(Generic[CallT, OutcomeT]):
    """A function in processes of its own; each call has a deadline.

    Consumes: calls. Produces: outcomes; whatever a call does to its process, the others are not affected. Waits for:
    the processes. Unblocked by: their answers, their deadlines, `close`.

    A process is started when there is a call for it that may begin, and anew after one that was ended.
    """

    def __init__(
        self,
        work: WorkerTask[CallT, OutcomeT],
        *,
        num_processes: int | None = None,
        log: Path | None = None,
        on_begin: Callable[[Sequence[CallT]], None] = lambda _: None,
    ) -> None:
        """Remember what to start.

        Args:
            work: the function, and its limits.
            num_processes: most processes; None: one per core, at most 16, or up to 128 while calls mostly wait.
            log: receives what the function prints; None for standard error.
            on_begin: called with calls when a process has taken them, in a thread of the pool.
        """
        self.wants = Wants()
        self._is_loaded = False
        self._new: Callable[[], Child[CallT, OutcomeT]] = functools.partial(Child, work, log)
        self._whose, self._on_begin = work.WHOSE, on_begin
        # The kernel ends a process with the thread that started it, so these threads live as long as the pool.
        self._width = Width(num_processes, num_processes) if num_processes else _automatic()
        self._threads = ThreadPoolExecutor(self._width.most, self._whose.removeprefix("the ").partition(" ")[0])
        self._lock, self._loading = threading.Condition(), threading.Lock()
        """The first is told when a process is idle, or was started."""
        self._is_closed = False
        self._asked: deque[tuple[Future[Sequence[OutcomeT]], Sequence[CallT]]] = deque()
        self._num_at_work = 0
        """Threads that take calls from there."""
        self._idle: list[Child[CallT, OutcomeT]] = []
        self._starting: set[Child[CallT, OutcomeT]] = set()
        self._num_starting, self._most_starting = 0, 1
        self._busy: dict[Child[CallT, OutcomeT], Busy] = {}
        self._given_up: set[Future[Sequence[OutcomeT]]] = set()
        """Calls under way whose processes are ended."""

    @property
    def num_at_once(self) -> int:
        """See `Grader.num_at_once`; it grows with a function that mostly waits."""
        return self._width.now

    def load(self) -> None:
        """Start the first process, which says whether the function can be called at all."""
        with self._loading:  # several batches may be scored at once
            if self._is_loaded:
                return
            began = time.monotonic()
            first = self._threads.submit(self._take).result()
            self._most_starting = max(self._width.least, int(_STARTS_S / (time.monotonic() - began)))
            self.wants, self._is_loaded = first.wants, True
        with self._lock:
            self._idle.append(first)
            self._lock.notify_all()

    def submit(self, calls: Sequence[CallT]) -> list[Future[OutcomeT]]:
        """See `Grader.submit`; a call waits for a process that is free."""
        asked = [(Future[Sequence[OutcomeT]](), unit) for unit in units(calls, self.wants)]
        with self._lock:
            self._asked += asked
            self._staff()
        return [outcome for answer, unit in asked for outcome in dealt(answer, len(unit))]

    def begin(self, call: CallT) -> Future[OutcomeT]:
        """Have one call made; cancelling what is returned ends the process that works on it."""
        answer = Future[Sequence[OutcomeT]]()
        (outcome,) = dealt(answer, 1)
        outcome.add_done_callback(lambda done: self._give_up(answer) if done.cancelled() else None)
        with self._lock:
            self._asked.append((answer, (call,)))
            self._staff()
        return outcome

    def _give_up(self, answer: Future[Sequence[OutcomeT]]) -> None:
        with self._lock:
            if answer.running():
                self._given_up.add(answer)
            for child, busy in self._busy.items():
                if busy.answer is answer:
                    child.kill()

    def complain(self, warn: Callable[[str], None], warn_after_s: float) -> float:
        """See `Grader.complain`."""
        with self._lock:
            busy = list(self._busy.values())
        return min((each.complain(warn, warn_after_s) for each in busy), default=warn_after_s)

    def close(self) -> None:
        """End all processes, and the calls that wait for them."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
            asked, self._asked = self._asked, deque()
            for child in (*self._busy, *self._starting):
                child.kill()  # the thread that waits for it does the rest
            self._lock.notify_all()
        for child in idle:
            child.end()
        self._threads.shutdown(wait=False)
        for answer, _ in asked:
            answer.cancel()

    def _staff(self) -> None:
        """Have as many threads at work as there are calls for, and as may be; the lock is held."""
        for _ in range(min(self._width.now - self._num_at_work, len(self._asked))):
            self._num_at_work += 1
            self._threads.submit(self._work)

    def _work(self) -> None:
        """Answer calls until there are none, or until fewer threads may be at work."""
        while True:
            with self._lock:
                if not self._asked or self._num_at_work > self._width.now:
                    self._num_at_work -= 1
                    return
                answer, calls = self._asked.popleft()
            if answer.set_running_or_notify_cancel():
                try:
                    answer.set_result(self._ask(answer, calls))
                except BaseException as error:  # noqa: BLE001 - raised again where the answer is awaited
                    answer.set_exception(error)

    def _ask(self, answer: Future[Sequence[OutcomeT]], calls: Sequence[CallT]) -> Sequence[OutcomeT]:
        child = self._take()
        with self._lock:
            self._busy[child] = Busy(calls[0].name, answer)
            # By a `close`, or a cancellation, that did not see this child, neither idle nor busy.
            if self._is_closed or answer in self._given_up:
                child.kill()
        self._on_begin(calls)
        outcomes, effort = child.ask(calls)
        with self._lock:
            self._given_up.discard(answer)
            del self._busy[child]
            if child.may_be_asked and not self._is_closed:
                self._idle.append(child)
                self._lock.notify_all()
            elif child.is_alive:
                child.end()
            if effort is not None and not self._is_closed:
                self._width.note(effort)
                self._staff()
        return outcomes

    def _take(self) -> Child[CallT, OutcomeT]:
        """Return a process that waits for a call, or a new one once it may start."""
        with self._lock:
            self._lock.wait_for(lambda: self._is_closed or self._idle or self._num_starting < self._most_starting)
            if self._is_closed:
                raise RewardError(f"the processes of {self._whose} were ended")
            if self._idle:
                return self._idle.pop()
            self._num_starting += 1
        try:
            return self._start()
        finally:
            with self._lock:
                self._num_starting -= 1
                self._lock.notify_all()

    def _start(self) -> Child[CallT, OutcomeT]:
        child = self._new()
        with self._lock:
            self._starting.add(child)
            if self._is_closed:
                child.kill()
        try:
            child.load()
        finally:
            with self._lock:
                self._starting.discard(child)
        return child


@dataclasses.dataclass(slots=True)
class Busy:
    """A call under way."""

    name: str
    answer: Future[Any] | None = None
    """What it will come to, where its process may be ended for that."""
    since: float = dataclasses.field(default_factory=time.monotonic)
    num_warnings: int = 0

    def complain(self, warn: Callable[[str], None], warn_after_s: float) -> float:
        """Say that it takes long, if it does and that was not said; return the seconds until it is to be said."""
        waited = time.monotonic() - self.since
        if waited >= (self.num_warnings + 1) * warn_after_s:
            self.num_warnings = int(waited / warn_after_s)
            warn(f"the reward function has been busy with {self.name} for {waited:.0f} s")
        return max(0.0, self.since + (self.num_warnings + 1) * warn_after_s - time.monotonic())
