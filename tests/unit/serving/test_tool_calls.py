"""Tools over HTTP: what the model is told of them, and its calls in whole answers and in streams."""

import copy
import json

import pytest

TEMPLATE = """\
{%- if tools %}{{ "<tool_call>" }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}
{%- if quiet %}{{ "quiet" }}{% endif %}
{%- for message in messages %}{{ message.role[0] + ":" + message.content }}
{%- for call in message.tool_calls or [] %}{{ call.function.name + "(" + call.function.arguments.a | string + ")" }}
{%- endfor %}{{ message.tool_call_id or "" }}{{ "|" }}{% endfor %}
{%- if add_generation_prompt %}{{ "a:" }}{% endif %}"""
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}]
SAYS = 'Well.<tool_call>{"arguments":{"a":1e0},"name":"add"}</tool_call>'
CALL = {"id": "call00001", "type": "function", "function": {"name": "add", "arguments": '{"a": 1.0}'}}


@pytest.fixture
def serve_tools(serve, tokenizer):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = TEMPLATE
    return lambda says=SAYS: serve(says, tokenizer=tokenizer)


def prompt_of(served):
    return served.engine._tokenizer.decode(served.engine.seen[-1].tokens)


def test_an_answer_has_its_calls_and_the_model_was_told_of_the_tools(serve_tools):
    served = serve_tools()
    answer = served.client.chat("2?", tools=TOOLS, return_token_ids=True).json["choices"][0]
    assert answer["message"] == {"role": "assistant", "content": "Well.", "tool_calls": [CALL]}
    assert answer["finish_reason"] == "tool_calls"
    assert len(answer["token_ids"]) == len(SAYS) + 1
    told = prompt_of(served)
    assert told.startswith("<tool_call>{")
    assert json.dumps(PARAMETERS) in told


def test_a_conversation_goes_on_with_the_results(serve_tools):
    served = serve_tools("4")
    messages = [
        {"role": "user", "content": "2?"},
        {"role": "assistant", "content": None, "tool_calls": [{**CALL, "index": 0}]},
        {"role": "tool", "tool_call_id": "call00001", "content": "3"},
    ]
    answer = served.client.post("chat/completions", {"messages": messages, "tools": TOOLS}).json["choices"][0]
    assert answer["message"] == {"role": "assistant", "content": "4"}
    assert answer["finish_reason"] == "stop"
    assert prompt_of(served).endswith("u:2?|a:add(1.0)|t:3call00001|a:")


def test_calls_are_numbered_on_through_a_conversation(serve_tools):
    served = serve_tools()
    messages = [{"role": "user", "content": "2?"}, {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]}]
    answer = served.client.post("chat/completions", {"messages": messages, "tools": TOOLS}).json["choices"][0]
    assert answer["message"]["tool_calls"][0]["id"] == "call00003"


def test_a_stream_has_the_calls_at_its_end(serve_tools):
    served = serve_tools()
    events = served.client.chat("2?", tools=TOOLS, stream=True).events
    deltas = [event["choices"][0]["delta"] for event in events]
    assert "".join(delta["content"] or "" for delta in deltas) == "Well."
    assert [delta["tool_calls"] for delta in deltas if "tool_calls" in delta] == [[{"index": 0, **CALL}]]
    assert deltas[0]["role"] == "assistant"
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("fields", [{}, {"tools": TOOLS, "tool_choice": "none"}])
def test_without_tools_nothing_is_a_call(serve_tools, fields):
    served = serve_tools()
    answer = served.client.chat("2?", **fields).json["choices"][0]
    assert answer["message"] == {"role": "assistant", "content": SAYS}
    assert prompt_of(served) == "u:2?|a:"


def test_a_malformed_call_stays_in_the_text(serve_tools):
    answer = serve_tools("<tool_call>{").client.chat("2?", tools=TOOLS).json["choices"][0]
    assert answer["message"] == {"role": "assistant", "content": "<tool_call>{"}
    assert answer["finish_reason"] == "stop"


def test_text_ends_before_a_stop_string_with_tools_too(serve_tools):
    answer = serve_tools("one, two, three").client.chat("2?", tools=TOOLS, stop=["two"]).json["choices"][0]
    assert answer["message"]["content"] == "one, "


def test_the_template_gets_its_arguments(serve_tools):
    served = serve_tools("4")
    assert served.client.chat("2?", chat_template_kwargs={"quiet": True}).status == 200
    assert prompt_of(served) == "quietu:2?|a:"
