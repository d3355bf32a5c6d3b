"""Between an event loop, where clients are served, and the thread in which an engine steps.

Owns: the number of running responses, and that each of them ends. Must not know: HTTP, texts.

Consumes: requests, from the event loop. Produces: outputs, in the event loop. Waits for: nothing; requests over the
limit are refused. Unblocked by: the engine. The outputs of a slow reader pile up, at most as many as its request may
have tokens, and delay nobody else.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Protocol

from rallypoint.errors import EndpointError, GenerationError
from rallypoint.generation import Output, Request


class Taker(Protocol):
    """Takes requests from any thread, as `EngineThread` does."""

    @property
    def has_failed(self) -> bool:
        """See `EngineThread.has_failed`."""
        ...

    def submit(self, request: Request, deliver: Callable[[Output], None]) -> int:
        """See `EngineThread.submit`."""
        ...

    def cancel(self, request_id: int) -> None:
        """See `EngineThread.cancel`."""
        ...


class Bridge:
    """Passes requests to an engine, and outputs back."""

    def __init__(self, engine: Taker, *, max_concurrency: int) -> None:
        """Allow at most `max_concurrency` running responses."""
        self._engine = engine
        self.max_concurrency = max_concurrency
        self.num_running = 0
        """Responses that are being sampled."""
        self.failure: GenerationError | None = None
        """Why the last requests failed; None after one that succeeded."""

    @property
    def has_failed(self) -> bool:
        """Whether no request will be answered any more."""
        return self._engine.has_failed

    def check_room(self, num: int) -> None:
        """Check that there is room for more responses.

        Raises:
            EndpointError: there is none now, or never.
        """
        most = self.max_concurrency
        if num > most:
            raise EndpointError(400, f"{num} responses are asked for at once, expected at most {most}", param="n")
        if self.num_running + num > most:
            raise EndpointError(
                429,
                f"{self.num_running} of at most {most} responses are under way; {num} more are asked for, try again",
                code="rate_limit_exceeded",
            )

    @contextlib.contextmanager
    def ask(self, requests: Sequence[Request]) -> Iterator[AsyncIterator[list[tuple[int, Output]]]]:
        """Have responses sampled inside the context; those that have not ended when it closes are cancelled.

        Yields batches of new outputs, each with its request's index in `requests`. The iteration ends with the last
        output of the last request, and raises the error of one that failed.

        Raises:
            EndpointError: see `check_room`.
            RequestError: see `GenerationEngine.submit`; nothing is sampled then.
            GenerationError: the engine has failed.
        """
        num = len(requests)
        self.check_room(num)
        self.num_running += num
        ids: list[int] = []
        try:
            outputs = _Outputs(num)
            for place, request in enumerate(requests):
                ids.append(self._engine.submit(request, functools.partial(outputs.deliver, place)))
            yield outputs.read()
            self.failure = None
        except GenerationError as error:
            self.failure = error
            raise
        finally:
            for request_id in ids:
                self._engine.cancel(request_id)
            self.num_running -= num


class _Outputs:
    """Outputs on their way from the engine's thread to the event loop."""

    def __init__(self, num_open: int) -> None:
        self._num_open = num_open
        self._arrived: deque[tuple[int, Output]] = deque()
        self._loop, self._is_new = asyncio.get_running_loop(), asyncio.Event()

    def deliver(self, place: int, output: Output) -> None:
        """Take an output; called in the engine's thread."""
        self._arrived.append((place, output))
        if not self._is_new.is_set():
            with contextlib.suppress(RuntimeError):  # the loop was closed: nobody reads
                self._loop.call_soon_threadsafe(self._is_new.set)

    async def read(self) -> AsyncIterator[list[tuple[int, Output]]]:
        """Yield new outputs until all requests have ended."""
        while self._num_open:
            await self._is_new.wait()
            self._is_new.clear()  # before the first is taken, so that none is overlooked
            batch: list[tuple[int, Output]] = []
            while self._arrived:
                place, output = self._arrived.popleft()
                if output.error is not None:
                    raise output.error
                batch.append((place, output))
                self._num_open -= output.finish_reason is not None
            if batch:
                yield batch
