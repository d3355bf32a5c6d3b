"""The endpoint over real HTTP: what clients are answered, and what they are refused."""

import dataclasses
import json
from concurrent.futures import ThreadPoolExecutor

import pytest


def said(answer) -> str:
    return answer.json["choices"][0]["message"]["content"]


def streamed(answer) -> str:
    return "".join(event["choices"][0]["delta"]["content"] for event in answer.events if event["choices"])


def test_a_chat_is_answered_in_the_shape_of_openai(serve):
    served = serve("hello")
    answer = served.client.chat("12", model="m", seed=5)
    assert answer.status == 200
    body = answer.json
    assert body["id"].startswith("chatcmpl-")
    assert body["created"] > 1_700_000_000
    assert {k: v for k, v in body.items() if k not in ("id", "created")} == {
        "object": "chat.completion",
        "model": "m",
        "system_fingerprint": "version-7",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "hello"},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {"prompt_tokens": 7, "completion_tokens": 6, "total_tokens": 13},
    }
    (request,) = served.engine.seen
    assert bytes(request.tokens) != b""
    assert request.params.max_new_tokens == 400 - 7
    assert request.params.seed == 5


def test_a_stream_says_the_same_as_the_whole_answer_piece_by_piece(serve):
    text = "naïve 中文 😀!"
    client = serve(text).client
    answer = client.chat(stream=True, stream_options={"include_usage": True})
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert streamed(answer) == said(client.chat()) == text
    assert not any("\ufffd" in json.dumps(event, ensure_ascii=False) for event in answer.events)
    *chunks, usage = answer.events
    assert {chunk["object"] for chunk in answer.events} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in answer.events}) == 1
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert all("role" not in chunk["choices"][0]["delta"] for chunk in chunks[1:])
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert {chunk["usage"] for chunk in chunks} == {None}
    num_tokens = len(text.encode()) + 1
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == num_tokens


def test_all_kinds_of_prompts_are_continued_n_times_each(serve, tokenizer):
    client = serve(lambda request: f"{tokenizer.decode(request.tokens)}{request.sample_index}").client
    ids = [tokenizer.encode("a"), tokenizer.encode("bc")]
    for prompt, expected in (
        ("a", ["a0", "a1"]),
        (["a", "bc"], ["a0", "a1", "bc0", "bc1"]),
        (ids[1], ["bc0", "bc1"]),
        (ids, ["a0", "a1", "bc0", "bc1"]),
    ):
        answer = client.complete(prompt, n=2).json
        assert answer["object"] == "text_completion"
        assert [(c["index"], c["text"]) for c in answer["choices"]] == list(enumerate(expected))
        events = client.complete(prompt, n=2, stream=True).events
        texts = ["".join(e["choices"][0]["text"] for e in events if e["choices"][0]["index"] == i) for i in range(4)]
        assert texts[: len(expected)] == expected
        assert sum(e["choices"][0]["finish_reason"] == "stop" for e in events) == len(expected)


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_logprobs_and_versions_come_when_they_are_asked_for(serve, tokenizer, stream):
    client = serve("é").client
    answer = client.chat(logprobs=True, return_token_ids=True, stream=stream)
    events = answer.events if stream else [answer.json]
    choices = [event["choices"][0] for event in events]
    tokens = [*tokenizer.encode("é"), 256]
    assert [token for choice in choices for token in choice["token_ids"]] == tokens
    assert [version for choice in choices for version in choice["versions"]] == [7, 7, 7]
    entries = [entry for choice in choices for entry in choice["logprobs"]["content"]]
    assert [entry["logprob"] for entry in entries] == [-0.5 - token for token in tokens]
    assert entries[-1] == {"token": "<eos>", "logprob": -256.5, "bytes": list(b"<eos>"), "top_logprobs": []}
    assert entries[0]["bytes"] is None
    assert [p for choice in choices for p in choice["logprobs"]["sampled_logprobs"]] == [-0.25] * 3
    prompt = (choices[0] if stream else answer.json)["prompt_token_ids"]
    assert tokenizer.decode(prompt) == "u:x|a:"
    text = client.complete("x", logprobs=0, return_token_ids=True).json["choices"][0]
    assert text["logprobs"]["token_logprobs"] == [-0.5 - token for token in tokens]
    assert text["prompt_token_ids"] == tokenizer.encode("x")


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_is_cut_off_and_so_is_nothing_else(serve, stream):
    client = serve("one, two, <three>").client
    for stop, expected, reason in (
        ("two", "one, ", "stop"),
        (["<four", ", t"], "one", "stop"),
        ("e>x", "one, two, <three>", "stop"),
        ("one", "", "stop"),
    ):
        answer = client.chat(stop=stop, stream=stream)
        assert (streamed(answer) if stream else said(answer)) == expected
        last = answer.events[-1] if stream else answer.json
        assert last["choices"][0]["finish_reason"] == reason
    answer = client.chat(max_tokens=4, stop="four", stream=stream)
    assert (streamed(answer) if stream else said(answer)) == "one,"
    assert (answer.events[-1] if stream else answer.json)["choices"][0]["finish_reason"] == "length"


def test_every_way_to_sample_reaches_the_engine(serve):
    served = serve()
    fields = {"temperature": 0.5, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.2, "seed": -3}
    served.client.chat(**fields, top_k=4, stop=["a", "b"], max_completion_tokens=9)
    params = dataclasses.asdict(served.engine.seen[0].params)
    assert fields.items() <= params.items()
    assert (params["top_k"], params["stop_strings"], params["max_new_tokens"]) == (4, ("a", "b"), 9)
    assert params["stop_tokens"] == (256,)
    for _ in range(2):
        served.client.complete(top_k=-1)
    first, second = (request.params for request in served.engine.seen[1:])
    assert (first.top_k, first.max_new_tokens) == (None, 16)
    assert first.seed != second.seed


USER = {"role": "user", "content": "x"}


def test_what_cannot_change_the_answer_is_let_pass(serve):
    client = serve("hello").client
    nothing = {"frequency_penalty": 0, "presence_penalty": 0.0, "tools": [], "response_format": {"type": "text"}}
    answer = client.chat(user="me", metadata={"a": "b"}, temperature=None, stop=None, logit_bias=None, **nothing)
    assert said(answer) == "hello"
    reply = {"role": "assistant", "content": "hello", "refusal": None, "tool_calls": None}
    parts = [{"type": "text", "text": "mo"}, {"type": "text", "text": "re"}]
    messages = [USER | {"name": "me"}, reply, {"role": "user", "content": parts}]
    answer = client.post("chat/completions", {"messages": messages, "return_token_ids": True})
    assert answer.json["usage"]["prompt_tokens"] == len("u:x|a:hello|u:more|a:")


def test_the_numbers_of_a_run_are_told_to_who_has_its_key_and_elsewhere_there_are_none(serve):
    client = serve(keys=("secret",), measured=lambda: "rallypoint_step 3\n").client
    assert client.get("/metrics").status == 401
    told = client.get("/metrics", Authorization="Bearer secret")
    assert (told.status, told.body) == (200, b"rallypoint_step 3\n")
    assert told.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert serve().client.get("/metrics").status == 404


def test_models_and_health_are_told_and_other_models_and_routes_are_not_there(serve):
    served = serve()
    client = served.client
    assert [model["id"] for model in client.get("/v1/models").json["data"]] == ["m"]
    assert client.get("/v1/models/m").json["id"] == "m"
    for answer in (client.get("/v1/models/a/b"), client.chat(model="gpt")):
        assert (answer.status, answer.error["code"]) == (404, "model_not_found")
        assert "only 'm'" in answer.error["message"]
    assert client.get("/v2").error["message"] == "GET /v2: Not Found; GET / says what there is"
    assert client.get("/v1/completions").status == 405
    assert client.get("/health").json == {
        "status": "ok", "error": None, "model": "m", "version": 7, "num_running": 0, "max_concurrency": 8,
        "max_request_tokens": 400,
    }  # fmt: skip


def test_weights_that_come_in_the_middle_show_in_the_answer(serve):
    served = serve("ab")
    served.engine.is_frozen = True
    connection = served.client.begin("completions", {"prompt": "x", "stream": True, "return_token_ids": True})
    response = connection.getresponse()
    served.client.wait_until(lambda health: health["num_running"] == 1)
    served.thread.call(lambda engine: engine.load(8, None))
    served.engine.is_frozen = False
    assert b'"system_fingerprint":"version-8"' in response.read()
    assert served.client.get("/health").json["version"] == 8


def test_a_model_without_a_chat_template_still_completes(serve, tokenizer):
    import copy

    plain = copy.deepcopy(tokenizer)
    plain.chat_template = None
    client = serve(tokenizer=plain).client
    answer = client.chat()
    assert (answer.status, "/v1/completions" in answer.error["message"]) == (400, True)
    assert client.complete("x").status == 200


def test_two_hundred_connections_at_once_are_all_answered(serve):
    client = serve("hello", max_concurrency=50).client
    with ThreadPoolExecutor(200) as clients:
        answers = list(clients.map(lambda number: client.chat(stream=number % 2 == 0), range(200)))
    statuses = [answer.status for answer in answers]
    assert set(statuses) <= {200, 429}
    assert statuses.count(200) >= 50
    assert all((streamed(a) if i % 2 == 0 else said(a)) == "hello" for i, a in enumerate(answers) if a.status == 200)
    client.wait_until(lambda health: health["num_running"] == 0)


def test_a_person_who_opens_the_address_reads_what_it_is(serve):
    answer = serve(keys=("secret",)).client.get("/")
    assert (answer.status, answer.headers["content-type"]) == (200, "text/plain; charset=utf-8")
    lines = answer.body.decode().splitlines()
    assert len(lines) == 3
    assert "'m' (version 7 of its weights)" in lines[0]
    assert lines[1].startswith("Clients: base_url=http://127.0.0.1:")
    assert "/v1/chat/completions" in lines[1]
    assert "/health" in lines[2]
