"""A call on the ranks of a group, from sending it until its result or its error is known.

One implementation for both ways to wait: `await call` in a coroutine, `call.result()` anywhere else.
A call that is never waited for can still be passed on by `call.reference`.

A waiter that is stopped (a cancelled task, Ctrl-C) cancels the call, as awaiting an asyncio.Task would; every other
waiter gets that error.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Generic, NoReturn, Protocol, TypeVar, cast

from rallypoint.cluster.mesh import Mesh
from rallypoint.cluster.process import Invocation, ProcessInfo, Pulse
from rallypoint.cluster.reference import ResultReference
from rallypoint.errors import CallCancelledError, WorkerDiedError, WorkerError, WorkerHungError

if TYPE_CHECKING:
    from rallypoint.cluster.watch import Watchdog

_PATIENCE_S = 10.0
"""Seconds that the rank that failed first may take to report, after another one stopped because of it."""

ResultT = TypeVar("ResultT")


class Pending(Protocol):
    """The answer of one rank, which may not exist yet."""

    @property
    def invocation(self) -> Invocation:
        """The call on that rank."""
        ...

    @property
    def process(self) -> Process:
        """The process that the call was sent to."""
        ...

    @property
    def handle(self) -> Any:
        """The runtime's handle, which other processes are sent instead of the value."""
        ...

    def future(self) -> Future[Any]:
        """Bring the value to the driver."""
        ...

    def error(self, raised: BaseException) -> BaseException:
        """Return our error for an exception of the runtime."""
        ...

    def cancel(self) -> None:
        """Stop the call if possible; nobody waits for it any more."""
        ...


class Process(Protocol):
    """The driver's end of one process; calls are executed one after another, in order of submission."""

    @property
    def info(self) -> ProcessInfo:
        """Where the process is."""
        ...

    @property
    def watch(self) -> Watchdog:
        """Looks after calls that take long."""
        ...

    @property
    def ended(self) -> bool:
        """Whether we ended the process; it may also have died by itself."""
        ...

    @property
    def roles(self) -> Mapping[str, int]:
        """The roles that have a worker here, and its rank."""
        ...

    def create(self, invocation: Invocation, kind: type, mesh: Mesh, args: Any, kwargs: Any) -> Pending:
        """See `WorkerProcess.create`."""
        ...

    def call(self, invocation: Invocation, args: tuple[Any, ...], kwargs: Any) -> Pending:
        """See `WorkerProcess.call`; arguments may hold `Fetch`es of this runtime's handles."""
        ...

    def share(self, value: Any) -> Any:
        """Return what to send for a value that several processes of this runtime get, so that it is sent once."""
        ...

    def pulse(self) -> Future[Pulse]:
        """See `WorkerProcess.pulse`."""
        ...

    def retire(self, invocation: Invocation) -> Pending:
        """See `WorkerProcess.retire`."""
        ...

    def release(self, role: str) -> None:
        """Forget a role; a process without one ends, and a pool without one gives its place back."""
        ...

    def end(self) -> None:
        """Take no more calls, and end; the pool keeps the place for another one."""
        ...

    def kill(self, why: WorkerHungError) -> None:
        """End the process now, if possible; calls that it has not answered fail with that error."""
        ...


class Call(Generic[ResultT]):
    """A call on the ranks of a group, and its result once there is one.

    `await call` and `call.result()` raise the same errors:
        WorkerError: a rank raised; the first one's traceback is shown, the calls of the others are cancelled.
        WorkerDiedError: a process ended.
        WorkerHungError: a process gave no sign of life, or a call made no progress until its deadline.
    """

    def __init__(
        self,
        pending: Sequence[Pending],
        answering: Sequence[int],
        join: Callable[[Sequence[Any]], Any],
        deadline_s: float | None,
        sources: Sequence[Process] = (),
    ) -> None:
        self.pending = tuple(pending)
        self.deadline_s = deadline_s
        """Seconds it may take without progress; None for no limit."""
        self.sources = tuple(sources)
        """Processes that compute the results that the arguments refer to."""
        self._answering, self._join = tuple(answering), join
        self._values: list[Any] | None = None
        self._lock = threading.Lock()
        self._outcome: Future[None] | None = None
        self._num_missing = len(self.pending)
        self._consequence: BaseException | None = None

    @property
    def reference(self) -> ResultT:
        """Stands for the result in the arguments of another call; the value goes from worker to worker.

        It has the result's type in the eyes of a type checker only: the driver does not have the value.
        """
        handles = tuple(self.pending[index].handle for index in self._answering)
        makers = (*(one.process for one in self.pending), *self.sources)
        return cast("ResultT", ResultReference(handles, self._join, makers))

    def __await__(self) -> Generator[Any, None, ResultT]:
        return self._awaited().__await__()

    async def _awaited(self) -> ResultT:
        try:
            await asyncio.wrap_future(self._begin())
        finally:
            self.cancel()
        return self._joined()

    def result(self, timeout_s: float | None = None) -> ResultT:
        """Wait for the result.

        Raises:
            TimeoutError: there is none after that many seconds; the call goes on and can be waited for again.
        """
        goes_on = False
        try:
            self._begin().result(timeout_s)
        except TimeoutError:
            goes_on = not self._begin().done()  # else the call's own error happens to be one
            if not goes_on:
                raise
            raise TimeoutError(f"{self} has no result after {timeout_s:g} s; it goes on") from None
        finally:
            if not goes_on:
                self.cancel()
        return self._joined()

    def __str__(self) -> str:
        return str(self.pending[0].invocation)

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{self} is a call and not its result: wait for it, or pass its `reference`")

    def cancel(self) -> None:
        """Stop the ranks that have not answered; does nothing to a call that is over."""
        for one in self.pending:
            if not one.future().done():
                one.cancel()

    def fail(self, error: BaseException) -> None:
        """End the waiting with an error; the first one counts."""
        num_others = sum(not one.future().done() for one in self.pending)
        with self._lock:
            outcome = self._outcome
            if outcome is None or outcome.done():
                return
            if isinstance(error, WorkerError | WorkerDiedError):
                error.num_cancelled = num_others
            outcome.set_exception(error)
        self.pending[0].process.watch.remove(self)

    def _begin(self) -> Future[None]:
        """Start to wait, once."""
        with self._lock:
            if self._outcome is not None:
                return self._outcome
            self._outcome = Future()
            self._outcome.set_running_or_notify_cancel()  # ranks are cancelled, this future never
        self.pending[0].process.watch.add(self)
        for one in self.pending:
            one.future().add_done_callback(lambda done, one=one: self._on_done(one, done))
        return self._outcome

    def _on_done(self, one: Pending, done: Future[Any]) -> None:
        """Count an answer. Runs in a thread of the runtime, so it must not block."""
        raised = done.exception()
        error = None if raised is None else one.error(raised)
        is_consequence = isinstance(error, WorkerError) and error.is_consequence
        if error is not None and not (is_consequence or isinstance(error, CallCancelledError)):
            self.fail(error)
            return
        with self._lock:
            self._num_missing -= 1
            is_first_consequence = error is not None and self._consequence is None
            self._consequence = self._consequence or error
            is_last, consequence, outcome = self._num_missing == 0, self._consequence, self._outcome
            if is_last and consequence is None and outcome is not None and not outcome.done():
                outcome.set_result(None)
        if is_last and consequence is not None:
            self.fail(consequence)
        elif is_last:
            one.process.watch.remove(self)
        elif is_first_consequence and consequence is not None:
            # The rank that failed first reports its own error; if its process cannot, this one is all that is known.
            timer = threading.Timer(_PATIENCE_S, self.fail, [consequence])
            timer.daemon = True
            timer.start()

    def _joined(self) -> ResultT:
        if self._values is None:
            self._values = [one.future().result() for one in self.pending]
        try:
            return cast("ResultT", self._join([self._values[index] for index in self._answering]))
        except TypeError as error:
            raise TypeError(f"{self}: {error}") from error
