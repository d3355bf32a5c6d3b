"""Failures on purpose: `RALLY_FAIL=actor.train:step=7:rank=1:kill` kills that process when that call begins.

    PLACE[:CONDITION=NUMBER]...:HOW[;...]

A place is a kind of event, which fails before it is appended to the journal, or `role.method`, which fails when a rank
begins that call. Conditions are `n=` (the n-th time that all others hold) and numbers of the event, or `step=` and
`rank=` of the call. How it fails is one of `HOW`.

Owns: what a failpoint is, which one is due, and what it does. Must not know: which roles, methods and events there are.
Invariant: each fires once in a run. The driver alone decides, for calls, too: a worker is told with its call, so no
environment has to reach it, and a process that is made again is not hit again. What fires is first noted in the folder
of the run, so that it does not fire again after a resume.

>>> parse("actor.train:step=7:rank=1:kill; StepDone:n=2:slow=0.5")
[Failpoint(place='actor.train', conditions={'step': 7, 'rank': 1}, nth=1, how='kill', text='actor.train:step=7:rank=1:kill'), Failpoint(place='StepDone', conditions={}, nth=2, how='slow=0.5', text='StepDone:n=2:slow=0.5')]
"""  # noqa: E501 - a doctest's result is a line

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import re
import resource
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path

from rallypoint.errors import ConfigError, FailpointError

VARIABLE = "RALLY_FAIL"
NOTED = ".failed"
"""In the folder of a run: a line for each failpoint that has fired, with its time in seconds since the epoch."""
HOW = {
    "kill": "SIGKILL to the process",
    "term": "SIGTERM to the process",
    "stop": "SIGSTOP to the process",
    "raise": "an error",
    "hang": "does not go on",
    "slow=SECONDS": "goes on after that time",
    "disk_full": "an event is not written, or no file grows during the call",
}
_SIGNALS = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "stop": signal.SIGSTOP}
_OF_CALLS = ("step", "rank")
_TICK_S = 0.1
"""Seconds of a sleep between two moments at which a thread that hangs can be cancelled."""


@dataclasses.dataclass(slots=True)
class Failpoint:
    """A failure that is still to come."""

    place: str
    """Kind of an event, or `role.method`."""
    conditions: Mapping[str, int]
    nth: int
    """Number of the time, from 1, that it fires when place and conditions hold."""
    how: str
    text: str
    """The failpoint as it was written."""


def parse(text: str) -> list[Failpoint]:
    """Return the failpoints of a text.

    Raises:
        ConfigError: it is not of the form above.
    """
    found, problems = list[Failpoint](), list[str]()
    for one in filter(None, (part.strip() for part in text.split(";"))):
        place, *middle, how = one.split(":") if ":" in one else (one, "")
        if wrong := [word for word in middle if not re.fullmatch(r"\w+=\d+", word)]:
            problems.append(f"{one}: expected conditions such as step=7, found {wrong[0]!r}")
        elif not ((how in HOW and "=" not in how) or re.fullmatch(r"slow=(\d+\.?\d*|\.\d+)", how)):
            problems.append(f"{one}: expected it to end with how it fails, one of {', '.join(HOW)}; found {how!r}")
        else:
            pairs = [word.split("=") for word in middle]
            numbers = {name: int(number) for name, number in pairs}
            if len(numbers) < len(pairs) or not numbers.get("n", 1):
                problems.append(f"{one}: expected each condition once, and n from 1; found {', '.join(middle)}")
            nth = numbers.pop("n", 1)
            found.append(Failpoint(place, numbers, nth, how, one))
    if problems:
        raise ConfigError(tuple(f"{VARIABLE}: {problem}" for problem in problems))
    return found


class Failpoints:
    """The failpoints of one start of a run."""

    def __init__(self, points: Sequence[Failpoint], noted: Path) -> None:
        """Leave out those that have fired.

        Args:
            points: all of them.
            noted: file with those that have fired in an earlier start.
        """
        lines = noted.read_text().splitlines() if noted.is_file() else []
        fired = {line.partition(" ")[2] for line in lines}
        self.points = [point for point in points if point.text not in fired]
        self._noted, self._lock, self._counts = noted, threading.Lock(), dict.fromkeys((p.text for p in points), 0)

    def due(self, place: str, found: object) -> str:
        """Return how something fails, from any thread; empty if it does not.

        Args:
            place: kind of the event, or `role.method`.
            found: has the numbers that conditions are about, by name.
        """
        with self._lock:
            holding = [
                point
                for point in self.points
                if point.place == place and all(getattr(found, k) == v for k, v in point.conditions.items())
            ]
            for point in holding:
                self._counts[point.text] += 1
            point = next((point for point in holding if self._counts[point.text] >= point.nth), None)
            if point is None:
                return ""
            self.points.remove(point)
            with self._noted.open("a") as file:
                file.write(f"{time.time():.3f} {point.text}\n")
            return point.how


armed: Failpoints | None = None
"""Those of the run of this process; None if there are none, as ever but in a drill."""


def check_calls(role: str, kind: type) -> None:
    """Look for the methods of a role's worker that failpoints name.

    Raises:
        ConfigError: there is none of that name; those that there are are listed.
    """
    if armed is None:
        return
    calls = ["__init__", *(name for name in dir(kind) if not name.startswith("_") and callable(getattr(kind, name)))]
    _refuse(
        f"{point.text}: {role} has no method {method!r}; it has {', '.join(calls)}"
        for point in armed.points
        for owner, dot, method in [point.place.partition(".")]
        if dot and owner == role and method not in calls
    )


@contextlib.contextmanager
def arming(
    folder: Path,
    events: Mapping[str, Collection[str]],
    ranks: Mapping[str, int],
    *,
    num_steps: int,
    inline: bool,
    say: Callable[[str], None],
) -> Iterator[None]:
    """Have the failpoints of the environment fail inside the block; say which are to come, and which never came.

    Args:
        folder: of the run.
        events: kind -> its numbers, which conditions may be about.
        ranks: role of the run -> how many ranks it has.
        num_steps: of the run.
        inline: whether roles live in this very process.
        say: called with a line for people.

    Raises:
        ConfigError: one names what does not exist; what exists is listed.
    """
    global armed
    points = parse(os.environ.get(VARIABLE, ""))
    _refuse(problem for point in points if (problem := _problem(point, events, ranks, num_steps, inline=inline)))
    found = Failpoints(points, folder / NOTED)
    armed = found if found.points else None
    if armed is not None:
        say(f"{VARIABLE}: this run fails on purpose, at {_texts(armed)}")
    try:
        yield
    finally:
        armed = None
    if found.points:
        say(f"{VARIABLE}: what never came: {_texts(found)}")


def _texts(found: Failpoints) -> str:
    return "; ".join(point.text for point in found.points)


def _problem(
    point: Failpoint, events: Mapping[str, Collection[str]], ranks: Mapping[str, int], num_steps: int, *, inline: bool
) -> str:
    role, dot, method = point.place.partition(".")
    if not dot and point.place not in events:
        return f"{point.text}: there is no event {point.place!r}; there are {', '.join(events)}, and role.method"
    if dot and (role not in ranks or not method):
        return f"{point.text}: the run has no role {role!r}; it has {', '.join(ranks)}"
    numbers = _OF_CALLS if dot else events[point.place]
    if unknown := [name for name in point.conditions if name not in numbers]:
        return f"{point.text}: {point.place} has no {unknown[0]}; conditions are {', '.join((*numbers, 'n'))}"
    step, rank = (point.conditions.get(name, 0) for name in _OF_CALLS)
    if step > num_steps or (dot and rank >= ranks[role]):
        return f"{point.text}: the run has {num_steps} steps{f', and {role} {ranks[role]} ranks from 0' if dot else ''}"
    if dot and inline and point.how in _SIGNALS:
        return (
            f"{point.text}: with cluster.runtime=inline a role's process is the driver itself; name an event instead, "
            f"such as StepDone:step=3:{point.how}"
        )
    return ""


def _refuse(problems: Iterator[str]) -> None:
    if found := tuple(f"{VARIABLE}={problem}" for problem in problems):
        raise ConfigError(found)


@contextlib.contextmanager
def failing(how: str) -> Iterator[None]:
    """Fail in this process, at the beginning of the block; while a disk is full, all of the block meets that.

    Raises:
        FailpointError: `how` is to raise.
    """
    if how != "disk_full":
        fail(how)
        yield
        return
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))  # no file of this process can grow
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def fail(how: str) -> None:
    """Fail, in this process.

    Raises:
        FailpointError: `how` is to raise.
        OSError: `how` is a full disk.
    """
    if how in _SIGNALS:
        os.kill(os.getpid(), _SIGNALS[how])
    elif how == "raise":
        raise FailpointError(f"raised on purpose, by {VARIABLE}")
    elif how == "disk_full":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    elif how:
        until = time.monotonic() + float(how.partition("=")[2] or "inf")
        while (left_s := until - time.monotonic()) > 0:
            time.sleep(min(left_s, _TICK_S))
