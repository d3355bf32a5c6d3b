"""What the endpoint of agents adds to a call, by the length of the conversation, beside what sampling the call takes.

    python benchmarks/sessions.py --rounds 15

A session answers at once from a script, over real HTTP, so a call's time is all overhead: reading
the request, finding what it continues, writing the tail in the chat template, encoding it, the answer, of which a
stream is given each token by itself.
Conversations of 1, 16 and 64 turns of 100 characters take turns with sampling: 100 tokens of a model of 3M parameters
behind as many tokens as the longest conversation has. A token is a character, so texts are long for their words.

The row `at once` is a fourth call of 256 sessions, each from a thread of its own: the median, and all of them.
Rows `in process` are what `client.chat` adds to a call there, and `with calls` that where every other answer calls a
tool; behind them is what a rollout of so many turns keeps.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import itertools
import json
import statistics
import sys
import tempfile
import time
import tracemalloc
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "shared"))

from tiny_models import make_tiny_model
from tool_templates import make_tool_tokenizer

from rallypoint.data import Message
from rallypoint.environments.chat import Chat
from rallypoint.generation import NativeEngine, Output, Request, SamplingParams, stream
from rallypoint.model_files import load_policy
from rallypoint.sampling.calls import Calls
from rallypoint.serving import Served, Server, Sessions, bind, make_sessions_app
from rallypoint.types import Turn

TURNS = (1, 16, 64)
NUM_AT_ONCE = 256
APIS = {"chat/completions": "messages", "responses": "input", "messages": "messages"}
"""Path of a call -> the field that has the conversation."""
MORE = {"messages": {"max_tokens": 200}}
ANSWER, QUESTION = "The answer is four. " * 5, "Are you sure? Ask him." * 4 + "Then tell me"


class Conversation:
    """One session and what was said in it."""

    def __init__(self, sessions: Sessions, port: int, num_turns: int, api: str, *, is_streamed: bool) -> None:
        self._api, self._is_streamed = api, is_streamed
        tokenizer, stop = sessions.served.tokenizer, sessions.served.stop_tokens
        response = tuple(tokenizer.encode(ANSWER, add_special_tokens=False)) + stop[:1]
        zeros = (0.0,) * len(response)
        self.turn = Turn(
            prompt=(), response=response, logprobs=zeros, sampled_logprobs=zeros, version=0, truncated=False
        )
        self.num_tokens = 0
        params = SamplingParams(max_new_tokens=200, stop_tokens=stop)
        self._session = sessions.open(self._call, params, (1,), [Message("user", "x")])
        self._port = port
        self.messages = [{"role": "user", "content": QUESTION}]
        for _ in range(num_turns - 1):
            self.ask()
            self.messages += [{"role": "assistant", "content": ANSWER}, {"role": "user", "content": QUESTION}]

    def _call(self, tokens, said, *, deliver, **how) -> Future:
        del said, how
        self.num_tokens = len(tokens)
        for token in self.turn.response if deliver is not None else ():
            numbers = {"logprobs": (0.0,), "sampled_logprobs": (0.0,), "version": 0}
            reason = "stop" if token == self.turn.response[-1] else None
            deliver(Output(request_id=1, tokens=(token,), finish_reason=reason, **numbers))
        answered: Future = Future()
        answered.set_result(self.turn)
        return answered

    def ask(self) -> float:
        """Return the seconds of a call with the whole conversation."""
        body = json.dumps(
            {APIS[self._api]: self.messages, "stream": self._is_streamed, "model": "policy", **MORE.get(self._api, {})}
        )
        path = f"/sessions/{self._session.key}/v1/{self._api}"
        connection = http.client.HTTPConnection("127.0.0.1", self._port)
        with contextlib.closing(connection):
            connection.connect()
            began = time.perf_counter()
            connection.request("POST", path, body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            said = answer.read().decode()
            seconds = time.perf_counter() - began
        assert answer.status == 200, said
        assert self._is_streamed or ANSWER in said
        return seconds


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=15)
    asked = parser.parse_args()
    tokenizer, stops = make_tool_tokenizer("qwen2.5")
    sessions = Sessions(Served(name="policy", tokenizer=tokenizer, stop_tokens=stops, max_tokens=10**6))
    listening = bind("127.0.0.1", 0)
    port = listening.getsockname()[1]
    app = make_sessions_app(sessions, max_body_bytes=10**8)
    server = Server(app, listening, grace_s=1, on_end=lambda: None, say=print)
    server.start()
    try:
        conversations = {
            f"{api}{', stream' if is_streamed else ''} {num}": Conversation(
                sessions, port, num, api, is_streamed=is_streamed
            )
            for api, is_streamed, num in itertools.product(APIS, (False, True), TURNS)
        }
        sampling = Sampling(tokenizer, max(one.num_tokens for one in conversations.values()))
        times: dict[str, list[float]] = {name: [] for name in (*conversations, "sampling")}
        for _ in range(asked.rounds + 1):
            for name, conversation in conversations.items():
                times[name].append(conversation.ask())
            times["sampling"].append(sampling())
        for name, own in times.items():
            print(f"{name:>28}: {statistics.median(own[1:]) * 1e3:8.1f} ms")
        print(f"{'at once':>28}: {at_once(sessions, port)}")
    finally:
        server.stop(lambda: None)
    for name, num in itertools.product(("in process", "with calls"), TURNS):
        seconds, num_bytes = in_process(tokenizer, stops, num, asked.rounds, has_calls=name == "with calls")
        print(f"{f'{name} {num}':>28}: {seconds * 1e3:8.1f} ms, {num_bytes / 2**20:.2f} MiB")


def at_once(sessions: Sessions, port: int) -> str:
    """Return what one call of each of many sessions takes."""
    all_of_them = [Conversation(sessions, port, 4, "chat/completions", is_streamed=False) for _ in range(NUM_AT_ONCE)]
    with ThreadPoolExecutor(NUM_AT_ONCE) as threads:
        began = time.perf_counter()
        times = list(threads.map(Conversation.ask, all_of_them))
        whole = time.perf_counter() - began
    median, slowest = statistics.median(times) * 1e3, max(times)
    return f"{median:8.1f} ms, {NUM_AT_ONCE} calls in {whole:.2f} s, the slowest in {slowest:.2f} s"


def in_process(tokenizer, stops, num_turns: int, rounds: int, *, has_calls: bool) -> tuple[float, int]:
    """Return the median seconds of a turn behind so many, and the bytes that the dialogue and the calls have kept."""
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
    call = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
    tracemalloc.start()
    chat, calls, times = Chat(tokenizer, stops, ((1,), [Message("user", "x")])), Calls((1,)), list[float]()
    messages: list[dict[str, object]] = [{"role": "user", "content": QUESTION}]
    for turn in range(num_turns + rounds):
        says_call = has_calls and turn % 2 == 0
        response = tuple(tokenizer.encode(call if says_call else ANSWER, add_special_tokens=False)) + stops[:1]
        began = time.perf_counter()
        asked = chat.asked(messages, tools if has_calls else None)
        begun = calls.begin(asked.tokens)
        answer = chat.answered(asked, response)
        times.append(time.perf_counter() - began)
        zeros = (0.0,) * len(response)
        numbers = {"logprobs": zeros, "sampled_logprobs": zeros, "version": 0, "truncated": False}
        calls.end(begun, Turn(prompt=(), response=response, **numbers))
        if turn == num_turns - 1:
            kept = tracemalloc.get_traced_memory()[0]
            tracemalloc.stop()
        given = [
            {"role": "tool", "tool_call_id": one["id"], "content": QUESTION} for one in answer.get("tool_calls", ())
        ]
        messages = given or [{"role": "user", "content": QUESTION}]
    return statistics.median(times[num_turns:]), kept


class Sampling:
    """Samples a call."""

    def __init__(self, tokenizer, num_prompt_tokens: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            sizes = {"hidden_size": 256, "num_layers": 4, "intermediate_size": 768, "num_heads": 4}
            make_tiny_model(Path(folder), tokenizer=tokenizer, max_positions=32_768, **sizes)
            self._engine = NativeEngine(load_policy(folder, dtype="float32").model)
        self._prompt = tuple(token % 90 for token in range(num_prompt_tokens))

    def __call__(self) -> float:
        """Return the seconds of one, without those of its prompt."""
        outputs = stream(
            self._engine, Request(tokens=self._prompt, params=SamplingParams(max_new_tokens=101), streamed=True)
        )
        next(outputs)
        began = time.perf_counter()
        for _ in outputs:
            pass
        return time.perf_counter() - began


if __name__ == "__main__":
    main()
