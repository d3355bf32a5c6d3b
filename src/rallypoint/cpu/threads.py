"""Lanes: threads that compute in parallel, one core each, instead of splitting every operation over the cores.

Owns: the threads. Must not know: what they compute. A decoding step is hundreds of operations, most of them too small
to be worth two cores: if each is split, each waits for its slower half. Work that is split into jobs waits only once.
Results depend only on how the work was split into jobs.
"""

from __future__ import annotations

import contextlib
import contextvars
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

import torch

from rallypoint.as_found import AsFound, GiveBack, variables
from rallypoint.cpu.forms import computes_in_pieces
from rallypoint.cpu.onednn import KERNEL_CACHES

ResultT = TypeVar("ResultT")

_SWITCH_SECONDS = 3e-4
"""Seconds after which a thread hands Python's lock to a waiting one, once a process has lanes. With Python's 5 ms, a
lane waits that long for a lock that it needs only briefly; with 20 microseconds, lanes keep taking it from each
other."""
_MAX_THREADS = 1024
"""Bound on threads; there are as many as jobs have run at a time."""


class Lanes:
    """Runs jobs side by side on a CPU, and one after another on an accelerator, whose kernels fill it by themselves.

    >>> Lanes(torch.device("cpu")).run([lambda: 1 + 1, torch.get_num_threads])
    [2, 1]
    """

    def __init__(self, device: torch.device) -> None:
        """Begin without threads; they are started when they are needed."""
        self._device = device
        self._threads: ThreadPoolExecutor | None = None

    @property
    def num(self) -> int:
        """Number of jobs worth having: one for each thread that torch may use here."""
        return torch.get_num_threads() if computes_in_pieces(self._device) else 1

    def run(self, jobs: Sequence[Callable[[], ResultT]], num_threads_each: int | None = None) -> list[ResultT]:
        """Run independent jobs, the first one in this thread, and return their results in order.

        Gradients are on or off in the other threads, and context variables are set, as they are in this one. If jobs
        raise, the first one's error is raised when all have ended.

        Args:
            jobs: independent of each other.
            num_threads_each: threads of torch for each job; None for an equal share, at least one.
        """
        has_gradients, num_threads = torch.is_grad_enabled(), torch.get_num_threads()
        share = num_threads_each or max(1, num_threads // max(1, len(jobs)))
        if len(jobs) == 1 and share == num_threads:
            return [jobs[0]()]
        if len(jobs) > 1 and sys.getswitchinterval() > _SWITCH_SECONDS:
            sys.setswitchinterval(_SWITCH_SECONDS)
        if self._threads is None:
            self._threads = ThreadPoolExecutor(_MAX_THREADS, "lane", initializer=torch.set_num_threads, initargs=(1,))
        others = [
            self._threads.submit(contextvars.copy_context().run, _as_here, has_gradients, share, job)
            for job in jobs[1:]
        ]
        torch.set_num_threads(share)
        try:
            first = [job() for job in jobs[:1]]
        finally:
            wait(others)  # they use what is the caller's
            torch.set_num_threads(num_threads)
        return first + [other.result() for other in others]


def _as_here(has_gradients: bool, num_threads: int, job: Callable[[], ResultT]) -> ResultT:
    if torch.get_num_threads() != num_threads:  # setting it costs a tenth of a millisecond
        torch.set_num_threads(num_threads)
    with torch.set_grad_enabled(has_gradients):
        return job()


def _look() -> GiveBack:
    interval, give_back = sys.getswitchinterval(), variables(KERNEL_CACHES)

    def give_all_back() -> None:
        sys.setswitchinterval(interval)
        give_back()

    return give_all_back


_interpreter_as_found = AsFound(_look)


@contextlib.contextmanager
def few_threads() -> Iterator[None]:
    """Compute in one thread of torch, and leave the interpreter as it was found: it may be a user's own.

    What the driver computes itself is small, and idle OpenMP threads spin on the cores that workers need.
    """
    num_threads = torch.get_num_threads()  # of this thread
    torch.set_num_threads(1)
    try:
        with _interpreter_as_found():
            yield
    finally:
        torch.set_num_threads(num_threads)
