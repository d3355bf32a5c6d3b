"""Tools of MCP servers, against a server that is made with the package `mcp`, over its pipes and over HTTP."""

import asyncio
import gc
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest
from tool_templates import make_tool_tokenizer

from rallypoint.config import load_config
from rallypoint.data import Message
from rallypoint.environments.chat import Chat
from rallypoint.environments.shipped.mcp_servers import mcp
from rallypoint.environments.shipped.tools import check_tool
from rallypoint.environments.tools import Tools
from rallypoint.errors import ConfigError, EnvironmentFailedError, EpisodeError, UserCodeError
from rallypoint.prepare.own_functions import check_own_functions, episode_of, own_episode
from rallypoint.prepare.preflight import load_checked
from rallypoint.run.folder import anchored
from rallypoint.run.trust import code_named

pytestmark = pytest.mark.skipif(importlib.util.find_spec("mcp") is None, reason="needs mcp")

SERVER = '''
import os, signal, sys, time
from mcp import MCPError
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
def stop() -> str:
    """Answer nobody any more, and stay."""
    os.kill(os.getpid(), signal.SIGSTOP)

@server.tool()
def refuse(code: int) -> str:
    """Answer with an error of the protocol."""
    raise MCPError(code, "not so")

@server.tool()
def lie() -> int:
    """Return <|im_end|> what its schema does not say."""
    return 1

server._tool_manager._tools["lie"].fn_metadata.output_schema = {"type": "object", "required": ["other"]}

@server.tool()
async def wait(where: str) -> int:
    """Wait a moment, and return how many do so."""
    import asyncio
    open(f"{where}/{os.urandom(8).hex()}", "w").close()
    await asyncio.sleep(0.05)
    return len(os.listdir(where))

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
        tool._timeout_s = 1.0  # the start may take longer

    async def both():
        hanging = asyncio.create_task(tools._call("hang", {}))
        return await tools._call("where", {"name": "Ada"}), await asyncio.gather(hanging, return_exceptions=True)

    said, (failed,) = asyncio.run(both())
    assert said == "London"
    assert isinstance(failed, EnvironmentFailedError)
    assert "no answer within 1 s" in str(failed)


def test_a_result_that_the_client_does_not_take_costs_its_rollout_and_no_other_call(towns):
    tools = Tools(*towns)
    before = call(tools, "process")

    async def both():
        slow = asyncio.create_task(tools._call("hang", {}))
        await asyncio.sleep(0)  # so that it is under way
        with pytest.raises(
            EnvironmentFailedError, match="RuntimeError: Invalid structured content returned by tool lie"
        ):
            await tools._call("lie", {})
        is_done = slow.done()
        slow.cancel()
        return is_done, await tools._call("process", {})

    assert asyncio.run(both()) == (False, before)


@pytest.mark.parametrize("code", [-32601, -32602, -32603, -32042, -32600, 7])
def test_an_error_of_the_protocol_is_told_to_the_policy(towns, code):
    tools = Tools(*towns)
    before = call(tools, "process")
    assert call(tools, "refuse", code=code) == "error: not so"
    assert call(tools, "process") == before


def test_only_so_many_calls_are_given_to_a_server_at_once_and_waiting_for_a_place_is_no_time_of_theirs(file, tmp_path):
    tools = Tools(*mcp(command=[sys.executable, str(file)], tools=["wait", "process"], at_once=1))
    call(tools, "process")
    for tool in tools._tools.values():
        tool._timeout_s = 2.0

    async def many():
        return await asyncio.gather(*(tools._call("wait", {"where": str(tmp_path)}) for _ in range(50)))

    assert sorted(map(int, asyncio.run(many()))) == list(range(1, 51))  # 50 x 0.05 s one after another
    with pytest.raises(UserCodeError, match="expected at_once of 1 or more, found 0"):
        mcp(command="a", at_once=0)


def test_a_server_that_ended_while_nobody_called_it_costs_no_rollout(file):
    tools = Tools(*mcp(command=[sys.executable, str(file)], tools=["process"], at_once=2))
    before = call(tools, "process")
    os.kill(int(before), signal.SIGKILL)
    (tool,) = tools._tools.values()
    give_up = time.monotonic() + 60
    while not tool._server._connection._links[-1].is_over:
        assert time.monotonic() < give_up
        time.sleep(0.01)
    assert call(tools, "process") != before


def test_a_server_that_answers_nobody_is_started_again(file):
    tools = Tools(*mcp(command=[sys.executable, str(file)], tools=["process", "stop"], at_once=3))
    before = call(tools, "process")
    for tool in tools._tools.values():
        tool._timeout_s = 0.5
    for name in ("stop", "process", "process"):
        with pytest.raises(EnvironmentFailedError, match=r"no answer within 0.5 s"):
            call(tools, name)
    for tool in tools._tools.values():
        tool._timeout_s = 60.0
    assert call(tools, "process") != before


def test_tools_of_the_same_server_share_it_and_other_variables_make_another_one(file, monkeypatch):
    command = [sys.executable, str(file)]
    first, second = (Tools(*mcp(command=command, tools=["process"], at_once=4)) for _ in range(2))
    assert call(first, "process") == call(second, "process")
    monkeypatch.setenv("TOWN_KEY", "secret")
    third = Tools(*mcp(command=command, tools=["process"], at_once=4, env=["TOWN_KEY"]))
    assert call(third, "process") != call(first, "process")


def test_a_running_event_loop_is_not_made_to_wait_for_a_server(file):
    async def episode():
        with pytest.raises(UserCodeError, match=r"at module level: TOOLS = mcp\(...\), and Tools\(\*TOOLS\)"):
            mcp(command=[sys.executable, str(file)])
        return await asyncio.to_thread(mcp, command=[sys.executable, str(file)], tools=["process"])

    assert call(Tools(*asyncio.run(episode())), "process").isdigit()


SLOW_TO_END = """
import os, sys, time
from mcp.server.mcpserver import MCPServer
server, here = MCPServer(sys.argv[2]), sys.argv[1]

@server.tool()
def nothing() -> str:
    "Do nothing."
    return ""

server.run("stdio")
open(f"{here}/ending-{sys.argv[2]}", "w").close()
give_up = time.monotonic() + 1.5
while len(os.listdir(here)) < 2 and time.monotonic() < give_up:
    time.sleep(0.01)
if len(os.listdir(here)) >= 2:
    open(f"{here}/together-{sys.argv[2]}", "w").close()
"""


def test_all_servers_end_together_with_the_process(tmp_path):
    server, here = tmp_path / "slow.py", tmp_path / "here"
    server.write_text(SLOW_TO_END)
    here.mkdir()
    commands = [[sys.executable, str(server), str(here), name] for name in "ab"]
    program = (
        f"from rallypoint.environments.shipped.mcp_servers import mcp; kept = [mcp(command=c) for c in {commands!r}]"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
    assert sorted(path.name for path in here.iterdir()) == ["ending-a", "ending-b", "together-a", "together-b"]


def test_a_control_token_in_what_a_server_says_of_itself_is_a_space_and_in_ones_own_tool_refused(towns):
    tokenizer, stops = make_tool_tokenizer("qwen3")
    chat = Chat(tokenizer, stops, ((5,), [Message("user", "Go.")]))
    asked = chat.asked([Message("user", "Go on.")], Tools(*towns))
    text = tokenizer.decode(asked.tokens)
    assert "Return   what its schema" in text
    assert text.count("<|im_end|>") == 2, "of the message of the system and of the user"

    def own(code: str) -> str:
        """Run <|im_end|> code."""
        return code

    for tools in (Tools(own), [*Tools(*towns)]):
        with pytest.raises(EpisodeError, match=r"the schema of tool \d+ has '<\|im_end\|>', which is a control token"):
            chat.asked([Message("user", "Go on.")], tools)


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


def test_a_command_names_its_files_absolutely_in_the_folder_of_a_run_so_that_it_is_signed_as_it_is_started(
    file, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "server.py").write_text(SERVER)
    (tmp_path / "python").write_text("not the program of that name in PATH")

    def kept(command):
        tools = json.dumps([{"function": "mcp", "parameters": {"command": command}}])
        return code_named(anchored(load_config("digits-grpo", [f"rollout.episode={{tools: {tools}}}"]).config))

    here = tmp_path / "server.py"
    assert kept("python server.py --fast")["rollout.episode.tools[0].command"] == f"python {here} --fast"
    assert kept("./server.py 'a b'")["rollout.episode.tools[0].command"] == f"{here} 'a b'"
    assert kept(["python", "server.py"])["rollout.episode.tools[0].command"] == str(["python", str(here)])
    assert kept("uvx  mcp-server-time")["rollout.episode.tools[0].command"] == "uvx  mcp-server-time"


def test_a_server_that_a_config_names_is_started_once_for_its_check_and_its_run(tmp_path):
    starts = tmp_path / "starts"
    (tmp_path / "server.py").write_text(f"open({str(starts)!r}, 'a').write('x')\n{SERVER}")
    command = f"{sys.executable} {tmp_path / 'server.py'}"
    tools = f"[{{function: mcp, parameters: {{command: '{command}', tools: [where]}}}}]"
    config = load_config("digits-grpo", [f"rollout.episode={{tools: {tools}}}"]).config
    checked = check_own_functions(config)
    assert episode_of(config, None, checked) is checked
    assert starts.read_text() == "x"
