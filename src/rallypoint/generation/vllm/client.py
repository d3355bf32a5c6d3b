"""The client of a server on this machine: as much of HTTP as it takes, and the JSON of its endpoints.

Owns: bytes on the wire, one request a connection over a Unix socket; what `/inference/v1/generate` is sent, and what
its answers say. Anything that does not answer the request is an error. Must not know: which requests there are. Every
wait
ends: the caller sets a deadline or cancels.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import json
import math
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, cast

from rallypoint.errors import GenerationError, WeightsMismatchError
from rallypoint.generation.protocol import FinishReason, Request
from rallypoint.generation.requests import not_finite
from rallypoint.generation.vllm.sampler import NOT_FINITE, encode, needs_companion

_HEALTH_S, _CALL_S = 10.0, 600.0
_MAX_HEADER_BYTES = 2**16
_SHOWN = 200
"""Characters of an answer that an error shows."""
_ROUNDING = 1e-3
"""How far below 0 a surprisal may be."""


class LostError(Exception):
    """The connection ended before the answer did, or was refused."""


@dataclasses.dataclass(frozen=True, slots=True)
class Address:
    """Where a server listens, and what callers must have."""

    socket: Path
    key: str


@dataclasses.dataclass(frozen=True, slots=True)
class Response:
    """The head of an answer; the body comes in parts."""

    status: int
    body: AsyncIterator[bytes]

    async def whole(self) -> bytes:
        """Return the whole body."""
        return b"".join([part async for part in self.body])

    async def refusal(self, request: Request) -> Exception:
        """Return the error of an answer that is none: the server is lost, or it did not want the request."""
        text = f"status {self.status}: {(await self.whole())[:500].decode(errors='replace')}"
        if self.status >= 500:
            return LostError(text)
        return GenerationError(f"vllm refused prompt {request.prompt_index} sample {request.sample_index} with {text}")


@contextlib.asynccontextmanager
async def send(at: Address, method: str, path: str, body: bytes = b"") -> AsyncIterator[Response]:
    """Send a request and yield the answer; leaving closes the connection, which is how a server learns to stop.

    Raises:
        LostError: nobody listens, or the connection broke.
    """
    try:
        reader, writer = await asyncio.open_unix_connection(str(at.socket), limit=_MAX_HEADER_BYTES)
    except OSError as error:
        raise LostError(f"nobody answers at {at.socket}: {error}") from error
    try:
        head = (
            f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {at.key}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        writer.write(head.encode() + body)
        try:
            await writer.drain()
            status, headers = await _read_head(reader)
            yield Response(status, _body(reader, headers))
        except (OSError, EOFError, ValueError, IndexError, asyncio.LimitOverrunError) as error:
            raise LostError(f"the connection broke: {type(error).__name__}: {error}") from error
    finally:
        writer.close()


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    fields = (line.partition(":") for line in lines[1:] if line)
    return int(lines[0].split()[1]), {name.strip().lower(): value.strip() for name, _, value in fields}


async def _body(reader: asyncio.StreamReader, headers: dict[str, str]) -> AsyncIterator[bytes]:
    if headers.get("transfer-encoding", "").lower() != "chunked":
        yield (
            await reader.readexactly(int(headers["content-length"]))
            if "content-length" in headers
            else (await reader.read())
        )
        return
    while size := int((await reader.readuntil(b"\r\n")).partition(b";")[0], 16):
        yield await reader.readexactly(size)
        await reader.readexactly(2)


async def events(answer: Response) -> AsyncIterator[bytes]:
    """Yield the data of server-sent events until the one that says that it is done.

    Raises:
        LostError: the stream ended without it.
    """
    rest = b""
    async for part in answer.body:
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                yield data
    raise LostError("the stream ended before it was done")


async def is_well(at: Address) -> bool:
    """Return whether a server says that it is."""
    try:
        async with asyncio.timeout(_HEALTH_S), send(at, "GET", "/health") as answer:
            return answer.status == 200
    except (LostError, TimeoutError):
        return False


async def tell(at: Address, path: str, body: dict[str, Any] | None = None) -> bytes:
    """Return the body of the answer to a call that is not a request.

    Raises:
        LostError: it failed, or did not answer in time.
    """
    data = json.dumps(body).encode() if body is not None else b""
    try:
        async with asyncio.timeout(_CALL_S), send(at, "POST", path, data) as answer:
            whole = await answer.whole()
    except TimeoutError as error:
        raise LostError(f"{path} did not answer in {_CALL_S:g} s") from error
    if answer.status != 200:
        raise LostError(f"{path} answered with status {answer.status}: {whole[:500].decode(errors='replace')}")
    return whole


async def call(at: Address, path: str, body: dict[str, Any] | None = None, expect: dict[str, Any] | None = None) -> Any:
    """Return what a call answers, which is JSON or nothing.

    Raises:
        LostError: it failed, did not answer in time, or answered something else than expected.
    """
    whole = await tell(at, path, body)
    shown = whole[:500].decode(errors="replace")
    try:
        said = json.loads(whole) if whole else None
    except ValueError as error:
        raise LostError(f"{path} answered nonsense: {shown}") from error
    if expect is not None and said != expect:
        raise LostError(f"{path} answered {shown}")
    return said


async def call_workers(at: Address, method: str, argument: str | int) -> list[dict[str, Any]]:
    """Return what all workers of a server answer to a method of ours: of `Loading`, in `inside/rallypoint_vllm.py`.

    Raises:
        LostError: see `call`.
    """
    return (await call(at, "/collective_rpc", {"method": method, "args": [argument]}))["results"]


async def load_workers(at: Address, version: int, method: str, argument: str | int) -> list[dict[str, Any]]:
    """Return what all workers answer to a method after which they have the weights of a version.

    Raises:
        WeightsMismatchError: one of them has not.
        LostError: see `call`.
    """
    results = await call_workers(at, method, argument)
    wrong = [
        str(result["error"] or f"it holds version {result['version']}")
        for result in results
        if result["error"] is not None or result["version"] != version
    ]
    if wrong or not results:
        raise WeightsMismatchError(f"version {version} was not loaded by vllm: {'; '.join(wrong) or 'no worker'}")
    return results


@dataclasses.dataclass(frozen=True, slots=True)
class SampledToken:
    """One token of a response, as the server reports it."""

    token: int
    logprob: float
    sampled_logprob: float


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """What one answer, or one event of a stream, says."""

    tokens: tuple[SampledToken, ...]
    finish_reason: FinishReason | None
    versions: tuple[int, ...] | None
    """Version of the weights of each token; None in events before the last one."""
    experts: bytes = b""
    """An array of numpy's in a file: the experts of tokens that were read, [T, layers, k]; empty if not recorded."""


def request_body(request: Request, done: tuple[int, ...], limit: int, *, stream: bool, model: str | None) -> bytes:
    """Return the body of a request.

    Args:
        request: to be answered.
        done: tokens of the response that are there already, after an interruption.
        limit: tokens that may still come.
        stream: whether they come one by one.
        model: name of an adapter; None for the model that the server began with.
    """
    return json.dumps(
        {
            **({} if model is None else {"model": model}),
            "token_ids": [*request.tokens, *done],
            "stream": stream,
            "sampling_params": {
                "temperature": 0,
                "max_tokens": limit,
                "stop_token_ids": list(request.params.stop_tokens),
                "ignore_eos": True,
                "detokenize": False,
                "logprobs": 2 if needs_companion(request.params) else 0,
                "extra_args": {"rallypoint": encode(request)},
            },
        }
    ).encode()


def read_answer(data: bytes, request: Request, num_before: int, limit: int, num_ids: int, *, is_event: bool) -> Answer:
    """Read an answer, or an event of a stream.

    Args:
        data: JSON.
        request: that it answers.
        num_before: tokens of the response that are there already.
        limit: tokens that may still come.
        num_ids: size of the model's vocabulary.
        is_event: whether more may follow.

    Raises:
        GenerationError: it is not an answer to the request; what came is shown.
        NotFiniteError: the logits of a token were not finite.
    """
    try:
        choice = json.loads(data)["choices"][0]
        tokens, reason, spans = choice["token_ids"] or [], choice["finish_reason"], choice["weight_versions"]
        content = (choice["logprobs"] or {}).get("content") or []
        problem = next(_problems(tokens, reason, content, request, limit, num_ids, is_event=is_event), None)
        if problem is None:
            drawn = tuple(
                _sampled(token, entry, request, num_before + at)
                for at, (token, entry) in enumerate(zip(tokens, content, strict=True))
            )
            versions = None if is_event and reason is None else _versions(spans, None if is_event else len(tokens))
            experts = base64.b64decode(choice.get("routed_experts") or "")
            return Answer(drawn, cast("FinishReason | None", reason), versions, experts)
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        problem = f"{type(error).__name__}: {error}"
    shown = data[:_SHOWN].decode(errors="replace") + ("..." if len(data) > _SHOWN else "")
    raise GenerationError(
        f"vllm answered nonsense to prompt {request.prompt_index} sample {request.sample_index}: {problem}; "
        f"its answer: {shown}"
    )


def _problems(
    tokens: list[Any], reason: object, content: list[Any], request: Request, limit: int, num_ids: int, *, is_event: bool
) -> Iterator[str]:
    """Yield what is wrong with an answer."""
    stops = request.params.stop_tokens
    if len(content) != len(tokens):
        yield f"{len(tokens)} tokens with {len(content)} logprobs"
    if len(tokens) > limit or not (tokens or is_event):
        yield f"{len(tokens)} tokens, expected 1 to {limit}"
    for token in tokens:
        if not isinstance(token, int) or not 0 <= token < num_ids:
            yield f"token {token!r}, but the model knows 0 to {num_ids - 1}"
    for token in tokens[:-1]:
        if token in stops and not request.params.min_new_tokens:
            yield f"it went on after the stop token {token}"
    if reason == "stop" and not (tokens and tokens[-1] in stops):
        yield f"it stopped without one of the stop tokens {list(stops)}"
    if reason == "length" and len(tokens) != limit and not is_event:
        yield f"it ended for its length after {len(tokens)} tokens, expected {limit}"
    if reason not in ("stop", "length", None) or (reason is None and not is_event):
        yield f"finish_reason {reason!r}, expected stop or length"


def _sampled(token: int, entry: dict[str, Any], request: Request, position: int) -> SampledToken:
    surprisal = float(entry["logprob"])
    if entry["token_id"] != token:
        raise ValueError(f"the logprob is of token {entry['token_id']}, expected token {token}")
    if surprisal >= NOT_FINITE / 2:
        raise not_finite(request, position)
    if not surprisal >= -_ROUNDING or math.isinf(surprisal):
        raise ValueError(f"a logprob of {-surprisal}")
    params = request.params
    sampled = -surprisal
    if params.temperature == 0:
        sampled = 0.0
    elif needs_companion(params):
        # Left out if both are 0.
        beside = [float(other["logprob"]) for other in entry["top_logprobs"] if other["token_id"] != token]
        sampled = next((logprob for logprob in beside if logprob > -5000), 0.0)
    return SampledToken(token, -surprisal, sampled)


def _versions(spans: list[dict[str, Any]] | None, num_tokens: int | None) -> tuple[int, ...]:
    """Return the version of each token; the last event of a stream has those of all its tokens."""
    versions = tuple(int(span["version"]) for span in spans or () for _ in range(span["end"] - span["start"]))
    if not versions or num_tokens not in (None, len(versions)):
        raise ValueError(f"weight_versions of {len(versions)} tokens")
    return versions
