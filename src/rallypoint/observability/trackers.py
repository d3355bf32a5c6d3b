"""Trackers that are fed what metrics.jsonl gets, with the config, a few rollouts as a table, and the learning curve.

Owns: that none of them can slow or stop a run. Must not know: what a metric means, or how a client is called
(`tracker_clients.py`).

Consumes: lines of metrics, tables and the picture, in their order. Produces: calls of each client, on a thread of its
own. Waits for: these. Unblocked by: `log`, `table`, `picture`, `close`. A client's error is reported once, and it is
not called again; one that hangs is reported, and left behind at the end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from queue import Empty, Full, Queue
from typing import NamedTuple, Protocol, TypeAlias

from rallypoint.errors import first_line
from rallypoint.extras import find_unusable
from rallypoint.journal import (
    CheckpointSaved,
    Ending,
    Entry,
    Journal,
    RolesStarted,
    RunEnded,
    Shown,
    StepDone,
    Validated,
)
from rallypoint.observability.leaving import leave_behind

TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio", "swanlab")
"""Each is also the name of its package, and of its extra."""
_MAX_WAITING = 10_000
"""Lines, tables and pictures that may wait for a client: days of steps, if it hangs."""
CLOSE_S = 20.0
"""Seconds that clients are given at the end of a run to write or send what they have."""
QUIET_S = 3.0
"""Seconds of these in which nothing is said."""
SLOW_S = 30.0
"""Seconds after which a client that is still busy with one thing is told of, while the run goes on."""


@dataclasses.dataclass(frozen=True, slots=True)
class Tracked:
    """The run that a tracker is told of."""

    folder: Path
    """Folder of the run; its name is the run's."""
    project: str
    first_step: int
    """Last step that an earlier start reported."""
    config: Mapping[str, object]
    """Every key, dotted."""


Row: TypeAlias = Mapping[str, str | float | bool]
"""A rollout by column."""


class Tracker(Protocol):
    """One client, opened. It may raise anything, at any time."""

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Take the metrics of a step, or some of them."""
        ...

    def table(self, step: int, rows: Sequence[Row]) -> None:
        """Take a few rollouts of a step; all rows have the same columns."""
        ...

    def picture(self, step: int, png: Path) -> None:
        """Take the learning curve."""
        ...

    def close(self, ending: Ending) -> None:
        """Write what is left, and how the run ended."""
        ...


Open: TypeAlias = Callable[[Tracked], Tracker]


def find_tracker_problem(name: str) -> str | None:
    """Return what is wrong with the name of a tracker, or with its package; None if it can be opened."""
    if name not in TRACKERS:
        return f"is not a known tracker; expected any of {', '.join(TRACKERS)}"
    return find_unusable(name, name)


class Trackers:
    """All trackers of a run."""

    def __init__(
        self,
        opens: Mapping[str, Open],
        run: Tracked,
        journal: Journal,
        *,
        rename: Callable[[Mapping[str, float]], dict[str, float]] = dict,
        close_s: float = CLOSE_S,
        clock: Callable[[], float] = time.monotonic,
        leave: Callable[[str], None] = leave_behind,
    ) -> None:
        """Open each on a thread of its own.

        Args:
            opens: what opens each, by name.
            run: what it is told first.
            journal: of the run; told when one has failed, from its thread.
            rename: gives a line's metrics by the names that they have for trackers.
            close_s: seconds that all of them together are waited for at the end.
            clock: seconds.
            leave: called with the name of one that still hangs then.
        """
        self._close_s, self._rename, self._clock, self._leave, self._journal = close_s, rename, clock, leave, journal
        self._config, self._shown = run.config, Shown(step=0, rows=())
        self.ending: Ending = "failed"
        """How the run ended, which the clients are told: by an error, unless the journal says otherwise."""
        self._feeds = [_Feed(name, open_it, run, journal, clock) for name, open_it in opens.items()]

    @property
    def are_any(self) -> bool:
        """Whether there is one."""
        return bool(self._feeds)

    def take(self, entry: Entry) -> None:
        """Pass on what an event of the run has measured, and with a validation some rollouts of the step before it."""
        match entry.event:
            case RolesStarted() | Validated() | CheckpointSaved() as event:
                self.log(event.step, event.metrics)
            case Shown() as shown:
                self._shown = shown
            case StepDone(step=step) as done:
                self.log(step, done.metrics)
                is_last, every = step == self._config["trainer.num_steps"], self._config["validation.every_steps"]
                if self._shown.rows and (is_last or (isinstance(every, int) and step % every == 0)):
                    self.table(step, self._shown.rows)
            case RunEnded(how=how):
                self.ending = how
            case _:
                pass

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Pass metrics on, and return at once."""
        named = self._rename(scalars)
        self._put(_Job(step, lambda tracker: tracker.log(step, named)))

    def table(self, step: int, rows: Sequence[Row]) -> None:
        """Pass a few rollouts on, and return at once."""
        self._put(_Job(step, lambda tracker: tracker.table(step, rows)))

    def picture(self, step: int, png: Path) -> None:
        """Pass the learning curve on, and return at once."""
        self._put(_Job(step, lambda tracker: tracker.picture(step, png)))

    def _put(self, job: _Job) -> None:
        for feed in self._feeds:
            feed.put(job)

    def close(self) -> None:
        """Let each write what it has, and wait for that, but not for long; what was not sent is said."""
        for feed in self._feeds:
            feed.end(self.ending)
        begun, has_said = self._clock(), False
        while (busy := [feed for feed in self._feeds if feed.is_busy]) and self._clock() - begun < self._close_s:
            if not has_said and self._clock() - begun >= QUIET_S:
                names = " and ".join(feed.name for feed in busy)
                self._journal.say(f"waiting for {names} to take what is left, at most {self._close_s - QUIET_S:.0f} s")
                has_said = True
            busy[0].join(0.05)
        for feed in busy:
            self._journal.say(
                f"tracking with {feed.name} hangs and is left: {feed.unsent()}; metrics.jsonl has everything"
            )
            self._leave(feed.name)


class _Job(NamedTuple):
    """Something to tell a client."""

    step: int
    call: Callable[[Tracker], None]


class _Feed:
    """The thread of one tracker, and what waits for it."""

    def __init__(self, name: str, open_it: Open, run: Tracked, journal: Journal, clock: Callable[[], float]) -> None:
        self.name, self._open, self._run, self._journal, self._clock = name, open_it, run, journal, clock
        self._jobs: Queue[_Job | None] = Queue(_MAX_WAITING)
        self._current: _Job | None = None
        self._doing, self._since = "opening the run", clock()
        self._is_idle = self._was_told = False
        self._ending: Ending = "failed"
        self._dropped: _Job | None = None
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    @property
    def is_busy(self) -> bool:
        return self._thread.is_alive()

    def join(self, seconds: float) -> None:
        self._thread.join(seconds)

    def put(self, job: _Job) -> None:
        try:
            self._jobs.put_nowait(job)
        except Full:  # it hangs; what it does not get is in the run's folder
            self._dropped = self._dropped or job
        doing, seconds = self._doing, self._clock() - self._since
        if self.is_busy and not self._is_idle and not self._was_told and seconds > SLOW_S:
            self._was_told = True
            self._journal.say(
                f"tracking with {self.name} is slow: {doing} for {seconds:.0f} s now; the run does not wait for it, "
                "and metrics.jsonl has everything"
            )

    def end(self, ending: Ending) -> None:
        self._ending = ending
        with contextlib.suppress(Full):
            self._jobs.put_nowait(None)

    def unsent(self) -> str:
        """Report what the client has not taken, as its thread still runs."""
        with self._jobs.mutex:
            waiting = [job.step for job in (self._current, *self._jobs.queue, self._dropped) if job is not None]
        return f"what came from step {min(waiting)} on was not sent" if waiting else "it may not have sent everything"

    def _begin(self, doing: str, job: _Job | None = None) -> None:
        self._doing, self._since, self._current, self._is_idle = doing, self._clock(), job, False

    def _work(self) -> None:
        try:
            tracker = self._open(self._run)
            self._is_idle = True
            while (job := self._jobs.get()) is not None:
                self._begin(f"sending step {job.step}", job)
                job.call(tracker)
                self._is_idle, self._current = True, None
            self._begin("ending the run")
            tracker.close(self._ending)
        except Exception as error:  # noqa: BLE001 - clients of networks raise anything; the run goes on without it
            self._journal.say(
                f"tracking with {self.name} has ended: {type(error).__name__}: {first_line(error)}; the run goes on, "
                "and metrics.jsonl has everything"
            )
            self._empty()

    def _empty(self) -> None:
        """Discard what is queued, so that nothing waits for room."""
        with contextlib.suppress(Empty):
            while True:
                self._jobs.get_nowait()
