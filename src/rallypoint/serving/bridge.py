"""Between an event loop, where clients are served, and the thread in which an engine steps.

Owns: the number of running responses, and that each of them ends. Must not know: HTTP, texts.

Consumes: requests, from the event loop. Produces: outputs, in the event loop. Waits for: nothing; requests over the
limit are refused. Unblocked by: the engine. The outputs of a slow reader pile up, at most as many as its request may
have tokens, and delay nobody else.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Generic, Protocol, TypeVar

from rallypoint.errors import EndpointError, GenerationError
from rallypoint.generation import Output, Request

ItemT = TypeVar("ItemT")


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
            arrived = Arrivals[tuple[int, Output]]()
            for place, request in enumerate(requests):
                ids.append(self._engine.submit(request, lambda output, place=place: arrived.deliver((place, output))))
            yield _until_ended(arrived, num)
            self.failure = None
        except GenerationError as error:
            self.failure = error
            raise
        finally:
            for request_id in ids:
                self._engine.cancel(request_id)
            self.num_running -= num


async def _until_ended(arrived: Arrivals[tuple[int, Output]], num: int) -> AsyncIterator[list[tuple[int, Output]]]:
    """Yield the outputs of so many requests until all have ended."""
    async for batch in arrived.read():
        for _, output in batch:
            if output.error is not None:
                raise output.error
            num -= output.finish_reason is not None
        yield batch
        if not num:
            arrived.end()


class Arrivals(Generic[ItemT]):
    """What other threads deliver, on its way to the event loop in which this was made."""

    def __init__(self) -> None:
        self._arrived = deque[ItemT]()
        self._has_ended = False
        self._loop, self._is_new = asyncio.get_running_loop(), asyncio.Event()

    def deliver(self, *items: ItemT) -> None:
        """Take items, from any thread."""
        self._arrived.extend(items)
        if not self._is_new.is_set():
            with contextlib.suppress(RuntimeError):  # the loop was closed: nobody reads
                self._loop.call_soon_threadsafe(self._is_new.set)

    def end(self) -> None:
        """Say, from any thread, that there will be no more."""
        self._has_ended = True
        self.deliver()

    async def read(self) -> AsyncIterator[list[ItemT]]:
        """Yield items as they come, those together that have come together, until there will be no more."""
        has_ended = False
        while not has_ended:
            await self._is_new.wait()
            self._is_new.clear()  # before the first is taken, so that none is overlooked
            has_ended, batch = self._has_ended, list[ItemT]()
            while self._arrived:
                batch.append(self._arrived.popleft())
            if batch:
                yield batch
