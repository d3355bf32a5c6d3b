"""A server that speaks as much of vLLM's HTTP as the engine needs, and misbehaves on request."""

import asyncio
import dataclasses
import json
import shutil
import threading
from collections import deque
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from xxhash import xxh3_64_hexdigest

from rallypoint.generation.vllm import Outline, VllmConnection, VLLMEngine
from rallypoint.generation.vllm.client import Address
from rallypoint.model_files.pieces import same_names

NUM_IDS = 50


def token_at(prompt, position):
    """What the fake model says: it follows from the prompt and the place, as with a real one."""
    return (sum(prompt) * 7 + position * 3) % NUM_IDS


@dataclasses.dataclass
class World:
    """What all servers of an engine share, and a test looks at."""

    servers: list = dataclasses.field(default_factory=list)
    misbehave: deque = dataclasses.field(default_factory=deque)
    """For each request that comes, what is done instead of answering: a function of (server, answer) or None."""
    starts: deque = dataclasses.field(default_factory=deque)
    """For each start, why it fails; then all succeed."""
    late_s: float = 0.0
    """How long a server loads its model before it listens."""
    calls: list = dataclasses.field(default_factory=list)
    """Paths of the calls to servers, but for requests."""
    loads: list = dataclasses.field(default_factory=list)
    """Versions of the folders that servers were told to load."""
    refuse: str | None = None
    """What a worker says to weights instead of taking them."""
    stalled: threading.Event | None = None
    """Set when a worker that was told to receive weights never answers; None: it answers."""
    forgets: bool = False
    """Whether a worker that refuses has lost what it held."""


class FakeServer:
    """A `Server` in a thread."""

    def __init__(self, world, folder: Path):
        self.world, self.version, self.why = world, "default", None
        self.address = Address(folder / f"socket{len(world.servers)}", "the key")
        self.asked, self.adapters, self.beats, self.tasks = [], [], 0, set()
        world.servers.append(self)
        if world.starts:
            self.why = world.starts.popleft()
            return
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.server = None
        starting = asyncio.run_coroutine_threadsafe(self._start(world.late_s), self.loop)
        if not world.late_s:
            starting.result()

    async def _start(self, late_s):
        await asyncio.sleep(late_s)
        self.server = await asyncio.start_unix_server(self._serve, str(self.address.socket))

    def beat(self):
        return self.beats

    def ended(self):
        return self.why

    def last_said(self):
        return "Loading safetensors"

    def memory_bytes(self):
        return 2**30

    def stop(self):
        self.die("it was told to")

    def die(self, why="it died"):
        if self.why is None:
            self.why = why
            self.loop.call_soon_threadsafe(self._close)

    def _close(self):
        if self.server is not None:
            self.server.close()
        for writer in list(self.tasks):
            writer.transport.abort()
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.loop.call_later(0.01, self.loop.stop)

    async def _serve(self, reader, writer):
        self.tasks.add(writer)
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            length = int(head.lower().split("content-length: ")[1].split("\r\n")[0])
            body = await reader.readexactly(length)
            assert "Bearer the key" in head
            path = head.split()[1]
            if path == "/inference/v1/generate":
                await self._generate(writer, json.loads(body))
            elif path == "/v1/load_lora_adapter":
                self.adapters.append(json.loads(body)["lora_name"])
                self._answer(writer, 200, b"Success: added.")
            elif self.world.stalled is not None and b"rallypoint_receive" in body:
                self.world.stalled.set()
                await asyncio.Event().wait()
            else:
                self._answer(writer, 200, json.dumps(self._control(path, json.loads(body or b"null"))).encode())
            await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.tasks.discard(writer)
            writer.close()

    def _control(self, path, body):
        self.world.calls.append(path)
        if path == "/collective_rpc" and body["method"] == "rallypoint_join":
            self.joined = self.world.refuse is None
            refuse, self.world.refuse = self.world.refuse, None
            return {"results": [{"error": refuse}]}
        if path == "/collective_rpc" and body["method"] == "rallypoint_receive":
            [version] = body["args"]
            self.world.loads.append(version)
            if self.world.refuse is not None:
                refuse, self.world.refuse = self.world.refuse, None
                return {"results": [{"version": None, "error": refuse}]}
            return {"results": [{"version": version, "error": None, "digest": f"digest {version}"}] * 2}
        if path == "/collective_rpc":
            version = json.loads((Path(body["args"][0]) / "manifest.json").read_text())["version"]
            self.world.loads.append(version)
            if self.world.refuse is not None:
                refuse, self.world.refuse = self.world.refuse, None
                return {"results": [{"version": None if self.world.forgets else version, "error": refuse}]}
            return {"results": [{"version": version, "error": None}]}
        if path == "/update_weight_version":
            self.version = body["new_version"]
        return {"success": True}

    async def _generate(self, writer, body):
        self.asked.append(body)
        answer = self.answer_to(body)
        done = self.world.misbehave.popleft() if self.world.misbehave else None
        if done is not None:
            answer = done(self, answer)
            if asyncio.iscoroutine(answer):
                answer = await answer
            if answer is None:
                await asyncio.sleep(60)
        if isinstance(answer, tuple):
            self._answer(writer, *answer)
        elif body["stream"]:
            await self._stream(writer, answer)
        else:
            self._answer(writer, 200, answer if isinstance(answer, bytes) else json.dumps(answer).encode())

    async def _stream(self, writer, answer):
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        choice = answer["choices"][0]
        for at, token in enumerate(choice["token_ids"]):
            last = at == len(choice["token_ids"]) - 1
            event = {
                "token_ids": [token],
                "logprobs": {"content": [choice["logprobs"]["content"][at]]},
                "finish_reason": choice["finish_reason"] if last else None,
                "weight_versions": choice["weight_versions"] if last else None,
            }
            data = b"data: " + json.dumps({"choices": [event]}).encode() + b"\n\n" + b"data: [DONE]\n\n" * last
            writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
            await writer.drain()
            await asyncio.sleep(0)
        writer.write(b"0\r\n\r\n")

    def answer_to(self, body):
        sampling, extra = body["sampling_params"], body["sampling_params"]["extra_args"]["rallypoint"]
        prompt = body["token_ids"][: extra["num_prompt_tokens"]]
        done = len(body["token_ids"]) - len(prompt)
        tokens = []
        while len(tokens) < sampling["max_tokens"]:
            tokens.append(token_at(prompt, done + len(tokens)))
            if tokens[-1] in sampling["stop_token_ids"]:
                break
        content = [{"token_id": token, "logprob": 0.5, "top_logprobs": []} for token in tokens]
        return {
            "choices": [
                {
                    "token_ids": tokens,
                    "logprobs": {"content": content},
                    "finish_reason": "stop" if tokens[-1] in sampling["stop_token_ids"] else "length",
                    "weight_versions": [{"version": self.version, "start": 0, "end": len(tokens)}],
                }
            ]
        }

    def _answer(self, writer, status, body):
        writer.write(f"HTTP/1.1 {status} Some Reason\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)


WEIGHTS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4)}


def load(engine, version, weights=WEIGHTS):
    """Publish weights as a folder that lasts as long as the server, and have it load them."""
    folder = engine._connection._folder.path / "versions" / f"version_{version:06d}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    save_file(weights, folder / "model.safetensors")
    tensors = {
        name: {
            "file": "model.safetensors",
            "shape": list(tensor.shape),
            "xxh3_64": xxh3_64_hexdigest(tensor.numpy().data),
        }
        for name, tensor in weights.items()
    }
    manifest = {"format": 1, "version": version, "kind": "model", "tensors": tensors}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    engine.load_folder(version, folder)
    return folder


@pytest.fixture
def world():
    return World()


@pytest.fixture
def make_engine(world):
    """Return a function that makes an engine with fake servers."""
    connections = []

    def make(
        *, takes_adapters=False, gives_memory=False, start_s=20.0, say=lambda line: None, voice_every_s=10.0, **options
    ):
        outline = Outline(
            weights=WEIGHTS, sources=same_names, num_ids=NUM_IDS, cache_bytes_per_token=1, num_cache_heads=1
        )
        settings = {"max_request_tokens": 100, "max_rows": 8, "silence_s": 20.0, **options}
        connections.append(
            VllmConnection(
                lambda folder: FakeServer(world, folder),
                version=4,
                takes_adapters=takes_adapters,
                gives_memory=gives_memory,
                start_s=start_s,
                say=say,
                voice_every_s=voice_every_s,
            )
        )
        return VLLMEngine(connections[-1], outline, **settings)

    yield make
    for connection in connections:
        connection.close()


@pytest.fixture
def engine(make_engine):
    return make_engine()
