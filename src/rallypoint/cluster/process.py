"""One process of a pool, and the workers that live in it.

Colocated roles are workers of one process: they take turns on its cores, and may share objects by name
(`WorkerContext.shared`). In this way a rollout worker samples from the same weights that the actor
trains.

Two threads work here. One executes calls, one after another. The other answers `pulse` and `interrupt` while a
call is under way, so that the driver can tell a process that works from one that hangs.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import importlib
import os
import platform
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, TypeVar

from rallypoint import failpoints
from rallypoint.cluster.mesh import Mesh
from rallypoint.cluster.reference import attach
from rallypoint.errors import (
    CacheError,
    CallCancelledError,
    CheckpointError,
    DiskError,
    MembershipLostError,
    ModelError,
    PeerFailedError,
    RallyError,
    WorkerDiedError,
    WorkerError,
)

ResultT = TypeVar("ResultT")
DiedT = TypeVar("DiedT", bound=WorkerDiedError)

_MOST_TEXT = 20_000
"""Most characters of a message or traceback that are sent; the middle of a longer one is left out."""

WAS_ENDED = "it had been ended: its group was shut down, or the runtime"
"""Detail of the error of a call to a process that we ended."""

_INSIST_S = 0.05
"""Seconds after which a call that goes on although it was cancelled is cancelled again."""

_MOST_NOTES = 100
"""Most lines kept until the driver asks; older ones are dropped."""


@dataclasses.dataclass(frozen=True, slots=True)
class WorkerContext:
    """Who a worker is; the first argument of every worker's constructor."""

    role: str
    rank: int
    mesh: Mesh
    """How the ranks of the role are arranged."""
    num_cpus: int
    """Number of cores (and threads) of this process."""
    device: str
    """"cpu", or torch's word for the accelerator that this process holds."""
    shared: dict[str, Any]
    """Objects that the workers of one process share, by a name both know."""
    tick: Callable[[], None] = lambda: None
    """Called by a long method whenever it makes progress: a call's deadline counts from the last tick."""
    say: Callable[[str], None] = print
    """Called, from any thread, with a line for the user; the driver prints it within seconds."""
    start: int | None = None
    """Number of this start of the role, the same for all ranks; rises. None outside of a group."""

    @property
    def num_ranks(self) -> int:
        """Number of workers of the role."""
        return self.mesh.size


@dataclasses.dataclass(frozen=True, slots=True)
class ProcessInfo:
    """Where a process is."""

    node: str
    """The machine's name."""
    node_id: str
    """The machine's identity in its runtime: two machines never share one."""
    pid: int
    devices: tuple[str, ...] = ()
    """Accelerators of this process, by their number on the node."""
    stacks_fd: int = -1
    """Descriptor in that process to which it writes its stacks on SIGUSR1; -1 when it cannot."""


@dataclasses.dataclass(frozen=True, slots=True)
class Invocation:
    """A call as it is sent to one rank, without its arguments."""

    number: int
    """Unique within the driver; rises with every call."""
    role: str
    rank: int
    method: str
    answers: bool
    """Whether the result is wanted; it stays in the process otherwise."""
    step: int | None = None
    """Training step during which the call was made."""
    fails: str = ""
    """How it fails on purpose when it begins; see `rallypoint.failpoints`."""

    def __str__(self) -> str:
        return f"{self.role}.{self.method}"

    def failing(self) -> Self:
        """Return it with the failure that a failpoint wants now, if any."""
        if failpoints.armed is None:
            return self
        return dataclasses.replace(self, fails=failpoints.armed.due(str(self), self))

    def died(self, detail: str, where: ProcessInfo, kind: type[DiedT] = WorkerDiedError) -> DiedT:
        """Return the error for a process that ended during this call."""
        return kind(self.role, self.rank, self.method, detail, step=self.step, node=where.node, pid=where.pid)

    def packed(self) -> bytes:
        """Return it as bytes, which Ray sends five times as fast as an object."""
        step = "" if self.step is None else self.step
        return f"{self.number} {self.rank} {self.answers:d} {step} {self.fails} {self.method} {self.role}".encode()

    @classmethod
    def unpacked(cls, text: bytes) -> Self:
        """Undo `packed`."""
        number, rank, answers, step, fails, method, role = text.decode().split(" ", 6)
        return cls(int(number), role, int(rank), method, answers == "1", int(step) if step else None, fails)


@dataclasses.dataclass(frozen=True, slots=True)
class Pulse:
    """A process's answer to the question whether it is alive."""

    progress: int
    """Counter that rises with every call that begins or ends and with every tick."""
    call: Invocation | None
    """The call it is executing."""
    notes: tuple[str, ...] = ()
    """Lines that its workers have said since it was last asked."""


class WorkerProcess:
    """Holds the workers of one process by role and calls their methods."""

    def __init__(self, num_cpus: int, device: str, preload: Sequence[str] = ()) -> None:
        """Import the modules of `preload`, which workers need, while the driver does other things."""
        for module in preload:
            importlib.import_module(module)
        self._num_cpus, self._device = num_cpus, device
        self._workers: dict[str, Any] = {}
        self._shared: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._ended = threading.Condition(self._lock)
        self._insisting: threading.Thread | None = None
        self._progress = 0
        self._running: Invocation | None = None
        self._thread = 0
        self._cancelled: set[int] = set()
        self._notes: deque[str] = deque(maxlen=_MOST_NOTES)

    def create(
        self, invocation: Invocation, kind: type, mesh: Mesh, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """Make the worker of a role.

        Raises:
            WorkerError: its constructor raised.
        """
        role, rank = invocation.role, invocation.rank

        def say(line: str) -> None:
            self._notes.append(f"{role} rank {rank}: {line}")

        context = WorkerContext(
            role, rank, mesh, self._num_cpus, self._device, self._shared, self._tick, say, invocation.number
        )

        def make() -> None:
            self._workers[role] = kind(context, *args, **kwargs)

        self._execute(invocation, make)

    def call(self, invocation: Invocation, args: tuple[Any, ...], kwargs: Mapping[str, Any], *values: Any) -> Any:
        """Call a method of the worker of a role; `values` are the parts that its arguments refer to.

        Raises:
            WorkerError: the method raised.
            CallCancelledError: the driver no longer waits for it.
        """

        def answer() -> Any:
            if invocation.role not in self._workers:
                raise LookupError(f"there is no {invocation.role} here any more: its group was shut down")
            whole_args, whole_kwargs = attach(args, kwargs, values)
            result = getattr(self._workers[invocation.role], invocation.method)(*whole_args, **whole_kwargs)
            return result if invocation.answers else None

        return self._execute(invocation, answer)

    def retire(self, invocation: Invocation) -> None:
        """Release the worker of a role and what it left for others; a context manager is closed.

        Raises:
            WorkerError: closing it raised.
        """
        worker = self._workers.pop(invocation.role, None)
        for name in [name for name in self._shared if name.startswith(f"{invocation.role}/")]:
            del self._shared[name]
        if isinstance(worker, contextlib.AbstractContextManager):
            self._execute(invocation, lambda: worker.__exit__(None, None, None))

    def pulse(self) -> Pulse:
        """Answer at once, whatever the calls' thread is doing."""
        notes = tuple(self._notes.popleft() for _ in range(len(self._notes)))
        return Pulse(self._progress, self._running, notes)

    def interrupt(self, number: int) -> None:
        """Cancel a call: it does not begin, or is stopped at its next line of Python."""
        with self._lock:
            if number in self._cancelled:
                return
            self._cancelled.add(number)
            if self._stop(number):
                self._insisting = threading.Thread(target=self._insist, args=(number,), daemon=True)
                self._insisting.start()

    def _insist(self, number: int) -> None:
        """Stop a call until it ends: Python drops what is raised in a destructor or a weak reference's callback."""
        with self._lock:
            while self._stop(number):
                self._ended.wait(_INSIST_S)

    def _stop(self, number: int) -> bool:
        """Raise in a call unless it is ending; return whether it is under way. The caller holds the lock."""
        if self._running is None or self._running.number != number:
            return False
        if not _handles_cancellation(self._thread):
            _raise_in(self._thread)
        return True

    def _tick(self) -> None:
        self._progress += 1

    def _execute(self, invocation: Invocation, work: Callable[[], ResultT]) -> ResultT:
        """Do some work that the driver can cancel.

        Raises:
            CallCancelledError: the driver no longer waits for it.
            WorkerError: it raised.
        """
        try:
            return self._work(invocation, work)
        except _CancelledError:
            raise CallCancelledError(str(invocation)) from None
        finally:
            if (insisting := self._insisting) is not None:  # it ends at once, and must not outlive the call
                insisting.join()
                self._insisting = None

    def _work(self, invocation: Invocation, work: Callable[[], ResultT]) -> ResultT:
        """Record the call, execute it, and turn an exception into an error that can cross processes."""
        try:
            with self._lock:
                if invocation.number in self._cancelled:
                    raise _CancelledError  # noqa: TRY301 - as if it had been stopped at its first line of code
                self._running, self._thread = invocation, threading.get_ident()
            self._tick()
            if invocation.fails:
                with failpoints.failing(invocation.fails):
                    return work()
            return work()
        except (_CancelledError, SystemExit):  # a worker that ends its process may do so
            raise
        except BaseException as error:  # noqa: BLE001 - whatever it is must reach the driver with its traceback
            raise _report(invocation, error) from None
        finally:
            with self._lock:
                self._running = None
                _receive()  # a cancellation that came too late must not hit the next call
                self._cancelled.discard(invocation.number)
                self._ended.notify_all()
            self._tick()


class _CancelledError(BaseException):
    """Thrown into the thread of a cancelled call. No Exception, so that a worker's handlers do not swallow it."""


def _handles_cancellation(thread: int) -> bool:
    """Return whether a cancellation brought a thread into an `except`, a `finally` or the end of a `with`."""
    found = sys._current_exceptions().get(thread)
    error = found[1] if isinstance(found, tuple) else found  # with its type and traceback before Python 3.12
    while error is not None and not isinstance(error, _CancelledError):
        error = error.__context__
    return error is not None


def _receive() -> None:
    """Let Python raise here what was sent to this thread: it does so at the next jump back of a loop.

    To take it back (with NULL) would leave CPython 3.11 told to deliver something that is no more, and the first line
    that a debugger, a profiler or coverage traces in this process would never end.
    """
    try:
        for _ in range(2):
            pass
    except _CancelledError:
        pass


def _raise_in(thread: int) -> None:
    """Make a thread raise at its next line of Python.

    Before Python 3.12 a thread that is being started has the id of the thread that starts it, and is found first. It
    would end before it ran, and the starting thread would wait for ever. So nothing is raised during a thread's start,
    which may itself last; `_insist` tries again.
    """
    with threading._active_limbo_lock:  # pyright: ignore[reportAttributeAccessIssue] - nobody else can tell
        if sys.version_info >= (3, 12) or not threading._limbo:  # pyright: ignore[reportAttributeAccessIssue]
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(_CancelledError))


def _report(invocation: Invocation, error: BaseException) -> WorkerError:
    """Describe an exception in words: its class may exist in this process only, and its `str` may raise."""
    cause = str(error) if isinstance(error, RallyError) else "".join(traceback.format_exception_only(error))
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next  # our own frames do not help
    return WorkerError(
        invocation.role,
        invocation.rank,
        invocation.method,
        _shortened(cause.strip()),
        # These say where to look and what to do; a traceback would only distract.
        ""
        if isinstance(error, ModelError | CacheError | CheckpointError | DiskError)
        else _shortened("".join(traceback.format_exception(type(error), error, frames))),
        step=invocation.step,
        pid=os.getpid(),
        node=platform.node(),
        is_consequence=isinstance(error, PeerFailedError | MembershipLostError),
    )


def _shortened(text: str) -> str:
    num_left_out = len(text) - _MOST_TEXT
    if num_left_out <= 0:
        return text
    half = _MOST_TEXT // 2
    return f"{text[:half]}\n... {num_left_out} characters left out ...\n{text[-half:]}"
