"""Reward functions at work: a user's file in processes that can be ended, a function that ships in this one.

Owns: how many processes there are, and which call goes to which. Must not know: batches, tensors. It needs the standard
library only, so that a config can be checked with it before torch is there.

See docs/decisions/0023-rewards-in-processes.md.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from rallypoint.environments.child import Child
from rallypoint.environments.outcome import Outcome, RewardCall, call_reward
from rallypoint.environments.reward import SHIPPED, RewardFunction, load_reward, no_function, wanted_tokens
from rallypoint.errors import RewardError

if TYPE_CHECKING:
    from rallypoint.config import RewardConfig

_MAX_PROCESSES = 16
"""More are started only by `reward.num_processes`."""


class Grader(Protocol):
    """Asks a reward function about many responses."""

    @property
    def wanted(self) -> tuple[str, ...]:
        """Which of the arguments about tokens the function names; known once it was loaded."""
        ...

    def load(self) -> None:
        """Find the function, before anything is asked; a second time is none.

        Raises:
            RewardError: there is none of its name, it cannot be imported, or it does not take what it is given.
        """
        ...

    def submit(self, call: RewardCall) -> Future[Outcome]:
        """Ask about a response; after `load`, from any thread. Returns at once where the function may take long.

        The result raises RewardError where the user's file could not be imported a second time.
        """
        ...

    def complain(self, warn: Callable[[str], None], warn_after_s: float) -> float:
        """Name the calls that take long; return how long nothing need be said.

        Args:
            warn: given a sentence for every `warn_after_s` that one call takes.
            warn_after_s: seconds that a call may take without a word.
        """
        ...

    def close(self) -> None:
        """End what was started."""
        ...


class Inline:
    """A function that ships with the package, called in this process, one response after another.

    It takes microseconds, and nothing of it needs to be contained: a process would cost more than it does.
    """

    def __init__(self, function: RewardFunction) -> None:
        self.wanted = wanted_tokens(function)
        self._function = function

    def load(self) -> None:
        """It is there."""

    def submit(self, call: RewardCall) -> Future[Outcome]:
        """Call the function, and return what became of it."""
        done: Future[Outcome] = Future()
        done.set_result(call_reward(self._function, _copied(call), self.wanted))
        return done

    def complain(self, warn: Callable[[str], None], warn_after_s: float) -> float:
        """Nothing takes long."""
        del warn
        return warn_after_s

    def close(self) -> None:
        """Nothing was started."""


def _copied(call: RewardCall) -> RewardCall:
    """Return a call whose function cannot change the data set."""
    ground_truth, extra_info = copy.deepcopy((call.ground_truth, call.extra_info))
    return dataclasses.replace(call, ground_truth=ground_truth, extra_info=extra_info)


class Pool:
    """A function in a file of the user's, in processes of its own; each call has a deadline.

    Consumes: calls. Produces: outcomes; whatever a call does to its process, the others are not affected. Waits for:
    the processes. Unblocked by: their answers, their deadlines, `close`.

    A process is started when there is a call for it, and anew after one that was ended.
    """

    def __init__(
        self, spec: str, *, timeout_s: float, num_processes: int | None = None, log: Path | None = None
    ) -> None:
        """Take note of what to start.

        Args:
            spec: `path/to/file.py:function`.
            timeout_s: seconds that one call may take.
            num_processes: how many at most; None for one a core, up to 16.
            log: receives what the function prints; None for standard error.
        """
        from rallypoint.cluster.capacity import num_cores  # here, because a process that scores imports this module

        self.wanted: tuple[str, ...] = ()
        self._is_loaded = False
        self._new = functools.partial(Child, spec, timeout_s, log)
        # The kernel ends a process with the thread that started it, so these threads live as long as the pool.
        self._threads = ThreadPoolExecutor(num_processes or min(num_cores(), _MAX_PROCESSES), "reward")
        self._lock = threading.Lock()
        self._is_closed = False
        self._idle: list[Child] = []
        self._starting: set[Child] = set()
        self._busy: dict[Child, _Busy] = {}

    def load(self) -> None:
        """Start the first process, which says whether the function can be called at all."""
        if self._is_loaded:
            return
        first = self._threads.submit(self._take).result()
        self.wanted, self._is_loaded = first.wanted, True
        with self._lock:
            self._idle.append(first)

    def submit(self, call: RewardCall) -> Future[Outcome]:
        """See `Grader.submit`; the call waits for a process that is free."""
        return self._threads.submit(self._ask, call)

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
            for child in (*self._busy, *self._starting):
                child.kill()  # the thread that waits for it does the rest
        for child in idle:
            child.end()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _ask(self, call: RewardCall) -> Outcome:
        child = self._take()
        with self._lock:
            self._busy[child] = _Busy(call.name)
            if self._is_closed:  # by a `close` that did not see this child, neither idle nor busy
                child.kill()
        outcome = child.ask(call)
        with self._lock:
            del self._busy[child]
            if child.is_alive and not self._is_closed:
                self._idle.append(child)
            elif child.is_alive:
                child.end()
        return outcome

    def _take(self) -> Child:
        """Return a process that waits for a call, or a new one."""
        with self._lock:
            if self._is_closed:
                raise RewardError("the processes of the reward function were ended")
            if self._idle:
                return self._idle.pop()
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
class _Busy:
    """A call under way."""

    name: str
    since: float = dataclasses.field(default_factory=time.monotonic)
    num_warnings: int = 0

    def complain(self, warn: Callable[[str], None], warn_after_s: float) -> float:
        """Say that it takes long, if it does and that was not said; return the seconds until it is to be said."""
        waited = time.monotonic() - self.since
        if waited >= (self.num_warnings + 1) * warn_after_s:
            self.num_warnings = int(waited / warn_after_s)
            warn(f"the reward function has been busy with {self.name} for {waited:.0f} s")
        return max(0.0, self.since + (self.num_warnings + 1) * warn_after_s - time.monotonic())


def open_grader(spec: str | None, settings: RewardConfig, log: Path | None = None) -> Grader:
    """Return what asks the reward function of that name; None stands for a score of 0.

    Args:
        spec: a shipped function's name or `path/to/file.py:function`; that of `settings`, or another.
        settings: how many processes may run a user's function, and how long a call may take.
        log: receives what it prints; None for standard error.

    Raises:
        RewardError: no function ships under that name.
    """
    if spec is None:
        return Inline(no_function)
    if spec in SHIPPED:
        return Inline(load_reward(spec))
    return Pool(spec, timeout_s=settings.timeout_s, num_processes=settings.num_processes, log=log)


def probe_reward(spec: str) -> str | None:
    """Say why a reward function cannot be used; None if it can. A user's file is imported in a process of its own.

    Nothing that the file does at its import can harm this process: it may raise, hang or exit.
    """
    if spec in SHIPPED:
        return None
    try:
        with contextlib.closing(Pool(spec, timeout_s=1.0, num_processes=1, log=Path(os.devnull))) as pool:
            pool.load()
    except RewardError as error:
        return str(error)
    return None
