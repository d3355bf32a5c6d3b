"""OpenAI's Responses and Anthropic's Messages as translations of chat: their real clients, over real HTTP."""

import json

import pytest
from opened_sessions import AGAIN, ASKED, encoded

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
CHAT_TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": SCHEMA}}
ITEM_TOOL = {"type": "function", "name": "add", "description": "Adds.", "parameters": SCHEMA, "strict": True}
BLOCK_TOOL = {"name": "add", "description": "Adds.", "input_schema": SCHEMA}
CALLS = 'Well. <tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>'
TURNS = (f"<think>\nHm.\n</think>\n\n{CALLS}", "4<|im_end|>", "Sure<|im_end|>")
MORE = {"return_token_ids": True}


def chat(client, streamed):
    """The conversation with OpenAI's chat, which the others must be equal to."""
    messages = [{"role": one.role, "content": one.content} for one in ASKED]
    for new in ([{"role": "tool", "tool_call_id": "call00001", "content": "3"}], [AGAIN], []):
        fields = {"model": "policy", "messages": messages, "tools": [CHAT_TOOL], "extra_body": MORE}
        if streamed:
            with client.chat.completions.stream(**fields) as events:
                said = events.get_final_completion().choices[0].message
        else:
            said = client.chat.completions.create(**fields).choices[0].message
        messages += [said, *new]
    return messages[2].tool_calls[0].function.arguments, messages[-1].content


def responses(client, streamed):
    system, asked = (one.content for one in ASKED)
    items = [{"role": "user", "content": asked}]
    results = [{"type": "function_call_output", "call_id": "call00001", "output": "3"}]
    for new in (results, [{"role": "user", "content": [{"type": "input_text", "text": "No."}]}], []):
        fields = {"model": "policy", "instructions": system, "input": items, "tools": [ITEM_TOOL], "extra_body": MORE}
        if streamed:
            with client.responses.stream(**fields) as events:
                said = events.get_final_response()
        else:
            said = client.responses.create(**fields)
        items = [*items, *said.output, *new]
    call = next(item for item in items if getattr(item, "type", "") == "function_call")
    return call.arguments, said.output_text


def messages(client, streamed):
    system, asked = (one.content for one in ASKED)
    said_so_far = [{"role": "user", "content": asked}]
    result = {"type": "tool_result", "tool_use_id": "call00001", "content": [{"type": "text", "text": "3"}]}
    for new in ([result], [{"type": "text", "text": "No."}], None):
        fields = {"model": "policy", "system": system, "messages": said_so_far, "tools": [BLOCK_TOOL]}
        fields |= {"max_tokens": 50, "extra_body": MORE}
        if streamed:
            with client.messages.stream(**fields) as events:
                said = events.get_final_message()
        else:
            said = client.messages.create(**fields)
        said_so_far = [*said_so_far, {"role": "assistant", "content": said.content}, {"role": "user", "content": new}]
    call = next(block for block in said_so_far[1]["content"] if block.type == "tool_use")
    return json.dumps(call.input), said.content[0].text


def openai_client(one):
    import openai  # not while tests are collected, which every worker does: it takes a second

    return openai.OpenAI(base_url=f"http://127.0.0.1:{one.port}/v1", api_key=one.session.key, max_retries=0)


def anthropic_client(one):
    import anthropic  # as openai

    return anthropic.Anthropic(base_url=f"http://127.0.0.1:{one.port}", api_key=one.session.key, max_retries=0)


APIS = {"responses": (responses, openai_client), "messages": (messages, anthropic_client)}


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("api", APIS)
def test_a_conversation_with_tools_is_the_one_that_chat_makes(opened_with_tools, api, streamed):
    talk, make_client = APIS[api]
    usual, other = opened_with_tools(*TURNS), opened_with_tools(*TURNS)
    assert chat(openai_client(usual), streamed) == ('{"a": 1}', "Sure")
    assert talk(make_client(other), streamed) == ('{"a": 1}', "Sure")
    asked = [tokens for tokens, *_ in usual.sampler.asked]
    assert [tokens for tokens, *_ in other.sampler.asked] == asked
    assert asked[1][: len(asked[0]) + 1] == (*asked[0], encoded(TURNS[0], usual.sampler.tokenizer)[0])
    assert all(asked[turn][: len(asked[turn - 1])] == asked[turn - 1] for turn in (1, 2))


@pytest.mark.parametrize("api", APIS)
def test_a_stream_has_reasoning_text_and_calls_in_this_order(opened_with_tools, api):
    one = opened_with_tools(TURNS[0])
    client = APIS[api][1](one)
    if api == "responses":
        with client.responses.stream(model="policy", input="2+2?", tools=[ITEM_TOOL]) as events:
            said = [(event.type, event.delta) for event in events if event.type.endswith(".delta")]
        names = ["reasoning_text.delta", "output_text.delta", "function_call_arguments.delta"]
        names = [f"response.{name}" for name in names]
    else:
        asked = [{"role": "user", "content": "2+2?"}]
        with client.messages.stream(model="policy", max_tokens=9, messages=asked, tools=[BLOCK_TOOL]) as events:
            deltas = [event.delta for event in events if event.type == "content_block_delta"]
        texts = {"thinking_delta": "thinking", "text_delta": "text", "input_json_delta": "partial_json"}
        said = [(delta.type, getattr(delta, texts[delta.type])) for delta in deltas]
        names = [*texts]
    assert [name for name, _ in said] == sorted((name for name, _ in said), key=names.index)
    joined = {name: "".join(text for other, text in said if other == name) for name in names}
    assert joined == dict(zip(names, ("Hm.", "Well. ", '{"a": 1}'), strict=True))


def test_whole_answers_say_how_they_ended_and_what_was_counted(opened):
    one = opened("4 <|im_end|>", "4 ", "4 and<|im_end|>", "4 <|im_end|>", "4 ")
    asked = [{"role": "user", "content": "2+2?"}]
    ask = {"model": "policy", "max_tokens": 9, "messages": asked}
    with anthropic_client(one) as client:
        said = [client.messages.create(**ask, **more) for more in ({}, {}, {"stop_sequences": ["an", " a"]})]
    assert [(one.stop_reason, one.stop_sequence) for one in said] == [
        ("end_turn", None),
        ("max_tokens", None),
        ("stop_sequence", " a"),
    ]
    assert said[2].content[0].text == "4"
    assert (said[0].usage.input_tokens, said[0].usage.output_tokens) == (len(one.sampler.asked[0][0]), 3)
    with openai_client(one) as client:
        logprobs = {"include": ["message.output_text.logprobs"]}
        said = [client.responses.create(model="policy", input="2+2?", max_output_tokens=9, **logprobs) for _ in "ab"]
    assert [one.status for one in said] == ["completed", "incomplete"]
    assert said[1].incomplete_details.reason == "max_output_tokens"
    assert (said[0].usage.input_tokens, said[0].usage.output_tokens) == (len(one.sampler.asked[3][0]), 3)
    assert [one.logprob for one in said[0].output[0].content[0].logprobs] == [-0.5, -1.5, -2.5]


USER = [{"role": "user", "content": "x"}]
PICTURE = {"type": "base64", "media_type": "image/png", "data": "x"}
ADD = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}}
REFUSED = {
    "several items": ("responses", {"n": 2}, "n", "ask several times"),
    "several messages": ("messages", {"n": 2}, "n", "ask several times"),
    "stored": ("responses", {"previous_response_id": "resp_1"}, "previous_response_id", "whole conversation as input"),
    "hosted tool": ("responses", {"tools": [{"type": "web_search"}]}, "tools.0", "expected type function, found 'web"),
    "item": ("responses", {"input": [{"type": "web_search_call"}]}, "input.0", "'web_search_call' are not supported"),
    "image": (
        "responses",
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        "input.0.content",
        "the model reads only text",
    ),
    "format": ("responses", {"text": {"format": {"type": "json_object"}}}, "text", "text is not supported"),
    "limit": ("responses", {"max_output_tokens": 0}, "max_output_tokens", "greater than or equal to 1"),
    "block": (
        "messages",
        {"messages": [{"role": "user", "content": [{"type": "image", "source": PICTURE}]}]},
        "messages.0.content.0",
        "expected a block of type text or tool_result, found 'image'",
    ),
    "server tool": ("messages", {"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools.0", "input_schema"),
    "begun": ("messages", {"messages": [*USER, {"role": "assistant", "content": "a"}]}, "messages", "leave it out"),
    "thinking": ("messages", {"thinking": {"type": "enabled", "budget_tokens": 9}}, "thinking", "chat template"),
    "forced call": ("responses", {"tools": [ADD], "tool_choice": "required"}, "tool_choice", "no call can be promised"),
    "named call": ("responses", {"tool_choice": {"type": "function", "name": "add"}}, "tool_choice", "auto or none"),
    "one call": (
        "responses",
        {"tools": [ADD], "parallel_tool_calls": False},
        "parallel_tool_calls",
        "use the first call",
    ),
    "forced block": ("messages", {"tool_choice": {"type": "any"}}, "tool_choice", "no call can be promised"),
    "named block": ("messages", {"tool_choice": {"type": "tool", "name": "add"}}, "tool_choice", "auto or none"),
    "one block": (
        "messages",
        {
            "tools": [{"name": "add", "input_schema": {"type": "object"}}],
            "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
        },
        "tool_choice.disable_parallel_tool_use",
        "use the first call",
    ),
    "stops": ("messages", {"stop_sequences": [""]}, "stop_sequences", "a string or a list of strings"),
}


@pytest.mark.parametrize(("api", "fields", "param", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_supported_is_named_as_the_client_knows_it(opened, api, fields, param, message):
    one = opened()
    usual = {"input": "x"} if api == "responses" else {"messages": USER, "max_tokens": 9}
    status, error = one.refused({**usual, **fields}, path=f"/sessions/{one.session.key}/v1/{api}")
    assert (status, error["param"]) == (400, param)
    assert message in error["message"]
    assert one.sampler.asked == []


def test_errors_are_those_that_each_client_expects(opened):
    import anthropic
    import openai

    one = opened()
    one.sessions.close(one.session)
    with pytest.raises(openai.APIStatusError, match="session has ended") as gone, openai_client(one) as client:
        client.responses.create(model="policy", input="x")
    assert (gone.value.status_code, gone.value.code) == (410, "session_ended")
    with pytest.raises(anthropic.AuthenticationError, match="no session has this key") as unknown:
        anthropic.Anthropic(base_url=f"http://127.0.0.1:{one.port}", api_key="x", max_retries=0).messages.create(
            model="policy", max_tokens=9, messages=USER
        )
    assert unknown.value.body["type"] == "error"
    assert unknown.value.body["error"]["type"] == "authentication_error"


@pytest.mark.parametrize("api", APIS)
def test_rally_serve_speaks_them_too(serve, api):
    served = serve("hello", keys=("secret",))
    fields = {"input": "x"} if api == "responses" else {"messages": USER, "max_tokens": 9}
    whole = served.client.post(api, fields, **{"x-api-key": "secret"}).json
    streamed = served.client.post(api, {**fields, "stream": True}, Authorization="Bearer secret").body.decode()
    text = whole["output"][0]["content"][0] if api == "responses" else whole["content"][0]
    assert (text["text"], whole["model"]) == ("hello", "m")
    events = [json.loads(event.partition("data: ")[2]) for event in streamed.strip().split("\n\n")]
    deltas = [event["delta"] for event in events if event["type"].endswith("_text.delta")]
    deltas += [event["delta"]["text"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(deltas) == "hello"
    assert events[-1]["type"] == ("response.completed" if api == "responses" else "message_stop")
