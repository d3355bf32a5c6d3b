"""The program of a process that scores or runs an agent: it imports the file, answers calls, and ends with its driver.

Consumes: what to do (`WorkerTask`), then calls, pickled. Produces: an answer to each, as JSON, since what comes
from here may one day be written by somebody who is not to be trusted. Waits for: the next call. Unblocked by: it, or
by the end of the driver, which closes the connection; a worker that is busy then is ended by the kernel.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import faulthandler
import json
import math
import os
import pickle
import resource
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar

from rallypoint.environments.given import loaded
from rallypoint.environments.outcome import (
    DeadlineError,
    Failure,
    Outcome,
    RewardCall,
    Scores,
    call_reward,
    is_ours,
    raised,
    timed_out,
)
from rallypoint.environments.reward import Wants, load_reward, wants_of
from rallypoint.errors import RewardError, UserCodeError
from rallypoint.user_code import format_user_traceback

if TYPE_CHECKING:
    import asyncio

DUMP_SIGNAL = signal.SIGUSR2
"""Has a worker write where it is, from C and at once, whatever its interpreter does."""


class FunctionCall(Protocol):
    """What a function is asked once."""

    @property
    def name(self) -> str:
        """What messages call it."""
        ...

    @property
    def group(self) -> int:
        """See `RewardCall.group`."""
        ...


CallT = TypeVar("CallT", bound=FunctionCall)
OutcomeT = TypeVar("OutcomeT")


@dataclasses.dataclass(frozen=True)
class WorkerTask(abc.ABC, Generic[CallT, OutcomeT]):
    """The function that a process calls, and its limits; pickled, as it comes to the process."""

    WHOSE: ClassVar[str]
    """Name of the function in messages."""

    spec: str
    """`path/to/file.py:function`, or the name of one that ships."""
    parameters: Mapping[str, object] = dataclasses.field(default_factory=dict[str, object])
    """Further arguments of it, by name."""
    timeout_s: float = math.inf
    """Seconds that one call may take."""
    max_calls: int | None = None
    """Calls after which the process is replaced."""
    max_memory_gib: float | None = None
    """Address space that it may have."""
    code: bytes | None = dataclasses.field(default=None, repr=False)
    """The function itself, pickled, where Python gave it (`given.py`)."""

    @abc.abstractmethod
    def load(self) -> tuple[Callable[..., object], Wants]:
        """Return the function, and what it is called with; in the process.

        Raises:
            RewardError, UserCodeError: it cannot be had, or called.
        """

    @abc.abstractmethod
    def answer(
        self,
        function: Callable[..., object],
        wants: Wants,
        calls: Sequence[CallT],
        wait: Callable[[Awaitable[object]], object],
    ) -> Sequence[Mapping[str, Any]]:
        """Return what comes of calls, as JSON has it; in the process.

        Args:
            function: that was loaded.
            wants: what it is called with.
            calls: that it is given at once.
            wait: what awaits the result of an async function.
        """

    @abc.abstractmethod
    def read(self, answer: Mapping[str, Any]) -> OutcomeT:
        """Return what an answer says."""

    @abc.abstractmethod
    def raised(self, error: BaseException) -> OutcomeT:
        """Return what an exception of the function is."""

    @abc.abstractmethod
    def ended(self, reason: str, where: str) -> OutcomeT:
        """Return what the end of its process is."""

    @abc.abstractmethod
    def timed_out(self, where: str) -> OutcomeT:
        """Return what it is that it took too long."""


class Work(WorkerTask[RewardCall, Outcome]):
    """A reward function."""

    WHOSE = "the reward function"

    def load(self) -> tuple[Callable[..., object], Wants]:
        """See `WorkerTask.load`."""
        function = loaded(self.code, self.parameters) if self.code else load_reward(self.spec, self.parameters)
        return function, wants_of(function)

    def answer(
        self,
        function: Callable[..., object],
        wants: Wants,
        calls: Sequence[RewardCall],
        wait: Callable[[Awaitable[object]], object],
    ) -> Sequence[Mapping[str, Any]]:
        """See `WorkerTask.answer`."""
        return [dataclasses.asdict(outcome) for outcome in call_reward(function, calls, wants, wait)]

    def read(self, answer: Mapping[str, Any]) -> Outcome:
        """See `WorkerTask.read`.

        >>> Work("rewards.py:reward").read(dataclasses.asdict(Failure("raised", "the reward function raised KeyError")))
        Failure(kind='raised', reason='the reward function raised KeyError', traceback='')
        """
        if "kind" in answer:
            return Failure(**answer)
        feedback, predicted = answer["feedback"], answer["answer"]
        return Scores(tuple(answer["token_scores"]), answer["extras"], feedback=feedback, answer=predicted)

    def raised(self, error: BaseException) -> Outcome:
        """See `WorkerTask.raised`."""
        return raised(error)

    def ended(self, reason: str, where: str) -> Outcome:
        """See `WorkerTask.ended`."""
        return Failure("crashed", reason, where)

    def timed_out(self, where: str) -> Outcome:
        """See `WorkerTask.timed_out`."""
        return timed_out(self.timeout_s, where)


@dataclasses.dataclass(frozen=True, slots=True)
class Effort:
    """What a call took that was answered."""

    took_s: float
    computed_s: float
    """Seconds that cores computed for it, or were to; all where its work may be done by others (`_ELSEWHERE`)."""
    num_bytes: int = 0
    """Memory that its process has for itself; 0 where the system does not say."""


_ELSEWHERE = {"rallypoint.environments.sandbox", "torch"}
"""Modules that compute in other processes, or on a device."""


def main(connection: int, dump: int, driver: int) -> None:
    """Answer until the connection is closed.

    Args:
        connection: descriptor of the driver's.
        dump: descriptor of a file that is told where the function was, at a fatal signal or when the driver asks.
        driver: process id; this process ends with it.
    """
    _end_with(driver)
    faulthandler.enable(dump, all_threads=False)
    faulthandler.register(DUMP_SIGNAL, dump, all_threads=False)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the processes divide the cores between them
    with Connection(connection) as channel:
        _Forks(channel)
        with contextlib.suppress(EOFError, OSError):  # the driver has gone, or wants no more
            _serve(channel)


def _serve(channel: Connection) -> None:
    work: WorkerTask[Any, Any] = pickle.loads(channel.recv_bytes())
    _limit_memory(work.max_memory_gib)
    try:
        function, wants = work.load()
    except (RewardError, UserCodeError) as error:
        return _answer(channel, {"problem": str(error)})
    _answer(channel, dataclasses.asdict(wants))
    wait = ResultLoop(work.timeout_s)
    pid = os.getpid()
    while True:
        calls: Sequence[Any] = pickle.loads(channel.recv_bytes())
        before = _clocks()
        try:
            answers = work.answer(function, wants, calls, wait)
        except BaseException as error:  # noqa: BLE001 - also SystemExit, KeyboardInterrupt: it is this rollout's
            answers = [dataclasses.asdict(work.raised(error))] * len(calls)
        if os.getpid() != pid:
            os._exit(0)  # a fork that came back from the function
        effort = dataclasses.asdict(_effort(before, _clocks()))
        _answer(channel, {"outcomes": answers, "effort": effort})


def _clocks() -> tuple[float, float]:
    """Return the seconds that went by, and those in which this process and its ended children computed or could have.

    A call that waits for a core because the machine is busy is not one that waits.
    """
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    queued_s = _kernel_says("schedstat")[1] * 1e-9
    return time.monotonic(), time.process_time() + children.ru_utime + children.ru_stime + queued_s


def _effort(before: tuple[float, float], after: tuple[float, float]) -> Effort:
    took_s, computed_s = after[0] - before[0], after[1] - before[1]
    _, resident, shared, *_ = _kernel_says("statm")
    own = (resident - shared) * resource.getpagesize()
    return Effort(took_s, took_s if _ELSEWHERE.intersection(sys.modules) else computed_s, own)


def _kernel_says(name: str) -> list[int]:
    """Return the numbers in a file of /proc/self; zeros where there is none."""
    try:
        return [int(number) for number in Path("/proc/self", name).read_text().split()]
    except OSError:
        return [0, 0, 0]


def _limit_memory(max_gib: float | None) -> None:
    if max_gib is not None:
        num_bytes = int(max_gib * 2**30)
        resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))


def _answer(channel: Connection, answer: dict[str, Any]) -> None:
    channel.send_bytes(json.dumps(answer).encode())


class ResultLoop:
    """Awaits the results of async functions, on one loop, so that a client that one call opens serves the next."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._runner: asyncio.Runner | None = None

    def __call__(self, result: Awaitable[object]) -> object:
        """Return what an awaitable comes to.

        Raises:
            DeadlineError: it took too long, and was cancelled.
        """
        import asyncio  # takes longer than the rest of this program

        async def within_deadline() -> object:
            deadline = asyncio.timeout(self._timeout_s)
            try:
                async with deadline:
                    return await result
            except TimeoutError as error:
                if not deadline.expired():
                    raise
                cancelled = error.__cause__ or error
                raise DeadlineError(self._timeout_s, format_user_traceback(cancelled, skip=is_ours)) from None

        self._runner = self._runner or asyncio.Runner()
        return self._runner.run(within_deadline())


def _end_with(driver: int) -> None:
    """Have the kernel end this process with the thread that started it, by whatever death."""
    if sys.platform == "linux":
        import ctypes

        set_death_signal = 1
        ctypes.CDLL(None).prctl(set_death_signal, signal.SIGKILL)
    if os.getppid() != driver:
        os._exit(1)


class _Forks:
    """Ensures that a fork of the user's function neither answers in its place nor outlives this process."""

    def __init__(self, channel: Connection) -> None:
        self._channel = channel
        self._main_thread = threading.get_ident()
        os.register_at_fork(after_in_child=self._detach)

    def _detach(self) -> None:
        self._channel.close()
        if threading.get_ident() == self._main_thread:  # other threads may end sooner than what they forked
            _end_with(os.getppid())
