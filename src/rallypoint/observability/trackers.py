"""Trackers that are fed what metrics.jsonl gets, with the config, a few rollouts as a table, and the learning curve.

Owns: that none of them can slow or stop a run. Must not know: what a metric means, or how a client is called
(`tracker_clients.py`).

Consumes: lines of metrics, tables and the picture, in their order. Produces: calls of each client, on a thread of its
own. Waits for: these. Unblocked by: `log`, `table`, `picture`, `close`. A client that raises is told once and asked no
more; one that hangs is left behind.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from queue import Empty, Full, Queue
from typing import Protocol, TypeAlias

from rallypoint.errors import first_line
from rallypoint.extras import find_unusable

TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio", "swanlab")
"""Each is also the name of its package, and of its extra."""
_MAX_WAITING = 10_000
"""Lines, tables and pictures that may wait for a client: days of steps, if it hangs."""
CLOSE_S = 20.0
"""Seconds that clients are given at the end of a run to write or send what they have."""


@dataclasses.dataclass(frozen=True, slots=True)
class Tracked:
    """The run that a tracker is told of."""

    folder: Path
    """Of the run; its name is the run's."""
    project: str
    first_step: int
    """Steps up to it were told by an earlier start."""
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

    def close(self) -> None:
        """Write what is left."""
        ...


Open: TypeAlias = Callable[[Tracked], Tracker]


def find_tracker_problem(name: str) -> str | None:
    """Say what is wrong with the name of a tracker, or with its package; None if it can be opened."""
    if name not in TRACKERS:
        return f"is no tracker that is known; expected any of {', '.join(TRACKERS)}"
    return find_unusable(name, name)


class Trackers:
    """All trackers of a run."""

    def __init__(
        self,
        opens: Mapping[str, Open],
        run: Tracked,
        say: Callable[[str], None],
        *,
        rename: Callable[[str], str] = str,
        close_s: float = CLOSE_S,
    ) -> None:
        """Open each on a thread of its own.

        Args:
            opens: what opens each, by name.
            run: what it is told first.
            say: called with a line when one has failed, from its thread.
            rename: gives the name that a metric has for trackers.
            close_s: seconds that all of them together are waited for at the end.
        """
        self._close_s, self._rename = close_s, rename
        self._feeds = [_Feed(name, open_it, run, say) for name, open_it in opens.items()]

    @property
    def are_any(self) -> bool:
        """Whether there is one."""
        return bool(self._feeds)

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Pass metrics on, and return at once."""
        named = {self._rename(name): value for name, value in scalars.items()}
        self._put(lambda tracker: tracker.log(step, named))

    def table(self, step: int, rows: Sequence[Row]) -> None:
        """Pass a few rollouts on, and return at once."""
        self._put(lambda tracker: tracker.table(step, rows))

    def picture(self, step: int, png: Path) -> None:
        """Pass the learning curve on, and return at once."""
        self._put(lambda tracker: tracker.picture(step, png))

    def _put(self, job: Callable[[Tracker], None]) -> None:
        for feed in self._feeds:
            feed.put(job)

    def close(self) -> None:
        """Let each write what it has, and wait for that, but not for long."""
        ended = [feed.end() for feed in self._feeds]
        give_up = threading.Event()
        timer = threading.Timer(self._close_s, give_up.set)
        timer.daemon = True
        timer.start()
        for thread in ended:
            while thread.is_alive() and not give_up.is_set():
                thread.join(0.05)
        timer.cancel()


class _Feed:
    """The thread of one tracker, and what waits for it."""

    def __init__(self, name: str, open_it: Open, run: Tracked, say: Callable[[str], None]) -> None:
        self._name, self._open, self._run, self._say = name, open_it, run, say
        self._jobs: Queue[Callable[[Tracker], None] | None] = Queue(_MAX_WAITING)
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def put(self, job: Callable[[Tracker], None]) -> None:
        with contextlib.suppress(Full):  # it hangs; what it does not get is in the run's folder
            self._jobs.put_nowait(job)

    def end(self) -> threading.Thread:
        with contextlib.suppress(Full):
            self._jobs.put_nowait(None)
        return self._thread

    def _work(self) -> None:
        try:
            tracker = self._open(self._run)
            while (job := self._jobs.get()) is not None:
                job(tracker)
            tracker.close()
        except Exception as error:  # noqa: BLE001 - clients of networks raise anything; the run goes on without it
            self._say(
                f"tracking with {self._name} has ended: {type(error).__name__}: {first_line(error)}; the run goes on, "
                "and metrics.jsonl has everything"
            )
            self._empty()

    def _empty(self) -> None:
        """Take what nobody wants, so that nothing waits."""
        with contextlib.suppress(Empty):
            while True:
                self._jobs.get_nowait()
