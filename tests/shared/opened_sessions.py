"""Sessions on a server in this process, with a sampler that says what a test wants."""

import contextlib
import json
from concurrent.futures import Future

import pytest
from chat_templates import QWEN3, make_chat_tokenizer
from tool_templates import make_tool_tokenizer

from rallypoint.data import Message
from rallypoint.generation import Output, SamplingParams
from rallypoint.serving import Served, Server, Sessions, bind, make_sessions_app
from rallypoint.types import Turn

TOKENIZER = make_chat_tokenizer(QWEN3)
STOP = TOKENIZER.eos_token_id
ASKED = (Message("system", "Be brief."), Message("user", "2+2?"))
MESSAGES = [{"role": one.role, "content": one.content} for one in ASKED]
START = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
AGAIN = {"role": "user", "content": "No."}


def encoded(text, tokenizer=TOKENIZER):
    return tuple(tokenizer.encode(text, add_special_tokens=False))


class Sampler:
    """Says texts one after another; keeps what it was asked."""

    def __init__(self, *texts, tokenizer=TOKENIZER):
        self.texts, self.asked, self.held, self.tokenizer = list(texts), [], None, tokenizer

    def __call__(self, tokens, said, *, max_tokens, stop, temperature, deliver):
        self.asked.append((tuple(tokens), max_tokens, tuple(stop), temperature))
        future = Future()
        if self.held is not None:
            self.held.append(future)
            self.deliver = deliver
            return future
        text = self.texts.pop(0)
        if isinstance(text, Exception):
            future.set_exception(text)
            return future
        turn = turn_of(text, self.tokenizer)
        if deliver is not None:
            for at in range(len(turn.response)):
                deliver(output_of(turn, at))
        future.set_result(turn)
        return future


def turn_of(text, tokenizer=TOKENIZER):
    ids = encoded(text, tokenizer)
    numbers = tuple(-0.5 - at for at in range(len(ids)))
    is_cut = ids[-1] != tokenizer.eos_token_id
    return Turn(prompt=(), response=ids, logprobs=numbers, sampled_logprobs=numbers, version=4, truncated=is_cut)


def output_of(turn, at):
    """The output with one token of a turn."""
    reason = None if at + 1 < len(turn.response) else "length" if turn.truncated else "stop"
    own = {"tokens": turn.response, "logprobs": turn.logprobs, "sampled_logprobs": turn.sampled_logprobs}
    parts = {name: values[at : at + 1] for name, values in own.items()}
    return Output(request_id=1, **parts, version=turn.version, finish_reason=reason)


@pytest.fixture
def opened():
    """Return a function that opens a session with a sampler, on one server."""
    with serving(TOKENIZER) as open_one:
        yield open_one


@pytest.fixture
def opened_with_tools():
    """The same with a template that takes tools."""
    with serving(make_tool_tokenizer("qwen2.5")[0]) as open_one:
        yield open_one


@contextlib.contextmanager
def serving(tokenizer):
    served = Served(name="policy", tokenizer=tokenizer, stop_tokens=(tokenizer.eos_token_id,), max_tokens=500)
    sessions, listening = Sessions(served), bind("127.0.0.1", 0)
    port = listening.getsockname()[1]
    server = Server(
        make_sessions_app(sessions, max_body_bytes=100_000), listening, grace_s=1, on_end=lambda: None, say=print
    )
    server.start()
    params = SamplingParams(max_new_tokens=50, stop_tokens=(tokenizer.eos_token_id,))
    try:
        yield lambda *texts: Opened(sessions, params, port, Sampler(*texts, tokenizer=tokenizer))
    finally:
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
