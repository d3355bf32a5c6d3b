"""Tools of MCP servers, against a server that is made with the package `mcp`, over its pipes and over HTTP."""

import asyncio
import gc
import os
import socket
import subprocess
import sys
import time

import pytest

from rallypoint.config import load_config
from rallypoint.environments.shipped.mcp_servers import mcp
from rallypoint.environments.shipped.tools import check_tool
from rallypoint.environments.tools import Tools
from rallypoint.errors import ConfigError, EnvironmentFailedError, UserCodeError
from rallypoint.prepare.own_functions import own_episode
from rallypoint.prepare.preflight import load_checked
from rallypoint.run.trust import code_named

pytest.importorskip("mcp")

SERVER = '''
import os, sys, time
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("towns")

@server.tool()
def where(name: str) -> str:
    """Say where somebody lives."""
    if name == "nobody":
        raise ToolError("nobody lives anywhere")
    return {"Ada": "London"}.get(name, name * 3000)

@server.tool()
def process() -> int:
    """Return the number of this process."""
    return os.getpid()

@server.tool()
def leave() -> str:
    """End this process."""
    print("leaving", file=sys.stderr, flush=True)
    os._exit(3)

@server.tool()
async def hang() -> str:
    """Take long."""
    import asyncio
    await asyncio.sleep(600)

@server.tool()
def given() -> str:
    """Return a key."""
    return os.environ.get("TOWN_KEY", "none") + os.environ.get("NOT_GIVEN", "")

if len(sys.argv) > 1:
    server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
else:
    server.run("stdio")
'''


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("mcp") / "server.py"
    path.write_text(SERVER)
    return path


@pytest.fixture(scope="module")
def towns(file):
    """All tools of a server that this process has started."""
    return mcp(command=[sys.executable, str(file)], output_chars=100)


def call(tools, tool, /, **arguments):
    """Return what the policy is told."""
    asked = {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": tool, "arguments": arguments}}]}
    return asyncio.run(tools.results(asked))[0]["content"]


def test_a_servers_tools_are_described_as_it_describes_them(towns):
    schema = Tools(*towns)[0]["function"]
    assert (schema["name"], schema["description"]) == ("where", "Say where somebody lives.")
    assert schema["parameters"]["properties"]["name"]["type"] == "string"
    assert schema["parameters"]["required"] == ["name"]


def test_results_and_errors_of_a_server_are_told_to_the_policy(towns):
    tools = Tools(*towns)
    assert call(tools, "where", name="Ada") == "London"
    assert "2900 characters left out" in call(tools, "where", name="x")
    assert tools.metrics == {"tool_calls": 2, "tool_errors": 0}
    assert "nobody lives anywhere" in call(tools, "where", name="nobody")
    assert call(tools, "where", town="Ada").startswith("error: ")
    assert "there is no tool 'who'" in call(tools, "who")
    assert tools.num_errors == 3


def test_all_calls_of_a_process_go_over_one_connection_at_the_same_time(towns):
    async def both():
        calls = [asyncio.create_task(Tools(*towns)._call("process", {})) for _ in range(8)]
        return {await one for one in calls}

    assert len(asyncio.run(both())) == 1


def test_a_server_that_ends_costs_a_rollout_and_is_started_again(towns):
    tools = Tools(*towns)
    before = call(tools, "process")
    with pytest.raises(EnvironmentFailedError, match="last said: leaving"):
        call(tools, "leave")
    assert call(tools, "process") != before


def test_a_call_that_hangs_costs_its_rollout_after_its_time_and_no_other_call(file):
    tools = Tools(*mcp(command=[sys.executable, str(file)], tools=["hang", "where"]))
    for tool in tools._tools.values():
        tool._server._timeout_s = 1.0  # the start may take longer

    async def both():
        hanging = asyncio.create_task(tools._call("hang", {}))
        return await tools._call("where", {"name": "Ada"}), await asyncio.gather(hanging, return_exceptions=True)

    said, (failed,) = asyncio.run(both())
    assert said == "London"
    assert isinstance(failed, EnvironmentFailedError)
    assert "no answer within 1 s" in str(failed)


def test_a_server_is_given_the_variables_that_are_named_and_ends_with_its_last_tool(file, monkeypatch):
    monkeypatch.setenv("TOWN_KEY", "secret")
    monkeypatch.setenv("NOT_GIVEN", "this")
    tools = Tools(*mcp(command=[sys.executable, str(file)], env=["TOWN_KEY"]))
    assert call(tools, "given") == "secret"
    process = int(call(tools, "process"))
    os.kill(process, 0)
    del tools
    gc.collect()
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


def test_a_server_is_reached_by_its_url(file):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, str(file), str(port)], stderr=subprocess.DEVNULL)
    try:
        while socket.socket().connect_ex(("127.0.0.1", port)) != 0:
            assert process.poll() is None
            time.sleep(0.1)
        tools = Tools(*mcp(url=f"http://127.0.0.1:{port}/mcp", tools=["where", "process"]))
        assert call(tools, "where", name="Ada") == "London"
        assert call(tools, "process") == str(process.pid)
    finally:
        process.kill()
        process.wait()
    with pytest.raises(EnvironmentFailedError, match=f"'http://127.0.0.1:{port}/mcp' failed"):
        call(tools, "where", name="Ada")


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({}, "expected command or url of an MCP server, one of them"),
        ({"command": "no-such-program-here"}, "'no-such-program-here' cannot be used: FileNotFoundError"),
        ({"command": [sys.executable, "-c", "import no_such"]}, "No module named 'no_such'"),
        ({"url": "http://127.0.0.1:1/mcp"}, "'http://127.0.0.1:1/mcp' cannot be used"),
        ({"command": "a", "env": ["NO_SUCH_KEY"]}, "pass on $NO_SUCH_KEY, which is not set"),
    ],
)
def test_a_server_that_cannot_be_used_is_said_with_the_reason(parameters, said):
    with pytest.raises(UserCodeError) as error:
        mcp(**parameters)
    assert said in str(error.value)


def test_a_tool_that_the_server_lacks_is_said_with_those_that_it_has(file):
    with pytest.raises(UserCodeError, match="has no tool 'when'; expected some of where, process"):
        mcp(command=[sys.executable, str(file)], tools=["when"])


def test_a_config_names_a_server_and_a_folder_of_others_cannot_start_it(file):
    command = f"{sys.executable} {file}"
    tools = f"[calculator,{{function: mcp, parameters: {{command: '{command}', tools: [where]}}}}]"
    config = load_config("digits-grpo", [f"rollout.episode={{tools: {tools}}}"]).config
    assert code_named(config)["rollout.episode.tools[1].command"] == command
    episode = own_episode(config)
    assert [one["function"]["name"] for one in Tools(*episode._functions)] == ["calculator", "where"]
    assert check_tool("mcp", {"url": "http://a/mcp"}) is None
    assert "expected one of them" in check_tool("mcp", {"url": "http://a/mcp", "command": "b"})
    with pytest.raises(ConfigError, match="mcp has no parameter 'comand'; did you mean 'command'"):
        load_checked("digits-grpo", [f"rollout.episode={{tools: {tools.replace('command:', 'comand:')}}}"])
