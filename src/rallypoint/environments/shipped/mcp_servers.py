"""Tools of a server of the Model Context Protocol, MCP. Needs the extra `mcp`.

Owns: which servers there are, and what becomes of their answers. Must not know: episodes, how a call was spelled.

    TOOLS = mcp(command="uvx mcp-server-time")          # at module level: the server is started here, and waited for

    async def episode(client, example):
        tools = Tools(*TOOLS)

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
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, cast

from pydantic import TypeAdapter

from rallypoint.environments.shipped.mcp_connection import (
    START_S,
    Connection,
    is_broken,
    is_in_a_loop,
    reached,
    started,
)
from rallypoint.environments.tools import DescribedTool, ToolError
from rallypoint.errors import EnvironmentFailedError, UserCodeError, first_line
from rallypoint.extras import why_not

if TYPE_CHECKING:
    from mcp import Client
    from mcp.types import CallToolResult, Tool as ServersTool


PACKAGE = ("mcp", "mcp")
"""The package, and the extra that has it."""
_SHOWN_BYTES = 2000
_NOT_IN_A_LOOP = (
    "mcp(...) starts a server and waits for it, which would stop all rollouts of this event loop; make its tools once, "
    "at module level: TOOLS = mcp(...), and Tools(*TOOLS) in the episode; in a notebook await asyncio.to_thread(mcp, "
    "command=...)"
)
_ARGUMENTS = TypeAdapter(dict[str, object])


def mcp(
    *,
    command: str | Sequence[str] | None = None,
    url: str | None = None,
    tools: Sequence[str] | None = None,
    timeout_s: float = 30.0,
    at_once: int = 16,
    output_chars: int = 4000,
    env: Sequence[str] = (),
    key: str | None = None,
) -> list[DescribedTool]:
    """Return the tools of an MCP server; it is started, or asked, now. Tools of the same server share it.

    Args:
        command: starts it, and it is spoken to over its standard input and output; or else
        url: at which it listens (Streamable HTTP), such as `http://127.0.0.1:8000/mcp`.
        tools: names of those that the policy is told of; None: all.
        timeout_s: seconds that a result may take; a call that takes longer costs its rollout.
        at_once: calls that the server is given at the same time; others wait, which does not count.
        output_chars: of a result; the middle of a longer one is left out.
        env: names of environment variables that a command is given besides PATH, HOME and the like.
        key: environment variable that holds the key sent to a url as `Authorization: Bearer`.

    Raises:
        UserCodeError: the server cannot be started or reached, or has none of these tools; or an event loop runs here.
    """
    if is_in_a_loop():
        raise UserCodeError(_NOT_IN_A_LOOP)
    if (command is None) == (url is None):
        raise UserCodeError("expected command or url of an MCP server, one of them")
    if at_once < 1:
        raise UserCodeError(f"the tool mcp: expected at_once of 1 or more, found {at_once}")
    try:
        import mcp as package  # noqa: F401 - whether it is there
    except ImportError as error:
        raise UserCodeError(f"the tool mcp {why_not(error, PACKAGE[:1], PACKAGE[1])}") from None
    for name in (*env, *(() if key is None else (key,))):
        if name not in os.environ:
            raise UserCodeError(f"the tool mcp is to pass on ${name}, which is not set; set it")
    words = shlex.split(command) if isinstance(command, str) else list(command or ())
    server = _Server.of(words, url, env, key, at_once)
    found = {one.name: one for one in server.tools()}
    wanted = found if tools is None else dict.fromkeys(tools)
    if strangers := [name for name in wanted if name not in found]:
        raise UserCodeError(f"{server.name} has no tool {strangers[0]!r}; expected some of {', '.join(found)}")
    if not wanted:
        raise UserCodeError(f"{server.name} has no tools; expected one at least")
    return [_ServersTool(server, found[name], timeout_s, output_chars) for name in wanted]


class _ServersTool(DescribedTool):
    """A tool of a server."""

    is_foreign = True

    def __init__(self, server: _Server, tool: ServersTool, timeout_s: float, output_chars: int) -> None:
        self._server, self._timeout_s, self._output_chars = server, timeout_s, output_chars
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
        found = await self._server.call(self.name, dict(arguments), self._timeout_s)
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
        self, words: Sequence[str], url: str | None, env: Sequence[str], key: str | None, at_once: int
    ) -> None:
        self.name = f"the MCP server {url or shlex.join(words)!r}"
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115 - as long as the server
        said = self._said

        def connect(hung_up: Callable[[], None]) -> contextlib.AbstractAsyncContextManager[Client]:
            return started(words, env, said, hung_up) if url is None else reached(url, key)

        self._connection = Connection(connect, self.name, at_once)
        weakref.finalize(self, self._connection.close).atexit = False  # then all of them end together

    @classmethod
    def of(cls, words: Sequence[str], url: str | None, env: Sequence[str], key: str | None, at_once: int) -> _Server:
        """Return the one that is there already for the same words, url and variables, or else a new one."""
        given = tuple((name, os.environ[name]) for name in (*env, *(() if key is None else (key,))))
        same = tuple(words), url, given, key, at_once, os.getcwd()
        with _MAKING:
            if (server := _SERVERS.get(same)) is None:
                server = _SERVERS[same] = cls(words, url, env, key, at_once)
            return server

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
            return self._connection.begin(all_tools, START_S).result()
        except Exception as error:  # noqa: BLE001 - from its package, the system or the network, and all end here
            raise UserCodeError(f"{self.name} cannot be used: {self._reason(error)}") from None

    async def call(self, name: str, arguments: dict[str, object], timeout_s: float) -> CallToolResult:
        """Have a tool called, from any event loop.

        Raises:
            ToolError: the server says that it cannot be called so.
            EnvironmentFailedError: there was no answer, or none that its package takes.
        """
        from mcp import MCPError
        from mcp.types import REQUEST_TIMEOUT

        work = self._connection.begin(lambda client: client.call_tool(name, arguments), timeout_s)
        try:
            return await asyncio.wrap_future(work)
        except Exception as error:  # from its package, the system or the network
            if isinstance(error, MCPError) and error.code != REQUEST_TIMEOUT and not is_broken(error):
                raise ToolError(error.message or "the tool failed, and did not say why") from None
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


_SERVERS: weakref.WeakValueDictionary[tuple[object, ...], _Server] = weakref.WeakValueDictionary()
"""Those that are used, by what they are started with."""
_MAKING = threading.Lock()


def shortened(text: str, most: int) -> str:
    r"""Return a text of about so many characters at most: the middle of a longer one is left out.

    >>> shortened("one two three four", 8)
    'one \n[... 10 characters left out ...]\nfour'
    """
    left = len(text) - most
    half = most // 2
    return text if left <= 0 else f"{text[:half]}\n[... {left} characters left out ...]\n{text[len(text) - half :]}"
