"""A server in this process, over a real socket: an engine that says what a test wants, and a client of the stdlib."""

import contextlib
import dataclasses
import functools
import http.client
import json
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import pytest
from opened_sessions import opened, opened_with_tools  # noqa: F401 - fixtures
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rallypoint.errors import RequestError
from rallypoint.generation import EngineThread, Output, Request
from rallypoint.serving import Access, Bridge, Codec, Model, Server, bind, make_app

EOS = 256
TEMPLATE = """\
{%- for message in messages -%}
    {%- if message.role == "tool" -%}{{- raise_exception("no tools here") -}}{%- endif -%}
    {{- message.role[0] + ":" + message.content + "|" -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- "a:" -}}{%- endif -%}
"""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A token a byte, so that most characters beyond ASCII have several; id 256 is <eos>."""
    vocab = {character: number for number, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab={**vocab, "<eos>": EOS}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


class ScriptedEngine:
    """Says what `script` makes of a request and of the tokens so far, a token a step, and ends as a real one does."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, script: Callable[[Request, int], int]) -> None:
        self.version, self.max_request_tokens, self.is_asleep = 7, 400, False
        self.is_frozen = False
        self.error: Exception | None = None
        self.cancelled: list[int] = []
        self.seen: list[Request] = []
        self._tokenizer, self._script = tokenizer, script
        self._running: dict[int, tuple[Request, list[int]]] = {}
        self._gone: deque[int] = deque()
        self._lock, self._next_id = threading.Lock(), 0

    @property
    def has_work(self) -> bool:
        return bool(self._running)

    def submit(self, request: Request) -> int:
        if not request.tokens or not all(0 <= token <= EOS for token in request.tokens):
            raise RequestError(f"prompt {request.prompt_index} cannot be continued")
        with self._lock:
            self._next_id += 1
            self._running[self._next_id] = (request, [])
            self.seen.append(request)
            return self._next_id

    def cancel(self, request_id: int) -> None:
        self._gone.append(request_id)

    def step(self) -> list[Output]:
        if self.error is not None:
            raise self.error
        outputs = []
        while self._gone:
            if self._running.pop(request_id := self._gone.popleft(), None):
                self.cancelled.append(request_id)
                outputs.append(self._output(request_id, [], "cancelled"))
        if self.is_frozen:
            time.sleep(0.001)
            return outputs
        with self._lock:
            running = list(self._running.items())
        for request_id, (request, tokens) in running:
            tokens.append(self._script(request, len(tokens)))
            strings = request.params.stop_strings
            text = self._tokenizer.decode(tokens, skip_special_tokens=True) if strings else ""
            stops = tokens[-1] in request.params.stop_tokens or any(string in text for string in strings)
            reason = "stop" if stops else "length" if len(tokens) >= request.params.max_new_tokens else None
            if request.streamed or reason:
                outputs.append(self._output(request_id, tokens[-1:] if request.streamed else tokens, reason))
            if reason:
                del self._running[request_id]
        return outputs

    def _output(self, request_id: int, tokens: Sequence[int], reason) -> Output:
        return Output(
            request_id=request_id,
            tokens=tuple(tokens),
            logprobs=tuple(-0.5 - token for token in tokens),
            sampled_logprobs=tuple(-0.25 for _ in tokens),
            version=self.version,
            finish_reason=reason,
        )

    def load(self, version, weights) -> None:
        self.version = version

    def sleep(self) -> None:
        self.is_asleep = True

    def wake(self) -> None:
        self.is_asleep = False


@dataclasses.dataclass(frozen=True)
class Answer:
    status: int
    headers: http.client.HTTPMessage
    body: bytes

    @property
    def json(self):
        return json.loads(self.body)

    @property
    def error(self):
        assert self.json.keys() == {"error"}, self.body
        assert self.json["error"].keys() == {"message", "type", "param", "code"}
        return self.json["error"]

    @property
    def events(self):
        """Of a stream, without the last line."""
        lines = self.body.decode().split("\n\n")
        assert lines[-2:] == ["data: [DONE]", ""], lines[-2:]
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


@dataclasses.dataclass(frozen=True)
class Client:
    port: int

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)

    def call(self, method: str, path: str, body: bytes | None = None, **headers: str) -> Answer:
        connection = self.connect()
        with contextlib.closing(connection):
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            return Answer(response.status, response.headers, response.read())

    def get(self, path: str, **headers: str) -> Answer:
        return self.call("GET", path, **headers)

    def post(self, path: str, body: object, **headers: str) -> Answer:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.call("POST", f"/v1/{path}", raw, **{"Content-Type": "application/json", **headers})

    def complete(self, prompt: object = "x", **fields: object) -> Answer:
        return self.post("completions", {"prompt": prompt, **fields})

    def chat(self, text: str = "x", **fields: object) -> Answer:
        return self.post("chat/completions", {"messages": [{"role": "user", "content": text}], **fields})

    def begin(self, path: str, body: object) -> http.client.HTTPConnection:
        """Send a request and leave its answer for later."""
        connection = self.connect()
        connection.request("POST", f"/v1/{path}", json.dumps(body), {"Content-Type": "application/json"})
        return connection

    def wait_until(self, holds: Callable[[dict], bool]) -> None:
        """Wait for something to be true of `/health`; the test's own limit is the end of it."""
        while not holds(self.get("/health").json):
            time.sleep(0.005)


@dataclasses.dataclass
class Served:
    client: Client
    engine: ScriptedEngine
    server: Server
    thread: EngineThread
    said: list[str]
    """Lines about clients that misbehave."""


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


@pytest.fixture
def serve(tokenizer) -> Iterator[Callable[..., Served]]:
    """Return a function that serves an engine that says a text, or what a script makes of each request."""
    with contextlib.ExitStack() as ends:

        def start(
            says="hello",
            *,
            keys=(),
            max_concurrency=8,
            max_body_bytes=100_000,
            patience_s=60.0,
            tokenizer=tokenizer,
            engine=None,
            grace_s=5,
            send_buffer_bytes=None,
            measured=None,
            **more,
        ) -> Served:
            @functools.cache
            def ids_of(text: str) -> list[int]:
                return [*tokenizer.encode(text), EOS]

            def said(request: Request, position: int) -> int:
                return ids_of(says if isinstance(says, str) else says(request))[position]

            stops = (EOS,) if engine is None else (tokenizer.eos_token_id,)
            engine = engine or ScriptedEngine(tokenizer, said)
            thread = EngineThread(engine)
            bridge = Bridge(thread, max_concurrency=max_concurrency)
            model = Model(name="m", engine=engine, bridge=bridge, codec=Codec(tokenizer), stop_tokens=stops)
            access = Access(keys=keys, hosts=("127.0.0.1", "::1"), max_body_bytes=max_body_bytes, patience_s=patience_s)
            listening = bind("127.0.0.1", 0)
            if send_buffer_bytes is not None:
                listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer_bytes)
            port = listening.getsockname()[1]
            said_of_clients: list[str] = []
            server = Server(
                make_app(model, access, measured),
                listening,
                grace_s=grace_s,
                on_end=lambda: None,
                say=said_of_clients.append,
                **more,
            )
            server.start()
            ends.callback(server.stop, thread.close)
            return Served(Client(port), engine, server, thread, said_of_clients)

        yield start
