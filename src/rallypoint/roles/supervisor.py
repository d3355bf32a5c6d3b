"""Hears that worker processes were lost, decides whether the run goes on, and says and records that it does.

Owns: how often processes may be lost. Must not know: what a role does, or how it is made anew. Invariant: only a
process that died or hung is made again. An error that a worker raised is the user's to mend, and ends the run.

| what was lost | how often a run goes on |
|---|---|
| a process whose node its owner took back, with notice | always |
| a process that was sent SIGTERM | twice in the same call, until a further step is done |
| any other | ten an hour, or while most of the time goes into steps; twice in the same call, until a further step |

It also decides whether a run goes back to a checkpoint after numbers that were not finite: once.
"""

from __future__ import annotations

import collections
import math
import time
from collections.abc import Callable, Mapping, Sequence

from rallypoint.errors import DivergedError, WorkerDiedError, first_line
from rallypoint.journal import Entry, Journal, RoleLost, RolesRestarted, StepDone

_MOST_AN_HOUR, _HOUR_S, _LEAST_USEFUL = 10, 3600.0, 0.5
_MOST_IN_ONE_CALL = 2
"""Losses in one call of a rank that a run goes on after without a further step: a third has its cause there."""


class Supervisor:
    """The losses of a run so far."""

    def __init__(self, journal: Journal, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin without losses.

        Args:
            journal: of the run.
            clock: seconds that never go back.
        """
        self._journal, self._clock = journal, clock
        self._noticed = collections.deque[tuple[float, float]](maxlen=_MOST_AN_HOUR + 1)
        """When losses were noticed, and the seconds of steps until then."""
        self._useful_s = 0.0
        """Seconds of all steps, each once."""
        self._calls: collections.Counter[tuple[str, int, str]] = collections.Counter()
        self._away_since: float | None = None
        self._has_gone_back = False
        self._step = 0
        journal.subscribe(self._hear)

    def _hear(self, entry: Entry) -> None:
        if isinstance(entry.event, StepDone) and entry.event.step > self._step:  # not one that is done again
            self._step = entry.event.step
            self._useful_s += entry.event.seconds
            self._calls.clear()

    @property
    def between_losses_s(self) -> float:
        """Seconds from one loss to the next, of the newest ones; infinite before there were two."""
        num = len(self._noticed)
        return math.inf if num < 2 else (self._clock() - self._noticed[0][0]) / num

    def lost(self, error: WorkerDiedError) -> None:
        """Record that a process was lost; return if the run may go on.

        Raises:
            WorkerDiedError: the given one, if that was the same call three times, or too many were lost in an hour.
        """
        now, call = self._clock(), (error.role, error.rank, error.call)
        is_taken = error.is_preempted or error.is_terminated
        if not is_taken:
            self._noticed.append((now, self._useful_s))
        if not error.is_preempted:
            self._calls[call] += 1
        self._away_since = now if self._away_since is None else self._away_since
        self._journal.append(RoleLost(role=error.role, rank=error.rank, step=error.step, why=first_line(error)))
        if self._calls[call] > _MOST_IN_ONE_CALL:
            self._journal.say(
                f"the run ends: {error.role} rank {error.rank} was lost in {error.call} for the third time"
            )
            error.is_final = True
            raise error
        if not is_taken and len(self._noticed) > _MOST_AN_HOUR:
            passed_s, useful_s = now - self._noticed[0][0], self._useful_s - self._noticed[0][1]
            if passed_s < _HOUR_S and useful_s <= _LEAST_USEFUL * passed_s:
                self._journal.say(
                    f"the run ends: more than {_MOST_AN_HOUR} processes were lost within an hour, and less than half "
                    "of the time since the first went into further steps"
                )
                raise error
        what = first_line(error).partition(": ")[0]  # the rest is in the event
        why = ", as its owner took it back" if is_taken else ""
        self._journal.say(f"{what}{why}; it is started again")

    def diverged(self, error: DivergedError) -> int:
        """Return the step whose checkpoint, or the newest before it, the run goes on from.

        Raises:
            DivergedError: the given one, if the run has gone back before.
        """
        if self._has_gone_back:
            raise error
        self._has_gone_back = True
        self._journal.say(
            f"{first_line(error).partition(': lower ')[0]}; the run goes back to the newest checkpoint up to step "
            f"{error.last}, once: what follows from data and weights alone comes again, and ends it then"
        )
        return error.last

    def restarted(self, processes: Mapping[str, Sequence[str]], first: int | None = None) -> None:
        """Record that what was lost is there again; nothing if nothing was.

        Args:
            processes: of the roles that were made anew, see `RolesStarted`.
            first: step after which the run goes on; None if the step under way does.
        """
        if self._away_since is None:
            return
        seconds, self._away_since = self._clock() - self._away_since, None
        self._journal.append(RolesRestarted(processes=processes, first=first, seconds=round(seconds, 3)))
        where = "the step goes on" if first is None else f"the run goes on after step {first}"
        self._journal.say(f"{', '.join(processes)}: back after {seconds:.1f} s: {where}", level="log")
