"""Sessions over real HTTP, with a sampler that says what a test wants: what a call continues, and what is refused."""

import contextlib
import json
import threading
from concurrent.futures import Future

import pytest
from chat_templates import QWEN3, make_chat_tokenizer

from rallypoint.data import Message
from rallypoint.errors import EpisodeError, GenerationError, RowFullError
from rallypoint.generation import SamplingParams
from rallypoint.serving import Served, Server, Sessions, bind, make_sessions_app
from rallypoint.types import Turn

TOKENIZER = make_chat_tokenizer(QWEN3)
STOP = TOKENIZER.eos_token_id
ASKED = (Message("system", "Be brief."), Message("user", "2+2?"))
MESSAGES = [{"role": one.role, "content": one.content} for one in ASKED]
START = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
AGAIN = {"role": "user", "content": "No."}


def encoded(text):
    return tuple(TOKENIZER.encode(text, add_special_tokens=False))


class Sampler:
    """Says texts one after another; keeps what it was asked."""

    def __init__(self, *texts):
        self.texts, self.asked, self.held = list(texts), [], None

    def __call__(self, tokens, said, *, max_tokens, stop, temperature):
        self.asked.append((tuple(tokens), max_tokens, tuple(stop), temperature))
        future = Future()
        if self.held is not None:
            self.held.append(future)
            return future
        text = self.texts.pop(0)
        if isinstance(text, Exception):
            future.set_exception(text)
        else:
            future.set_result(turn_of(text))
        return future


def turn_of(text):
    ids = encoded(text)
    numbers = tuple(-0.5 - at for at in range(len(ids)))
    is_cut = ids[-1] != STOP
    return Turn(prompt=(), response=ids, logprobs=numbers, sampled_logprobs=numbers, version=4, truncated=is_cut)


@pytest.fixture
def opened():
    """Return a function that opens a session with a sampler, on one server."""
    served = Served(name="policy", tokenizer=TOKENIZER, stop_tokens=(STOP,), max_tokens=500)
    sessions, listening = Sessions(served), bind("127.0.0.1", 0)
    port = listening.getsockname()[1]
    server = Server(
        make_sessions_app(sessions, max_body_bytes=100_000), listening, grace_s=1, on_end=lambda: None, say=print
    )
    server.start()
    params = SamplingParams(max_new_tokens=50, stop_tokens=(STOP,))
    yield lambda *texts: Opened(sessions, params, port, Sampler(*texts))
    server.stop(lambda: None)


class Opened:
    def __init__(self, sessions, params, port, sampler):
        self.sessions, self.sampler, self.port = sessions, sampler, port
        self.session = sessions.open(sampler, params, encoded(START), ASKED)

    def post(self, body, path=None, key=None):
        import http.client

        path = f"/sessions/{self.session.key}/v1/chat/completions" if path is None else path
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        with contextlib.closing(connection):
            headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
            connection.request("POST", path, json.dumps(body), headers)
            answer = connection.getresponse()
            return answer.status, answer.read()

    def chat(self, messages, **fields):
        status, body = self.post({"messages": messages, **fields})
        assert status == 200, body
        return json.loads(body)

    def refused(self, body, **more):
        status, answer = self.post(body, **more)
        return status, json.loads(answer)["error"]


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


REFUSED = {
    "model": ({"model": "gpt-4o"}, 404, "model", "only 'policy'"),
    "top_p": ({"top_p": 0.5}, 400, "top_p", "sampled as the run says, with 1.0"),
    "n": ({"n": 2}, 400, "n", "with 1"),
    "stop token": ({"stop_token_ids": [3]}, 400, "stop_token_ids", "which end responses here; found [3]"),
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
