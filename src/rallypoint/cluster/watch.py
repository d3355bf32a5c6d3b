"""Finds processes that hang while somebody waits for them.

Ray notices a process that died, but never one that is stopped, spins or waits for ever. So while calls are waited
for, every process is asked for its pulse, which a thread of its own answers at once. Two things end a process:

- it gave no pulse for `silence_s`: it is stopped, swapped out, or its interpreter is held;
- it executes a call that made no progress (began, ended, or ticked) until its deadline, or one whose result such a
  call waits for.

Before that, the stacks of all processes are saved, because the one that hangs is often waiting for another. A process
that has died while nobody waits for it is told of, so that another one starts before it is needed. Time during which
the driver itself stood still (Ctrl-Z, a laptop that sleeps) is held against nobody. If Ray itself is lost, all
calls end with that.

Consumes: calls that are waited for. Waits for: nothing longer than a beat. Unblocked by: `add`, `stop`.
"""

from __future__ import annotations

import copy
import dataclasses
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

from rallypoint.cluster.call import Call, Process
from rallypoint.cluster.process import Invocation, Pulse
from rallypoint.errors import RallyError, WorkerHungError

_BEAT_S = 1.0

SaveStacks = Callable[[Sequence[Process], Path], str]
"""Saves the stacks of all processes into a file and returns a line about it."""


@dataclasses.dataclass(slots=True)
class _Health:
    """What is known of a process. Times are those of the question, not of the answer."""

    asked: Future[Pulse]
    asked_at: float
    pulse: Pulse | None = None
    seen_at: float = 0.0
    """Time of the question for the last pulse that it gave."""
    moved_at: float = 0.0
    """Time of the question for the first pulse with that progress."""

    @property
    def stood_still_s(self) -> float:
        """Seconds without progress, as far as is known."""
        return self.seen_at - self.moved_at

    def hear(self) -> None:
        """Record an answer."""
        # A process that died is not silent: its calls fail by themselves.
        pulse = None if self.asked.exception() else self.asked.result()
        self.seen_at = self.asked_at
        if pulse is None or self.pulse is None or pulse.progress != self.pulse.progress:
            self.moved_at = self.asked_at
        self.pulse = pulse


class HangDetector:
    """Watches the processes of pending calls, and decides which of them hang; call `look` once per beat."""

    def __init__(
        self,
        *,
        processes: Callable[[], Sequence[Process]],
        silence_s: float,
        save_stacks: SaveStacks,
        folder: Path,
        ground: Callable[[], RallyError | None] = lambda: None,
        say: Callable[[str], None] = print,
        died: Callable[[Process, BaseException], None] = lambda *_: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin without calls.

        Args:
            processes: returns all processes that are alive.
            silence_s: how long a process may give no pulse.
            save_stacks: see `SaveStacks`.
            folder: where stacks are saved.
            ground: returns why no process can go on, or None; called once per beat.
            say: called, from any thread, with each line that a worker has said.
            died: called, from any thread, with a process that gives no answer and owes nobody one, and why; each beat.
            clock: seconds that never go back.
        """
        self._say, self._died = say, died
        self.beat_s = min(_BEAT_S, silence_s / 3)
        self._hosts, self._silence_s, self._save_stacks = processes, silence_s, save_stacks
        self._folder, self._ground, self._clock = folder, ground, clock
        self._calls: dict[Call[Any], float] = {}
        self._health: dict[Process, _Health] = {}
        self._lock = threading.Lock()
        self._awake_s, self._looked_at = 0.0, clock()

    @property
    def is_idle(self) -> bool:
        """Whether no call is pending."""
        return not self._calls

    def add(self, call: Call[Any]) -> None:
        """Begin to watch a call."""
        with self._lock:
            self._calls[call] = self._now()

    def remove(self, call: Call[Any]) -> None:
        """Stop watching a call that is over."""
        with self._lock:
            self._calls.pop(call, None)

    def look(self) -> None:
        """Ask every process once, and end those that hang."""
        with self._lock:
            now = self._awake_s = self._now()
            self._looked_at = self._clock()
            calls = dict(self._calls)
        if not calls:
            self._health.clear()  # nobody is asked meanwhile, so what is known would be stale
            return
        if (lost := self._ground()) is not None:
            for call in calls:
                call.fail(copy.copy(lost))
            return
        known, self._health = self._health, {}
        for process in self._hosts():
            health = self._health[process] = known.get(process) or _Health(self._asked(process), now)
            if process in known and health.asked.done():
                health.hear()
                is_owing = any(one.process is process for call in calls for one in call.pending)
                if not is_owing and (error := health.asked.exception()) is not None:
                    self._died(process, error)
                health.asked, health.asked_at = self._asked(process), now
        hung = [process for process, health in self._health.items() if now - health.asked_at > self._silence_s]
        if hung:
            self._end(hung, calls, f"gave no sign of life for {self._silence_s:g} s")
            return
        for call, began in calls.items():
            if call.deadline_s is not None and (hung := self._without_progress(call, began, call.deadline_s)):
                self._end(hung, calls, f"made no progress for {call.deadline_s:g} s, the deadline of {call}")
                return

    def _asked(self, process: Process) -> Future[Pulse]:
        """Ask for a pulse; lines that the workers have said are printed when it arrives."""
        asked = process.pulse()
        asked.add_done_callback(self._tell)
        return asked

    def _tell(self, answer: Future[Pulse]) -> None:
        if answer.exception() is None:
            for line in answer.result().notes:
                self._say(line)

    def _now(self) -> float:
        """Return the seconds since the beginning, without gaps between beats in which the driver stood still."""
        return self._awake_s + min(self._clock() - self._looked_at, 3 * self.beat_s)

    def _without_progress(self, call: Call[Any], began: float, deadline_s: float) -> list[Process]:
        """Return the processes that keep a call waiting, if none that it needs made progress for so long."""
        owing = list(dict.fromkeys(one.process for one in call.pending if not one.future().done()))
        concerned = {process: self._health[process] for process in (*owing, *call.sources) if process in self._health}
        if any(min(one.stood_still_s, one.seen_at - began) < deadline_s for one in concerned.values()):
            return []
        busy = [process for process, one in concerned.items() if one.pulse is not None and one.pulse.call is not None]
        return [process for process in busy if process in owing] or busy or owing

    def _end(self, hung: Sequence[Process], calls: Iterable[Call[Any]], why: str) -> None:
        """Save all stacks and end some processes; all deadlines start anew, so that calls hear of that first."""
        file = self._folder / f"stacks-{time.strftime('%Y%m%d-%H%M%S')}.txt"
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            note = self._save_stacks(list(self._health), file)
        except (OSError, RallyError) as error:  # the stacks are a help, not a condition
            note = f"their stacks could not be saved: {error}"
        with self._lock:
            self._calls = dict.fromkeys(self._calls, self._awake_s)
        for process in hung:
            others = [f"pid {other.info.pid} on {other.info.node}" for other in hung if other is not process]
            also = f"so did {', '.join(others)}; " if others else ""
            it = self._executed(process, calls)
            hang = it.died(f"{why}; {also}{note}", process.info, WorkerHungError)
            process.kill(hang)
            # If several hang, the first is to be named: its end must be known before the next one's.
            owed = {one.future(): call for call in calls for one in call.pending if one.process is process}
            for unheard in wait(owed, timeout=self.beat_s).not_done:
                owed[unheard].fail(copy.copy(hang))  # the runtime itself may not notice

    def _executed(self, process: Process, calls: Iterable[Call[Any]]) -> Invocation:
        """Return what a process was doing when it stopped, as far as is known."""
        owed = [
            one.invocation
            for call in calls
            for one in call.pending
            if one.process is process and not one.future().done()
        ]
        pulse = self._health[process].pulse
        last = None if pulse is None else pulse.call
        if last is not None and (not owed or last.number in {one.number for one in owed}):
            return last
        if owed:
            return min(owed, key=lambda one: one.number)
        role, rank = next(iter(process.roles.items()), ("a process without a role,", 0))
        return Invocation(0, role, rank, "waiting for calls", answers=False)


class Watchdog:
    """The thread in which a `HangDetector` looks."""

    def __init__(self, detector: HangDetector) -> None:
        """Start to watch."""
        self._detector = detector
        self._changed = threading.Condition()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._thread.start()

    def add(self, call: Call[Any]) -> None:
        """Begin to watch a call."""
        with self._changed:
            was_idle = self._detector.is_idle
            self._detector.add(call)
            if was_idle:
                self._changed.notify()

    def remove(self, call: Call[Any]) -> None:
        """Stop watching a call that is over."""
        self._detector.remove(call)

    def stop(self) -> None:
        """Stop looking."""
        with self._changed:
            self._stopped = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stopped or not self._detector.is_idle)
                # Calls that are over within a beat cost nothing.
                self._changed.wait_for(lambda: self._stopped, timeout=self._detector.beat_s)
                if self._stopped:
                    return
            self._detector.look()
