"""The tools that ship, the episode that lets the policy call them, and what a config says of both."""

import asyncio
import json
import os
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from rallypoint.config import load_config
from rallypoint.data import Example, Message
from rallypoint.data.tokenizer import make_digits_tokenizer
from rallypoint.environments.given import named
from rallypoint.environments.sandbox import open_sandbox
from rallypoint.environments.shipped.passages import Passages
from rallypoint.environments.shipped.tools import calculator, python, search
from rallypoint.environments.tools import ToolError, Tools, ToolUse
from rallypoint.errors import ConfigError, DataError, EnvironmentFailedError, RowFullError, SandboxError
from rallypoint.prepare.own_functions import own_episode
from rallypoint.prepare.preflight import load_checked
from rallypoint.run.folder import anchored
from rallypoint.run.record import external_inputs
from rallypoint.run.trust import code_named

TOWNS = [
    {"title": "Rome", "text": "The capital of Italy lies on the Tiber."},
    {"title": "Oslo", "text": "The capital of Norway lies at a fjord."},
    {"title": "Tiber", "text": "A river."},
]


def result(tool, asked):
    """Return what the policy is told."""
    try:
        return tool(asked)
    except ToolError as error:
        return str(error)


@pytest.mark.parametrize(
    ("expression", "found"),
    [
        ("2+3*4", "14"),
        (" (7 - 10) / 4 ", "-0.75"),
        ("0.1+0.2", "0.3"),
        ("-3 % 5 + 7 // 2", "5"),
        ("2**100", "1267650600228229401496703205376"),
        ("1/0", "division by zero"),
        ("9**9**9", "a power of more than 4096 bits is too large"),
        ("(-8)**0.5", "the result is not a real number"),
        ("1e308*10", "the result is too large"),
        ("2^3", "'2^3': expected numbers with + - * / // % ** and parentheses"),
        ("__import__('os')", ": expected numbers with"),
        ("True+1", ": expected numbers with"),
        ("((1)" * 20, ": expected numbers with"),
        ("1+" * 120 + "1", "the expression has 241 characters, expected 200 at most"),
    ],
)
def test_the_calculator_computes_numbers_and_nothing_else(expression, found):
    assert found in result(calculator, expression)


@pytest.fixture(scope="module")
def program():
    try:
        open_sandbox()
    except SandboxError as error:
        pytest.skip(f"no sandbox here: {error}")
    return python(time_s=0.5, output_chars=300)


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("x = 6\nx * 7", "42"),
        ("print('a')\nprint('b')", "a\nb"),
        ("```python\n'text'\n```", "'text'"),
        ("x = 1", "the program printed nothing"),
        ("x", "NameError: name 'x' is not defined"),  # nothing is kept of the program before
        ("print('a' * 200, 'b' * 200)", f"{'a' * 150}\n[... 101 characters left out ...]\n{'b' * 150}"),
        ("while True: pass", "the program was ended after 0.5 s of CPU time"),
        ("import sys; sys.exit(3)", "the program ended with status 3"),
        ("import os; os.fork()", "Operation not permitted"),
    ],
)
def test_a_program_says_what_it_prints_and_the_value_of_its_last_line_and_an_error_is_a_result(program, code, found):
    assert result(program, code).endswith(found)


def test_an_error_of_a_program_is_told_with_its_lines_and_none_of_ours(program):
    with pytest.raises(ToolError) as raised:
        python(time_s=0.5)("def half(x):\n    return x / 0\nhalf(1)")
    said = str(raised.value)
    assert said.startswith('Traceback (most recent call last):\n  File "program.py", line 3, in <module>\n    half(1)')
    assert said.endswith("ZeroDivisionError: division by zero")
    with pytest.raises(ToolError, match=r'^File "program.py", line 1\n'):
        python(time_s=0.5)("x = ")


@pytest.fixture
def towns(tmp_path):
    file = tmp_path / "towns.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in TOWNS))
    return file


def test_a_search_returns_the_passages_that_match_best(towns):
    find = search(towns, top_k=1)
    assert find("What is the capital of Norway?") == "[1] Oslo\nThe capital of Norway lies at a fjord."
    assert find('rivers AND ("x') == "[1] Tiber\nA river.", "by stems, and no word is an operator"
    assert [title for title, _ in Passages.of(towns).search("capital", 9)] == ["Rome", "Oslo"]
    assert find("a_fjord").startswith("[1] Oslo"), "an underline ends a word"
    assert [find(""), find("ships")] == ["nothing was found"] * 2
    assert find("the").startswith("[1] "), "common words count where there are no others"


def test_an_index_is_made_once_and_again_when_its_file_changes(towns, monkeypatch):
    Passages.of(towns)
    index = towns.with_name("towns.jsonl.bm25")
    before = index.stat().st_mtime_ns, index.stat().st_ino
    assert len(Passages.of(towns)) == 3
    assert (index.stat().st_mtime_ns, index.stat().st_ino) == before
    towns.write_text(json.dumps(TOWNS[0]) + "\n")
    assert len(Passages.of(towns)) == 1
    assert sorted(file.name for file in towns.parent.iterdir()) == ["towns.jsonl", "towns.jsonl.bm25"]


def test_an_index_is_made_again_for_a_file_of_equal_size_and_time(towns):
    Passages.of(towns)
    before = towns.stat()
    towns.write_text(towns.read_text().replace("fjord", "ocean"))
    os.utime(towns, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert Passages.of(towns).search("ocean", 1)[0][0] == "Oslo"


def test_an_index_that_cannot_be_read_costs_a_rollout_and_says_what_to_do(towns):
    found = Passages.of(towns)
    found.path.write_bytes(b"no index" * 1000)
    with pytest.raises(EnvironmentFailedError, match=r"towns.jsonl.bm25 cannot be read: .*; remove it"):
        found.search("capital", 1)


def test_an_index_without_a_place_is_refused_with_what_to_set(towns, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(towns / "below a file"))
    monkeypatch.setattr(os, "access", lambda *_: False)  # a superuser may write everywhere
    with pytest.raises(DataError, match="neither folder can be written; set XDG_CACHE_HOME to one that can"):
        Passages.of(towns)


def test_an_index_is_shared_by_threads_and_by_a_forked_process(towns):
    found = Passages.of(towns)

    async def side_by_side():
        return await asyncio.gather(*(asyncio.to_thread(found.search, "capital", 1) for _ in range(8)))

    assert asyncio.run(side_by_side()) == [[("Rome", TOWNS[0]["text"])]] * 8
    reading, writing = os.pipe()
    if not (child := os.fork()):
        os.write(writing, found.search("fjord", 1)[0][0].encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reading, 99) == b"Oslo"
    os.close(reading), os.close(writing)


def test_passages_may_be_parquet_or_have_the_title_in_their_first_line(tmp_path):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(TOWNS), tmp_path / "towns.parquet")
    assert Passages.of(tmp_path / "towns.parquet").search("fjord", 1) == [("Oslo", TOWNS[1]["text"])]
    (tmp_path / "wiki.jsonl").write_text(json.dumps({"id": "0", "contents": '"Oslo"\nA town.'}) + "\n")
    assert Passages.of(tmp_path / "wiki.jsonl").search("oslo", 1) == [("Oslo", "A town.")]


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (
            '{"txt": "a"}\n',
            r"passages.jsonl, line 1: expected a column `text`.*found txt; did you mean 'text'",
        ),
        ('{"text": 1}\n', "expected a column `text` with text, found text"),
        ("[\n", "not valid JSON"),
        ("", "has no passages"),
        (None, "cannot be read: No such file"),
    ],
)
def test_passages_that_cannot_be_read_are_named_and_leave_no_index(tmp_path, content, told):
    if content is not None:
        (tmp_path / "passages.jsonl").write_text(content)
    with pytest.raises(DataError, match=told):
        search(tmp_path / "passages.jsonl")
    assert not [*tmp_path.glob("*.bm25*")]


class Scripted:
    """A client whose answers are given; it keeps what it was sent."""

    def __init__(self, *answers):
        self.tokenizer, self.answers, self.sent = make_digits_tokenizer(), [*answers], []

    async def chat(self, messages=(), tools=None, **_):
        self.sent.append([*messages])
        if not self.answers:
            raise RowFullError("full")
        return self.answers.pop(0)


def calling(expression, tool="calculator"):
    arguments = json.dumps({"expression": expression})
    calls = [{"id": "a", "type": "function", "function": {"name": tool, "arguments": arguments}}]
    return {"role": "assistant", "content": "", "tool_calls": calls}


SAID = {"role": "assistant", "content": "5"}


def used(*answers, example=None, **settings):
    client = Scripted(*answers)
    assert asyncio.run(ToolUse(calculator, **settings)(client, example)) is None
    return [[getattr(one, "content", None) or one["content"] for one in sent] for sent in client.sent]


def test_the_policy_calls_tools_until_it_answers():
    assert used(calling("2+3"), calling("1/0"), SAID, calling("7")) == [[], ["5"], ["error: division by zero"]]
    assert used(SAID) == [[]]


def test_the_last_turn_calls_nothing_any_more_and_a_full_row_ends_it():
    assert used(calling("2+3"), calling("4"), SAID, max_turns=2) == [[], ["5"]]
    assert used(calling("2+3")) == [[], ["5"]]
    with pytest.raises(RowFullError):
        used()


def test_a_message_of_the_system_comes_before_the_prompt_and_its_own():
    example = Example("here", "sums", (Message("system", "Be brief."), Message("user", "1+1")), "", "2", {})
    assert used(SAID, example=example, system="Use tools.") == [["Use tools.\n\nBe brief.", "1+1"]]
    assert used(SAID, example=example) == [[]]


MINE = '''
def double(number: int) -> int:
    """Double a number."""
    return 2 * number

def bare(number): ...
'''


@pytest.fixture
def here(tmp_path, towns, monkeypatch):
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def asked(*tools, **more):
    keys = json.dumps({"tools": tools, **more})
    return load_checked("digits-grpo", [f"rollout.episode={keys}"]).config


def test_a_config_names_tools_that_ship_and_functions_of_the_users(here):
    named = asked("calculator", "mine.py:double", {"function": "search", "parameters": {"corpus": "towns.jsonl"}})
    episode = own_episode(named)
    assert isinstance(episode, ToolUse)
    with pytest.raises(RowFullError):
        asyncio.run(episode(Scripted(), None))
    whole = anchored(named)
    assert [one.function for one in whole.rollout.tools] == ["calculator", f"{here}/mine.py:double", "search"]
    assert whole.rollout.tools[2].parameters == {"corpus": f"{here}/towns.jsonl"}
    assert code_named(whole) == {"rollout.episode.tools[1]": f"{here}/mine.py:double"}
    inputs = external_inputs(whole)
    assert {"rollout.episode.tools[1]", "rollout.episode.tools[2].corpus"} <= inputs.keys()


def test_where_programs_are_sent_is_named_as_code_is():
    keys = "rollout.episode={tools: [{function: python, parameters: {url: 'http://there'}}]}"
    assert code_named(load_config("digits-grpo", [keys]).config) == {"rollout.episode.tools[0].url": "http://there"}


@pytest.mark.parametrize(
    ("tools", "told"),
    [
        (["pyton"], r"tools\[0\]: expected 'calculator' or .*found 'pyton'; did you mean 'python'"),
        (["calculator", "mine.py:doubel"], r"tools\[1\]: .*mine.py has no function 'doubel'; did you mean 'double'"),
        (["search"], r"tools\[0\]: search needs the parameter 'corpus'"),
        ([{"function": "search", "parameters": {"corpus": "no.jsonl.gz"}}], "'no.jsonl.gz': .*gunzip it first"),
        (
            [{"function": "python", "parameters": {"times": 3}}],
            "no parameter 'times'; did you mean 'time_s'",
        ),
        ([{"function": "mine.py:double", "parameters": {"number": 3}}], "takes no parameters of a config"),
        (
            [{"function": "calculator", "parameter": {}}],
            r"tools.0.parameter: extra inputs .*text, or an object",
        ),
    ],
)
def test_tools_that_a_config_names_wrongly_are_refused_before_anything_starts(here, tools, told):
    with pytest.raises(ConfigError, match=f"(?s){told}"):
        asked(*tools)


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("{tool: [python]}", "rollout.episode={.*}.*: tool: extra inputs are not permitted"),
        ("{max_turns: 3}", "tools: field required"),
        ("{tools: [calculator], max_turns: 0}", "max_turns: input should be greater than or equal to 1"),
        ("3", "input should be a valid string; expected text, or an object with the keys tools, max_turns, system"),
    ],
)
def test_an_episode_that_is_neither_a_name_nor_tools_says_what_is_expected(value, told):
    with pytest.raises(ConfigError, match=told):
        load_config("digits-grpo", [f"rollout.episode={value}"])


def test_passages_that_are_not_there_are_named_before_anything_starts(here):
    named = asked({"function": "search", "parameters": {"corpus": "no.jsonl"}})
    with pytest.raises(ConfigError, match=r"rollout.episode: the passages no.jsonl cannot be read: No such file"):
        own_episode(named)


def test_a_function_that_cannot_be_described_is_refused(here):
    with pytest.raises(ConfigError, match=r"rollout.episode: .*bare has no docstring"):
        own_episode(asked("mine.py:bare"))


def test_python_gives_such_an_episode_too():
    given = ToolUse(calculator, max_turns=2)
    with named(given) as spec:
        assert own_episode(load_checked("digits-grpo", [f"rollout.episode='{spec}'"]).config) is given


def test_a_key_of_the_episode_is_changed_alone():
    keys = ("rollout.episode={tools: [calculator], max_turns: 3}", "rollout.episode.max_turns=4")
    found = load_config("digits-grpo", keys).config.rollout.tool_use
    assert found.max_turns == 4
    assert [one.function for one in found.tools] == ["calculator"]


def test_tools_are_given_as_text_or_as_objects_in_an_episode_of_ones_own(towns):
    schemas = {one["function"]["name"]: one["function"] for one in Tools(calculator, search(towns))}
    assert schemas["search"]["parameters"]["required"] == ["query"]
    assert "+ - * /" in schemas["calculator"]["parameters"]["properties"]["expression"]["description"]
    assert Path(towns).with_name("towns.jsonl.bm25").is_file()
