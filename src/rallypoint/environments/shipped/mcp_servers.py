"""Tools of a server of the Model Context Protocol, MCP. Needs the extra `mcp`.

Owns: the connection to the server, and what becomes of its answers. Must not know: episodes, how a call was spelled.

    Tools(*mcp(command="uvx mcp-server-time"))          # in an episode of one's own

A server has one connection, over which all rollouts of this process call it at the same time. It is made again after
it broke, and ends with the last tool that uses it, or with the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import tempfile
import threading
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import IO, TYPE_CHECKING, Any, TypeVar, cast

from pydantic import TypeAdapter

from rallypoint.environments.tools import DescribedTool, ToolError
from rallypoint.errors import EnvironmentFailedError, UserCodeError, first_line
from rallypoint.extras import why_not

if TYPE_CHECKING:
    from mcp import Client
    from mcp.types import CallToolResult
    from mcp.types import Tool as ServersTool

ResultT = TypeVar("ResultT")

PACKAGE = ("mcp", "mcp")
"""The package, and the extra that has it."""
_START_S = 120.0
"""Seconds that a server may take to begin; its program may have to be fetched first."""
_PATIENCE_S = 5.0
"""Seconds after which a server that does not end is left behind."""
_SHOWN_BYTES = 2000
_ARGUMENTS = TypeAdapter(dict[str, object])


def mcp(
    *,
    command: str | Sequence[str] | None = None,
    url: str | None = None,
    tools: Sequence[str] | None = None,
    timeout_s: float = 30.0,
    output_chars: int = 4000,
    env: Sequence[str] = (),
    key: str | None = None,
) -> list[DescribedTool]:
    """Return the tools of an MCP server; it is started, or asked, now.

    Args:
        command: starts it, and it is spoken to over its standard input and output; or else
        url: at which it listens (Streamable HTTP), such as `http://127.0.0.1:8000/mcp`.
        tools: names of those that the policy is told of; None: all.
        timeout_s: seconds that a result may take; a call that takes longer costs its rollout.
        output_chars: of a result; the middle of a longer one is left out.
        env: names of environment variables that a command is given besides PATH, HOME and the like.
        key: environment variable that holds the key sent to a url as `Authorization: Bearer`.

    Raises:
        UserCodeError: the server cannot be started or reached, or has none of these tools.
    """
    if (command is None) == (url is None):
        raise UserCodeError("expected command or url of an MCP server, one of them")
    try:
        import mcp as package  # noqa: F401 - whether it is there
    except ImportError as error:
        raise UserCodeError(f"the tool mcp {why_not(error, PACKAGE[:1], PACKAGE[1])}") from None
    for name in (*env, *(() if key is None else (key,))):
        if name not in os.environ:
            raise UserCodeError(f"the tool mcp is to pass on ${name}, which is not set; set it")
    words = shlex.split(command) if isinstance(command, str) else list(command or ())
    server = _Server(words, url, timeout_s=timeout_s, env=env, key=key)
    found = {one.name: one for one in server.tools()}
    wanted = found if tools is None else dict.fromkeys(tools)
    if strangers := [name for name in wanted if name not in found]:
        raise UserCodeError(f"{server.name} has no tool {strangers[0]!r}; expected some of {', '.join(found)}")
    if not wanted:
        raise UserCodeError(f"{server.name} has no tools; expected one at least")
    return [_ServersTool(server, found[name], output_chars) for name in wanted]


class _ServersTool(DescribedTool):
    """A tool of a server."""

    def __init__(self, server: _Server, tool: ServersTool, output_chars: int) -> None:
        self._server, self._output_chars = server, output_chars
        self.name = tool.name
        about = tool.description or tool.title or tool.name
        function = {"name": tool.name, "description": about, "parameters": tool.input_schema}
        self.schema = {"type": "function", "function": function}

    def checked(self, arguments: object) -> dict[str, object]:
        """See `DescribedTool`; the server knows what fits."""
        return _ARGUMENTS.validate_python(arguments)

    async def run(self, arguments: Mapping[str, object]) -> str:
        """See `DescribedTool`.

        Raises:
            ToolError: the server says that the call failed, or cannot be made so.
            EnvironmentFailedError: it does not answer, or the connection broke.
        """
        found = await self._server.call(self.name, dict(arguments))
        said = shortened(_text_of(found), self._output_chars)
        if found.is_error:
            raise ToolError(said or "the tool failed, and did not say why")
        return said or "the tool returned nothing"


def _text_of(result: CallToolResult) -> str:
    """Return the texts of a result; of anything else what it is."""
    from mcp.types import EmbeddedResource, TextContent, TextResourceContents

    texts: list[str] = []
    for one in result.content:
        if isinstance(one, TextContent):
            texts.append(one.text)
        elif isinstance(one, EmbeddedResource) and isinstance(one.resource, TextResourceContents):
            texts.append(one.resource.text)
        else:
            texts.append(f"[{one.type} left out]")
    return "\n".join(texts)


class _Server:
    """A server, as all of its tools know it; its connection ends with the last of them."""

    def __init__(
        self, words: Sequence[str], url: str | None, *, timeout_s: float, env: Sequence[str], key: str | None
    ) -> None:
        self.name = f"the MCP server {url or shlex.join(words)!r}"
        self._timeout_s = timeout_s
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115 - as long as the server
        said = self._said

        def connect() -> contextlib.AbstractAsyncContextManager[Client]:
            return _started(words, env, said) if url is None else _reached(url, key, timeout_s)

        self._connection = _Connection(connect, self.name)
        weakref.finalize(self, self._connection.close)

    def tools(self) -> list[ServersTool]:
        """Return what it offers.

        Raises:
            UserCodeError: it cannot be started or reached.
        """

        async def all_tools(client: Client) -> list[ServersTool]:
            page = await client.list_tools()
            found = list(page.tools)
            while page.next_cursor is not None:
                page = await client.list_tools(cursor=page.next_cursor)
                found += page.tools
            return found

        try:
            return self._connection.begin(all_tools, _START_S).result()
        except Exception as error:  # noqa: BLE001 - from its package, the system or the network, and all end here
            raise UserCodeError(f"{self.name} cannot be used: {self._reason(error)}") from None

    async def call(self, name: str, arguments: dict[str, object]) -> CallToolResult:
        """Have a tool called, from any event loop.

        Raises:
            ToolError: it cannot be called so.
            EnvironmentFailedError: there was no answer.
        """
        from mcp import MCPError
        from mcp.types import INVALID_PARAMS

        work = self._connection.begin(lambda client: client.call_tool(name, arguments), self._timeout_s)
        try:
            return await asyncio.wrap_future(work)
        except MCPError as error:
            if error.code == INVALID_PARAMS:
                raise ToolError(error.message) from None
            raise EnvironmentFailedError(f"{self.name} failed: {self._reason(error)}") from error
        except Exception as error:  # from its package, the system or the network
            raise EnvironmentFailedError(f"{self.name} failed: {self._reason(error)}") from error

    def _reason(self, error: BaseException) -> str:
        """Return why it failed, with the last line that it wrote to its standard error."""
        while isinstance(error, BaseExceptionGroup):
            error = cast("BaseExceptionGroup[BaseException]", error).exceptions[0]
        reason = (
            first_line(error) if isinstance(error, TimeoutError) else f"{type(error).__name__}: {first_line(error)}"
        )
        file = self._said.fileno()
        text = os.pread(file, _SHOWN_BYTES, max(0, os.fstat(file).st_size - _SHOWN_BYTES)).decode(errors="replace")
        return f"{reason}; it last said: {text.splitlines()[-1]}" if text.strip() else reason


class _Connection:
    """A connection that is made when it is needed, in the event loop of a thread of its own."""

    def __init__(self, connect: Callable[[], contextlib.AbstractAsyncContextManager[Client]], name: str) -> None:
        self._connect = connect
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()
        self._client: asyncio.Future[Client] = self._loop.create_future()
        self._held: asyncio.Task[None] | None = None
        self._ending: set[asyncio.Task[None]] = set()

    def begin(self, work: Callable[[Client], Awaitable[ResultT]], timeout_s: float) -> Future[ResultT]:
        """Begin to do something with the client, from any thread; what is returned may raise what work does.

        `TimeoutError` and errors of the server leave the connection as it is, as it has others' calls.
        """
        return asyncio.run_coroutine_threadsafe(self._work(work, timeout_s), self._loop)

    async def _work(self, work: Callable[[Client], Awaitable[ResultT]], timeout_s: float) -> ResultT:
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED

        if self._held is None or self._held.done():
            self._client = self._loop.create_future()
            self._held = self._loop.create_task(self._hold(self._client))
        client, held = self._client, self._held
        try:
            with _within(_START_S, "not ready"):
                async with asyncio.timeout(_START_S):
                    connected = await asyncio.shield(client)
            with _within(timeout_s, "no answer"):
                async with asyncio.timeout(timeout_s):
                    return await work(connected)
        except Exception as error:
            is_answer = isinstance(error, MCPError) and error.code != CONNECTION_CLOSED
            if not client.done() or not (is_answer or isinstance(error, TimeoutError)):
                self._give_up(held)
            raise

    def _give_up(self, held: asyncio.Task[None]) -> None:
        """End a connection that is of no use; the next call makes another one at once."""
        self._held = None if self._held is held else self._held
        self._ending.add(held)
        held.add_done_callback(self._ending.discard)
        held.cancel()

    async def _hold(self, client: asyncio.Future[Client]) -> None:
        """Connect, and stay so until cancelled: what is entered by a task has to be left by it."""
        try:
            async with self._connect() as connected:
                client.set_result(connected)
                await asyncio.Event().wait()
        except BaseException as error:
            if not client.done():
                is_cancelled = isinstance(error, asyncio.CancelledError)
                client.set_exception(ConnectionError("it was given up") if is_cancelled else error)
                client.exception()  # whoever waits for the client raises it, and perhaps nobody does
            if not isinstance(error, Exception):
                raise

    def close(self) -> None:
        """End the connection, and the thread, within a few seconds."""
        ended = asyncio.run_coroutine_threadsafe(self._end(), self._loop)
        if threading.current_thread() is not self._thread:  # where the last tool may happen to be collected
            with contextlib.suppress(TimeoutError):
                ended.result(_PATIENCE_S)

    async def _end(self) -> None:
        if self._held is not None:
            self._give_up(self._held)
        if self._ending:
            await asyncio.wait(self._ending, timeout=_PATIENCE_S)
        self._loop.call_soon(self._loop.stop)


@contextlib.contextmanager
def _within(seconds: float, what: str) -> Iterator[None]:
    """Say what did not come in time."""
    try:
        yield
    except TimeoutError:
        raise TimeoutError(f"{what} within {seconds:g} s") from None


@contextlib.asynccontextmanager
async def _started(words: Sequence[str], env: Sequence[str], said: IO[str]) -> AsyncIterator[Client]:
    """Start a server, and end it with the block."""
    from mcp import Client, StdioServerParameters
    from mcp.client.stdio import stdio_client

    given = {name: os.environ[name] for name in env}
    parameters = StdioServerParameters(command=words[0], args=list(words[1:]), env=given)
    async with Client(stdio_client(parameters, cast("Any", said))) as client:
        yield client


@contextlib.asynccontextmanager
async def _reached(url: str, key: str | None, timeout_s: float) -> AsyncIterator[Client]:
    """Connect to a server that listens."""
    import httpx2
    from mcp import Client
    from mcp.client.streamable_http import streamable_http_client

    headers = {} if key is None else {"Authorization": f"Bearer {os.environ[key]}"}
    async with (
        httpx2.AsyncClient(headers=headers, timeout=timeout_s) as http,
        Client(streamable_http_client(url, http_client=http)) as client,
    ):
        yield client


def shortened(text: str, most: int) -> str:
    r"""Return a text of about so many characters at most: the middle of a longer one is left out.

    >>> shortened("one two three four", 8)
    'one \n[... 10 characters left out ...]\nfour'
    """
    left = len(text) - most
    half = most // 2
    return text if left <= 0 else f"{text[:half]}\n[... {left} characters left out ...]\n{text[len(text) - half :]}"
