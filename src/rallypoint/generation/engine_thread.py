"""An engine in a thread of its own, for requests that come from any thread."""

from __future__ import annotations

import contextlib
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from rallypoint.errors import GenerationError, first_line
from rallypoint.generation.protocol import GenerationEngine, Output, Request, SamplingParams

ResultT = TypeVar("ResultT")


class EngineThread:
    """Runs an engine for requests that come from any thread, each of which gets its outputs as they are sampled.

    Consumes: requests. Produces: calls of `deliver`, from the engine's thread. Waits for: requests, while there are
    none. Unblocked by: `submit`, `call` and `close`.

    A step that fails ends all open requests with an error. Whether the engine goes on is decided by a short request of
    our own: the engine is closed only if a step with this request alone fails too. So a bad request cannot end the
    engine.
    """

    def __init__(
        self, engine: GenerationEngine, *, on_failure: Callable[[GenerationError], None] = lambda _: None
    ) -> None:
        """Begin without requests.

        Args:
            engine: stepped by nobody else.
            on_failure: called after a step that failed with what its requests are told, whose cause is what the step
                raised, until it returns; must not block.
        """
        self._engine, self._on_failure = engine, on_failure
        self.has_failed = False
        """Whether the engine was closed after an error."""
        self._lock = threading.RLock()  # a call may be over before its callback is added
        self._deliver: dict[int, Callable[[Output], None]] = {}
        self._is_stepping = False
        self._failure: GenerationError | None = None
        # One thread, which takes steps and calls in turn.
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="generation")

    def submit(self, request: Request, deliver: Callable[[Output], None]) -> int:
        """Queue a request; `deliver` is called with each of its outputs and must neither block nor raise.

        Raises:
            RequestError: see `GenerationEngine.submit`.
            GenerationError: the engine has failed, or was closed.
        """
        with self._lock:
            if self._failure is not None:
                raise self._failure
            request_id = self._engine.submit(request)
            self._deliver[request_id] = deliver
            self._keep_stepping()
        return request_id

    def cancel(self, request_id: int) -> None:
        """Give a request up; its last output is delivered with `finish_reason="cancelled"`."""
        self._engine.cancel(request_id)

    def call(self, change: Callable[[GenerationEngine], ResultT]) -> ResultT:
        """Do something with the engine between two steps, such as `load`, and wait until it is done.

        Raises:
            GenerationError: the engine has failed, or was closed.
            Exception: whatever `change` raises.
        """
        with self._lock:
            if self._failure is not None:
                raise self._failure
            done = self._executor.submit(change, self._engine)
            done.add_done_callback(self._after_call)
        return done.result()

    def close(self) -> None:
        """End the thread after the step that it is in; requests under way fail."""
        self._fail(GenerationError("the engine was closed"))
        self._executor.shutdown()

    def _keep_stepping(self) -> None:
        """Schedule a step, unless one is scheduled already; the lock is held."""
        if not self._is_stepping and self._failure is None:
            self._is_stepping = True
            self._executor.submit(self._take_turn)

    def _take_turn(self) -> None:
        """Take a step, and schedule the next one whatever the outcome."""
        try:
            error = _error_of(self._step)
            if error is not None:
                self._survive(error)
        finally:
            with self._lock:
                self._is_stepping = False
                # A request may have come since. One that sleeps has work and no outputs; `call` with its `wake` comes
                # back.
                if self._engine.has_work and not self._engine.is_asleep:
                    self._keep_stepping()

    def _step(self) -> None:
        for output in self._engine.step():
            with self._lock:
                deliver = self._deliver.get(output.request_id)
                if output.finish_reason is not None:
                    self._deliver.pop(output.request_id, None)
            if deliver is not None:  # after `close`, and to the probe, nobody listens
                _hand_over(deliver, output)

    def _after_call(self, done: Future[ResultT]) -> None:
        """Schedule a step: the engine may have been woken, or cancelled requests may have to end."""
        del done
        with self._lock:
            self._keep_stepping()

    def _survive(self, error: BaseException) -> None:
        """Fail the running requests, and make the engine forget them; give it up if it cannot sample any more."""
        failure = _failure_of("the engine failed and its requests are lost", error)
        self._tell(failure)
        with self._lock:  # no request is accepted until the probe is over: it could make the probe fail
            self._end_all(failure)
            problem = None if self._engine.is_asleep or self._failure is not None else _error_of(self._probe)
            if problem is None:
                return
            failure = _failure_of("the engine failed again, and is given up", problem)
            self.has_failed = True
            self._fail(failure)
        self._tell(failure)

    def _probe(self) -> None:
        """Take a step with a request that every engine can answer, alone; the lock is held.

        Raises:
            Exception: whatever the engine raises.
        """
        request_id = self._engine.submit(Request(tokens=(0,), params=SamplingParams(max_new_tokens=1)))
        if not any(output.request_id == request_id and output.finish_reason for output in self._engine.step()):
            self._engine.cancel(request_id)

    def _tell(self, failure: GenerationError) -> None:
        """Report a failure, and keep no reference to it."""
        with contextlib.suppress(Exception):  # such as a full disk: requests are answered all the same
            self._on_failure(failure)
        failure.__cause__ = None

    def _fail(self, failure: GenerationError) -> None:
        """Refuse everything from now on, and end what is under way."""
        with self._lock:
            self._failure = self._failure or failure
        self._end_all(failure)

    def _end_all(self, failure: GenerationError) -> None:
        """End what is under way."""
        with self._lock:
            open_requests, self._deliver = self._deliver, {}
            for request_id in open_requests:
                self._engine.cancel(request_id)
        for request_id, deliver in open_requests.items():
            _hand_over(deliver, Output.failed(request_id, self._engine.version, failure))


def _error_of(work: Callable[[], None]) -> BaseException | None:
    """Do something, and return what it raises, without what was computed on the way there."""
    try:
        work()
    except BaseException as error:  # noqa: BLE001 - whatever it is, callers wait for a reaction
        seen: list[BaseException] = []
        rest: BaseException | None = error
        while rest is not None and rest not in seen:
            # Otherwise a device without free memory would not get back what the failed step took.
            traceback.clear_frames(rest.__traceback__)
            seen.append(rest)
            rest = rest.__cause__ or rest.__context__
        return error
    return None


def _failure_of(what: str, error: BaseException) -> GenerationError:
    """Return the error that requests get; the original error is its cause."""
    failure = GenerationError(f"{what}: {type(error).__name__}: {first_line(error)}")
    failure.__cause__ = error
    return failure


def _hand_over(deliver: Callable[[Output], None], output: Output) -> None:
    """Deliver an output; a callback that raises must not keep others from theirs."""
    with contextlib.suppress(Exception):
        deliver(output)
