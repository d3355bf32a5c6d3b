"""A connection to a server of the Model Context Protocol, MCP, which is made when it is needed, and anew when it broke.

Owns: the thread and event loop that it lives in, when it is given up, and its end. Must not know: tools, rollouts.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import IO, TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

if TYPE_CHECKING:
    from mcp import Client

ResultT = TypeVar("ResultT")
Connect: TypeAlias = "Callable[[Callable[[], None]], contextlib.AbstractAsyncContextManager[Client]]"
"""Connects; what it is given is called if the server hangs up."""

START_S = 120.0
"""Seconds that a server may take to begin; its program may have to be fetched first."""
_CONNECT_S = 10.0
"""Seconds in which a server that listens has to take a connection."""
_PATIENCE_S = 5.0
"""Seconds after which a server that does not end is left behind."""
_MOST_SILENT = 3
"""Calls without an answer, and none with one between, after which a server is taken to hang as a whole."""


def is_in_a_loop() -> bool:
    """Whether an event loop runs in this thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


class _Link:
    """A connection that is made once, and ends when it was left and its last call has returned."""

    def __init__(self, connect: Connect) -> None:
        loop = asyncio.get_running_loop()
        self._client: asyncio.Future[Client] = loop.create_future()
        self._num_calls, self._num_silent, self._is_left, self._is_ending = 0, 0, False, False
        self.held = loop.create_task(self._hold(connect))

    @property
    def is_over(self) -> bool:
        """Whether nothing more can be asked over it."""
        return self._is_left or self.held.done()

    async def ask(self, work: Callable[[Client], Awaitable[ResultT]], timeout_s: float) -> ResultT:
        """Do something with the client; what it raises leaves the connection as it is, unless that is of no use."""
        self._num_calls += 1
        try:
            with _within(START_S, "not ready"):
                async with asyncio.timeout(START_S):
                    client = await asyncio.shield(self._client)
            with _within(timeout_s, "no answer"):
                async with asyncio.timeout(timeout_s):
                    found = await work(client)
        except Exception as error:
            self._num_silent = self._num_silent + 1 if isinstance(error, TimeoutError) else 0
            is_made = self._client.done() and self._client.exception() is None
            if not is_made or is_broken(error) or self._num_silent >= _MOST_SILENT:
                self.leave()
            raise
        else:
            self._num_silent = 0
            return found
        finally:
            self._num_calls -= 1
            if self._is_left and not self._num_calls:
                self.end()

    def leave(self) -> None:
        """Take no further calls; those that are under way may still be answered."""
        self._is_left = True
        if not self._num_calls:
            self.end()

    def end(self) -> None:
        """End it; a second time it would be torn out of what ends its server."""
        if not self._is_ending:
            self._is_ending = True
            self.held.cancel()

    async def _hold(self, connect: Connect) -> None:
        """Connect, and stay so until cancelled: what is entered by a task has to be left by it."""
        try:
            async with connect(self.leave) as connected:
                self._client.set_result(connected)
                await asyncio.Event().wait()
        except BaseException as error:
            if not self._client.done():
                is_cancelled = isinstance(error, asyncio.CancelledError)
                self._client.set_exception(ConnectionError("it was given up") if is_cancelled else error)
                self._client.exception()  # whoever waits for the client raises it, and perhaps nobody does
            if not isinstance(error, Exception):
                raise


class Connection:
    """A link that is made when it is needed, and anew when it is over, in the event loop of a thread of its own."""

    def __init__(self, connect: Connect, name: str, at_once: int) -> None:
        self._connect = connect
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()
        self._places = asyncio.Semaphore(at_once)
        self._links: list[_Link] = []
        """The last one takes calls; others are ending."""
        _OPEN.add(self)

    def begin(self, work: Callable[[Client], Awaitable[ResultT]], timeout_s: float) -> Future[ResultT]:
        """Begin to do something with the client, from any thread; what is returned may raise what work does."""
        return asyncio.run_coroutine_threadsafe(self._work(work, timeout_s), self._loop)

    async def _work(self, work: Callable[[Client], Awaitable[ResultT]], timeout_s: float) -> ResultT:
        async with self._places:
            if not self._links or self._links[-1].is_over:
                self._links = [*(link for link in self._links if not link.held.done()), _Link(self._connect)]
            return await self._links[-1].ask(work, timeout_s)

    def close(self) -> None:
        """End it, and the thread, within a few seconds; an event loop does not wait for that."""
        ended = self.end()
        if threading.current_thread() is not self._thread and not is_in_a_loop():
            concurrent.futures.wait([ended], _PATIENCE_S)

    def end(self) -> Future[None]:
        """Begin to end it."""
        _OPEN.discard(self)
        return asyncio.run_coroutine_threadsafe(self._end(), self._loop)

    async def _end(self) -> None:
        for link in self._links:
            link.end()
        if self._links:
            await asyncio.wait([link.held for link in self._links], timeout=_PATIENCE_S)
        self._loop.call_soon(self._loop.stop)


_OPEN = set[Connection]()


@atexit.register
def _end_all() -> None:
    concurrent.futures.wait([connection.end() for connection in [*_OPEN]], _PATIENCE_S)


def is_broken(error: Exception) -> bool:
    """Whether an error of a call says that the connection is of no use: it was closed, or its session forgotten."""
    from anyio import BrokenResourceError, ClosedResourceError
    from mcp import MCPError
    from mcp.types import CONNECTION_CLOSED, INVALID_REQUEST

    if isinstance(error, MCPError):
        is_forgotten = error.code == INVALID_REQUEST and "session" in error.message.lower()
        return error.code == CONNECTION_CLOSED or is_forgotten
    broken = (BrokenResourceError, ClosedResourceError, OSError)
    return isinstance(error, broken) and not isinstance(error, TimeoutError)


@contextlib.contextmanager
def _within(seconds: float, what: str) -> Iterator[None]:
    """Say what did not come in time."""
    try:
        yield
    except TimeoutError:
        raise TimeoutError(f"{what} within {seconds:g} s") from None


@contextlib.asynccontextmanager
async def started(
    words: Sequence[str], env: Sequence[str], said: IO[str], hung_up: Callable[[], None]
) -> AsyncIterator[Client]:
    """Start a server, and end it with the block."""
    from mcp import Client, StdioServerParameters
    from mcp.client.stdio import stdio_client

    given = {name: os.environ[name] for name in env}
    parameters = StdioServerParameters(command=words[0], args=list(words[1:]), env=given)
    async with Client(_listening(stdio_client(parameters, cast("Any", said)), hung_up)) as client:
        yield client


@contextlib.asynccontextmanager
async def _listening(transport: Any, hung_up: Callable[[], None]) -> AsyncIterator[tuple[Any, Any]]:
    """Pass on what a transport reads, and hear when there will be no more: a server may end between two calls."""
    import anyio

    async def pass_on() -> None:
        with contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):  # as both ends are closed
            async with theirs:
                async for message in read:
                    await theirs.send(message)
        hung_up()

    theirs, ours = anyio.create_memory_object_stream[Any](0)
    async with transport as (read, write), anyio.create_task_group() as tasks:
        tasks.start_soon(pass_on)
        yield ours, write
        tasks.cancel_scope.cancel()


@contextlib.asynccontextmanager
async def reached(url: str, key: str | None) -> AsyncIterator[Client]:
    """Connect to a server that listens."""
    import httpx2
    from mcp import Client
    from mcp.client.streamable_http import streamable_http_client

    headers = {} if key is None else {"Authorization": f"Bearer {os.environ[key]}"}
    timeout = httpx2.Timeout(None, connect=_CONNECT_S)  # each call has a deadline of its own
    async with (
        httpx2.AsyncClient(headers=headers, timeout=timeout) as http,
        Client(streamable_http_client(url, http_client=http)) as client,
    ):
        yield client
