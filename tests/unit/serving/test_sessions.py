"""Sessions over real HTTP, with a sampler that says what a test wants: what a call continues, and what is refused."""

import contextlib
import itertools
import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from opened_sessions import AGAIN, MESSAGES, START, STOP, TOKENIZER, encoded, output_of, turn_of

from rallypoint.errors import EpisodeError, GenerationError, RowFullError


def test_the_prompts_own_messages_are_its_tokens_and_an_answer_is_never_encoded_again(opened):
    one = opened("4 <|im_end|>", "Four.<|im_end|>")
    first = one.chat(MESSAGES, return_token_ids=True, logprobs=True, temperature=1.0, max_tokens=9)
    choice = first["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "4 "}
    assert (choice["finish_reason"], first["model"], first["system_fingerprint"]) == ("stop", "policy", "version-4")
    assert first["prompt_token_ids"] == list(encoded(START))
    assert choice["token_ids"] == list(encoded("4 <|im_end|>"))
    assert [each["logprob"] for each in choice["logprobs"]["content"]][:2] == [-0.5, -1.5]
    spelled = [dict(reversed(each.items())) for each in (*MESSAGES, choice["message"], AGAIN)]
    one.chat(spelled)
    follows = "\n<|im_start|>user\nNo.<|im_end|>\n<|im_start|>assistant\n"
    assert [tokens for tokens, *_ in one.sampler.asked] == [
        encoded(START),
        encoded(START) + encoded("4 <|im_end|>") + encoded(follows),
    ]
    assert one.sampler.asked[0][1:] == (9, (), 1.0)
    assert one.sampler.asked[1][1:] == (None, (), None)


def test_a_history_that_was_rewritten_begins_anew_and_one_said_twice_goes_on_from_both(opened):
    one = opened("a<|im_end|>", "b<|im_end|>", "c<|im_end|>", "d<|im_end|>")
    one.chat(MESSAGES)
    one.chat([{"role": "user", "content": "A title?"}])
    one.chat([*MESSAGES, {"role": "assistant", "content": "x"}, AGAIN])
    one.chat([*MESSAGES, {"role": "assistant", "content": "a"}, AGAIN])
    rows = [TOKENIZER.decode(tokens) for tokens, *_ in one.sampler.asked]
    assert rows[1] == "<|im_start|>user\nA title?<|im_end|>\n<|im_start|>assistant\n"
    assert rows[2].startswith(START + "x<|im_end|>") or "assistant\nx" in rows[2].replace("<think>\n\n</think>\n\n", "")
    assert rows[3] == START + "a<|im_end|>\n<|im_start|>user\nNo.<|im_end|>\n<|im_start|>assistant\n"


def test_a_stream_has_the_ids_and_logprobs_of_the_whole_answer(opened):
    one = opened("4 <|im_end|>", "4 <|im_end|>")
    fields = {"return_token_ids": True, "logprobs": True}
    whole = one.chat(MESSAGES, **fields)["choices"][0]
    body = {"messages": MESSAGES, "stream": True, "stream_options": {"include_usage": True}, **fields}
    status, streamed = one.post(body)
    *events, done, end = streamed.decode().split("\n\n")
    assert (status, done, end) == (200, "data: [DONE]", "")
    *chunks, usage = [json.loads(event.removeprefix("data: ")) for event in events]
    choices = [chunk["choices"][0] for chunk in chunks]
    assert "".join(choice["delta"]["content"] for choice in choices) == whole["message"]["content"]
    assert [token for choice in choices for token in choice["token_ids"]] == whole["token_ids"]
    said = [entry for choice in choices for entry in choice["logprobs"]["content"]]
    assert said == whole["logprobs"]["content"]
    assert choices[-1]["finish_reason"] == "stop"
    assert usage["usage"]["completion_tokens"] == len(whole["token_ids"])


def test_text_is_sent_while_it_comes_and_a_client_that_goes_in_between_gives_its_call_up(opened):
    import openai

    one = opened()
    one.sampler.held = []
    turn = turn_of("<think>\nHm.\n</think>\n\nFour.<|im_end|>")
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{one.port}/v1", api_key=one.session.key, max_retries=0)
    with ThreadPoolExecutor(1) as thread:
        begun = thread.submit(client.chat.completions.create, model="policy", messages=MESSAGES, stream=True)
        while not one.sampler.held:
            threading.Event().wait(0.01)
        at = itertools.count()
        for _ in turn.response[: -len("our.") - 1]:
            one.sampler.deliver(output_of(turn, next(at)))
        stream = begun.result()
        told = [next(stream).choices[0].delta]
        while not told[-1].content:
            told.append(next(stream).choices[0].delta)
        assert (told[-1].content, told[-1].model_extra["reasoning"]) == ("F", "Hm.")
        one.sampler.deliver(output_of(turn, next(at)))
        assert next(stream).choices[0].delta.content == "o"
        stream.close()
    while not one.sampler.held[0].cancelled():
        threading.Event().wait(0.01)
    assert one.session.failure is None


def test_an_error_after_the_first_token_is_the_last_event(opened):
    one = opened()
    one.sampler.held = []
    with ThreadPoolExecutor(1) as thread:
        begun = thread.submit(one.post, {"messages": MESSAGES, "stream": True})
        while not one.sampler.held:
            threading.Event().wait(0.01)
        one.sampler.deliver(output_of(turn_of("4<|im_end|>"), 0))
        one.sampler.held[0].set_exception(GenerationError("the engine failed"))
        status, streamed = begun.result()
    first, last, end = streamed.decode().split("\n\n")
    assert (status, end) == (200, "")
    assert json.loads(first.removeprefix("data: "))["choices"][0]["delta"]["content"] == "4"
    assert json.loads(last.removeprefix("data: "))["error"]["message"] == "the engine failed"


def test_a_session_is_known_by_its_key_and_takes_token_ids_too(opened):
    one = opened("4<|im_end|>", "5<|im_end|>", "6<|im_end|>")
    assert one.post({"messages": MESSAGES}, path="/v1/chat/completions", key=one.session.key)[0] == 200
    body = {"token_ids": [1, 2], "sampling_params": {"logprobs": 1, "stop_token_ids": [STOP]}}
    for path, key in (
        (f"/sessions/{one.session.key}/inference/v1/generate", None),
        ("/inference/v1/generate", one.session.key),
    ):
        status, answer = one.post(body, path=path, key=key)
        choice = json.loads(answer)["choices"][0]
        assert (status, choice["token_ids"][-1]) == (200, STOP)
        assert choice["logprobs"]["content"][-1]["token"] == f"token_id:{STOP}"
    assert [tokens for tokens, *_ in one.sampler.asked][1:] == [(1, 2), (1, 2)]


def test_a_session_that_has_ended_is_gone_and_an_unknown_key_opens_nothing(opened):
    one, other = opened("a<|im_end|>"), opened("b<|im_end|>")
    one.sessions.close(one.session)
    for path, key in ((None, None), ("/v1/chat/completions", one.session.key)):
        status, error = one.refused({"messages": MESSAGES}, path=path, key=key)
        assert (status, error["code"]) == (410, "session_ended")
    wrong = one.session.key[:-1] + ("0" if one.session.key[-1] != "0" else "1")
    for path, key in ((f"/sessions/{wrong}/v1/chat/completions", None), ("/v1/chat/completions", wrong)):
        assert one.refused({"messages": MESSAGES}, path=path, key=key)[0] == 401
    assert one.refused({"messages": MESSAGES}, path="/v1/chat/completions")[0] == 401
    assert other.chat(MESSAGES)["choices"][0]["message"]["content"] == "b"


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
REFUSED = {
    "model": ({"model": "gpt-4o"}, 404, "model", "only 'policy'"),
    "top_p": ({"top_p": 0.5}, 400, "top_p", "sampled as the run says, with 1.0"),
    "n": ({"n": 2}, 400, "n", "with 1"),
    "stop token": ({"stop_token_ids": [3]}, 400, "stop_token_ids", "which end responses; found [3]"),
    "forced call": ({"tools": TOOLS, "tool_choice": "required"}, 400, "tool_choice", "no call can be promised"),
    "named call": (
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "add"}}},
        400,
        "tool_choice",
        "no call can be promised",
    ),
    "one call": ({"tools": TOOLS, "parallel_tool_calls": False}, 400, "parallel_tool_calls", "use the first call"),
    "image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        400,
        "messages.0.content",
        "type text",
    ),
}


@pytest.mark.parametrize(("fields", "status", "param", "message"), REFUSED.values(), ids=REFUSED)
def test_what_a_rollout_cannot_be_sampled_with_is_refused_by_name(opened, fields, status, param, message):
    one = opened()
    found, error = one.refused({"messages": MESSAGES, **fields})
    assert (found, error["param"]) == (status, param)
    assert message in error["message"]
    assert one.sampler.asked == []


FAILURES = {
    "full": (RowFullError("a row may have 500"), 400, "context_length_exceeded"),
    "rule": (EpisodeError("leave it out"), 400, None),
    "engine": (GenerationError("the engine failed"), 500, None),
}


@pytest.mark.parametrize(("error", "status", "code"), FAILURES.values(), ids=FAILURES)
def test_what_befalls_a_call_is_answered_and_kept_until_one_succeeds(opened, error, status, code):
    one = opened(error, "a<|im_end|>")
    found, answer = one.refused({"messages": MESSAGES})
    assert (found, answer["code"], answer["message"]) == (status, code, str(error))
    assert one.session.failure is error
    one.chat(MESSAGES)
    assert one.session.failure is None


def test_a_history_that_no_row_could_hold_is_refused_before_it_is_encoded(opened, monkeypatch):
    one = opened()
    one.sessions.max_characters = 1000
    monkeypatch.setattr(one.session.chat, "asked", None)
    status, error = one.refused({"messages": [*MESSAGES, {"role": "user", "content": "a" * 1000}]})
    assert (status, error["code"]) == (400, "context_length_exceeded")
    assert "characters, more than any row (1,000)" in error["message"]
    assert isinstance(one.session.failure, RowFullError), "so a rollout that ends with it is counted as too long"


def test_calls_run_at_the_same_time_up_to_a_number(opened):
    one = opened()
    one.sampler.held = []
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(one.post({"messages": MESSAGES})[0]), daemon=True)
        for _ in range(64)
    ]
    for thread in threads:
        thread.start()
    while len(one.sampler.held) < 64:
        threading.Event().wait(0.01)
    status, error = one.refused({"messages": MESSAGES})
    assert (status, error["code"]) == (429, "rate_limit_exceeded")
    for held in one.sampler.held[:63]:
        held.set_result(turn_of("a<|im_end|>"))
    one.sampler.held[63].cancel()
    for thread in threads:
        thread.join()
    assert sorted(found) == [200] * 63 + [410]


def test_a_client_that_goes_gives_its_call_up(opened):
    one = opened()
    one.sampler.held = []
    import http.client

    connection = http.client.HTTPConnection("127.0.0.1", one.port, timeout=60)
    path = f"/sessions/{one.session.key}/v1/chat/completions"
    connection.request("POST", path, json.dumps({"messages": MESSAGES}), {"Content-Type": "application/json"})
    while not one.sampler.held:
        threading.Event().wait(0.01)
    connection.close()
    (held,) = one.sampler.held
    while not held.cancelled():
        threading.Event().wait(0.01)


def test_the_list_of_models_says_how_long_a_row_may_be(opened):
    import http.client

    one = opened()
    connection = http.client.HTTPConnection("127.0.0.1", one.port, timeout=60)
    with contextlib.closing(connection):
        connection.request("GET", f"/sessions/{one.session.key}/v1/models")
        (card,) = json.loads(connection.getresponse().read())["data"]
    assert (card["id"], card["max_model_len"]) == ("policy", 500)


def test_256_sessions_at_once_lose_no_call_and_mix_none_up(opened):
    def play(number):
        one = opened(f"{number}<|im_end|>", f"again {number}<|im_end|>")
        first = one.chat(MESSAGES)["choices"][0]["message"]
        second = one.chat([*MESSAGES, first, AGAIN]) if number % 2 else None
        return first["content"], second and second["choices"][0]["message"]["content"], one.sampler.asked

    with ThreadPoolExecutor(256) as threads:
        played = list(threads.map(play, range(256)))
    for number, (first, second, asked) in enumerate(played):
        assert first == str(number)
        assert second == (f"again {number}" if number % 2 else None)
        assert asked[-1][0][: len(encoded(START))] == encoded(START)
        assert len(asked) == 1 + number % 2


def test_calls_of_tools_are_counted_and_those_that_cannot_be_read(opened_with_tools):
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    calls = '<tool_call>{"name": "look"}</tool_call>', '<tool_call>{"name": </tool_call>'
    one = opened_with_tools("".join(calls) + "<|im_end|>", "Four.<|im_end|>")
    message = one.chat(MESSAGES, tools=tools)["choices"][0]["message"]
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["look"]
    result = {"role": "tool", "tool_call_id": "call00001", "content": "4"}
    one.chat([*MESSAGES, message, result], tools=tools)
    assert (one.session.chat.num_calls, one.session.chat.num_malformed) == (2, 1)
