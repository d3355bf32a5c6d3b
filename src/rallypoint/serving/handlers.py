"""From the body of a request to the body of its answer, or to a stream of events.

Owns: what happens between the two, and that it ends when the client disconnects. Must not know: paths, keys.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import secrets
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from typing import Generic, Literal, Protocol

from starlette.requests import ClientDisconnect, Request as Call
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from rallypoint.data import AnswerReader
from rallypoint.errors import EndpointError, RallyError
from rallypoint.generation import Output, Request, SamplingParams
from rallypoint.serving.anthropic_messages import MessagesRequest, MessagesWriter
from rallypoint.serving.bridge import Bridge
from rallypoint.serving.codec import Codec, TokenIds
from rallypoint.serving.detokenizer import Choice
from rallypoint.serving.openai_responses import ResponsesRequest, ResponsesWriter
from rallypoint.serving.requests import (
    ChatRequest,
    ClientRequest,
    CompletionRequest,
    GenerateRequest,
    RequestT,
    read_request,
)
from rallypoint.serving.responses import JSON, ChunkWriter, Delta, Shape, Writer, dump

STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # some proxies collect events otherwise
]


_KINDS: Mapping[type[ClientRequest], Literal["chat", "text", "tokens"]] = {
    ChatRequest: "chat",
    ResponsesRequest: "chat",
    MessagesRequest: "chat",
    CompletionRequest: "text",
    GenerateRequest: "tokens",
}
"""Kinds of requests -> kinds of answers."""


class ServedEngine(Protocol):
    """What is known of an engine, or of several that act as one."""

    @property
    def version(self) -> int:
        """See `GenerationEngine.version`."""
        ...

    @property
    def max_request_tokens(self) -> int:
        """See `GenerationEngine.max_request_tokens`."""
        ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The model that is served."""

    name: str
    """Name by which clients ask for it."""
    engine: ServedEngine
    """What is known of the engine; requests go over the bridge."""
    bridge: Bridge
    codec: Codec
    stop_tokens: tuple[int, ...]
    """Each of them ends a response."""
    max_logprobs: int = 20
    """Most likeliest tokens in place of each of a prompt's that clients may ask for."""


class SamplingRoute(Generic[RequestT]):
    """One of the routes that sample, as an ASGI application."""

    def __init__(self, model: Model, kind: type[RequestT], max_body_bytes: int, patience_s: float) -> None:
        """Answer requests of at most `max_body_bytes`, which must arrive within `patience_s` seconds."""
        self._model, self._kind = model, kind
        self._max_body_bytes, self._patience_s = max_body_bytes, patience_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read a request, sample, and answer, unless the client disconnects first."""
        with contextlib.suppress(ClientDisconnect):
            body = await read_body(Call(scope, receive), self._max_body_bytes, self._patience_s)
            await while_connected(receive, self._answer(read_request(self._kind, body), scope, receive, send))

    async def _answer(self, asked: RequestT, scope: Scope, receive: Receive, send: Send) -> None:
        shape, requests = await self._plan(asked)
        writer = writer_of(asked, shape)
        choices = [
            Choice(index, request.params, self._model.codec.decode, await self._reader(asked))
            for index, request in enumerate(requests)
        ]
        with self._model.bridge.ask(requests) as outputs:
            if asked.stream:
                await stream(send, writer, _deltas(choices, outputs))
                return
            collected: list[list[Output]] = [[] for _ in choices]
            async for batch in outputs:
                for index, output in batch:
                    collected[index].append(output)
        deltas = [choice.add(own) for choice, own in zip(choices, collected, strict=True)]
        # What is said of a long prompt takes a while to write, and others wait for this loop.
        answer = await asyncio.to_thread(lambda: respond(writer.whole(deltas)))
        await answer(scope, receive, send)

    async def _reader(self, asked: RequestT) -> AnswerReader | None:
        """Return what reads an answer, if it may have calls of tools."""
        if not isinstance(asked, ChatRequest) or not asked.schemas:
            return None
        num_calls = sum(len(message.tool_calls) for message in asked.messages)
        return await self._model.codec.reader(self._model.stop_tokens, asked.schemas, num_calls)

    async def _plan(self, asked: RequestT) -> tuple[Shape, list[Request]]:
        """Return the shape of the answer, and a request for each choice."""
        model = self._model
        check_name(asked.model, model.name)
        said = asked.prompt_logprobs if isinstance(asked, CompletionRequest) else None
        if said is not None and said > model.max_logprobs:
            most = f"{model.max_logprobs} (--max-logprobs of `rally serve`)"
            raise EndpointError(400, f"prompt_logprobs: expected at most {most}, found {said}", param="prompt_logprobs")
        model.bridge.check_room(asked.n * (len(asked.prompts) if isinstance(asked, CompletionRequest) else 1))
        prompts = await _encode(asked, model.codec, model.engine.max_request_tokens)
        seed = secrets.randbits(63) if asked.seed is None else asked.seed
        requests: list[Request] = []
        for index, tokens in enumerate(prompts):
            limit = _limit(asked, len(tokens), model.engine.max_request_tokens)
            params = SamplingParams(
                max_new_tokens=limit,
                min_new_tokens=asked.min_tokens,
                temperature=asked.temperature,
                seed=seed,
                stop_tokens=tuple(
                    dict.fromkeys((*(() if asked.ignore_eos else model.stop_tokens), *asked.stop_token_ids))
                ),
                stop_strings=asked.stop_strings,
                top_k=asked.top_k if asked.top_k > 0 else None,
                top_p=asked.top_p,
                min_p=asked.min_p,
                repetition_penalty=asked.repetition_penalty,
            )
            requests += [
                Request(
                    tokens=tokens,
                    params=params,
                    prompt_index=index,
                    sample_index=sample,
                    streamed=asked.stream,
                    prompt_logprobs=said,
                )
                for sample in range(asked.n)
            ]
        shape = Shape(
            kind=_KINDS[type(asked)],
            model=model.name,
            prompts=prompts,
            num_samples=asked.n,
            has_logprobs=asked.wants_logprobs,
            has_token_ids=asked.return_token_ids,
            has_usage=asked.stream_options.include_usage,
            token_text=model.codec.token_text,
            num_prompt_logprobs=said,
        )
        return shape, requests


def check_name(name: str | None, served: str) -> None:
    """Check that a client asks for the model that is served.

    Raises:
        EndpointError: it asks for another one.
    """
    if name not in (None, served):
        message = f"model {name!r} is not served here, only {served!r}"
        raise EndpointError(404, message, param="model", code="model_not_found")


def model_routes(name: str, max_tokens: int, admit: Callable[[Call], object] = lambda _: None) -> list[Route]:
    """Return the routes that tell which model answers.

    Args:
        name: of the model.
        max_tokens: that prompt and answer may have together.
        admit: raises if a caller may not know.
    """
    card: JSON = {"id": name, "object": "model", "created": int(time.time()), "owned_by": "rallypoint"}
    card = {**card, "max_model_len": max_tokens}

    async def models(request: Call) -> Response:
        admit(request)
        return respond({"object": "list", "data": [card]})

    async def one_model(request: Call) -> Response:
        admit(request)
        check_name(request.path_params["name"], name)
        return respond(card)

    return [Route("/v1/models", models), Route("/v1/models/{name:path}", one_model)]


def respond(body: JSON, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return a response with a JSON body."""
    return Response(dump(body), status, headers, media_type="application/json")


async def read_body(call: Call, max_bytes: int, timeout_s: float) -> bytes:
    """Return the body of a request.

    Raises:
        EndpointError: it is too large, of another type, or does not arrive.
        ClientDisconnect: the client has gone.
    """
    # A page in a browser can send other types anywhere, without asking first.
    kind = call.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise EndpointError(415, f"expected the header 'Content-Type: application/json', found {kind!r}")
    too_large = EndpointError(413, f"the body has more than {max_bytes:,} bytes")
    announced = call.headers.get("content-length", "").lstrip("0")
    if announced.isdecimal() and (len(announced) > 18 or int(announced) > max_bytes):
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            async for part in call.stream():
                body += part
                if len(body) > max_bytes:
                    raise too_large
    except TimeoutError:
        raise EndpointError(408, f"the body did not arrive within {timeout_s:g} s") from None
    return bytes(body)


async def while_connected(receive: Receive, work: Coroutine[None, None, None]) -> None:
    """Do some work, and cancel it when the client disconnects."""
    tasks = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if tasks[0].done():
            tasks[0].result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _encode(asked: ClientRequest, codec: Codec, max_tokens: int) -> tuple[TokenIds, ...]:
    """Return the prompts as token ids; texts far too long for `max_tokens` are refused without being encoded.

    Raises:
        EndpointError: see `Codec`.
    """
    if isinstance(asked, ChatRequest):
        messages = [message.as_template_takes() for message in asked.messages]
        arguments = asked.chat_template_kwargs
        return (await codec.encode_chat(messages, asked.schemas, arguments, max_tokens=max_tokens),)
    if isinstance(asked, GenerateRequest):
        return (tuple(asked.token_ids),)
    assert isinstance(asked, CompletionRequest), "there are three kinds"
    return tuple(
        [
            await codec.encode(prompt, max_tokens=max_tokens, add_special_tokens=asked.add_special_tokens)
            if isinstance(prompt, str)
            else tuple(prompt)
            for prompt in asked.prompts
        ]
    )


def _limit(asked: ClientRequest, num_prompt_tokens: int, max_request_tokens: int) -> int:
    """Return how many tokens the responses to a prompt may have.

    Raises:
        EndpointError: there is no room for as many as are asked for, or they are fewer than the least.
    """
    room = max_request_tokens - num_prompt_tokens
    wanted = room if asked.limit is None else asked.limit
    if not 1 <= wanted <= room:
        raise EndpointError(
            400,
            f"the prompt has {num_prompt_tokens} tokens and the answer may have {max(wanted, 1)}, but both may "
            f"have {max_request_tokens} together",
            param={"chat": "messages", "text": "prompt", "tokens": "token_ids"}[_KINDS[type(asked)]],
            code="context_length_exceeded",
        )
    if asked.min_tokens > wanted:
        message = f"min_tokens: expected at most {wanted}, which the answer may have; found {asked.min_tokens}"
        raise EndpointError(400, message, param="min_tokens")
    return wanted


async def _deltas(
    choices: Sequence[Choice], outputs: AsyncIterator[list[tuple[int, Output]]]
) -> AsyncIterator[list[Delta]]:
    """Yield what becomes known of choices while outputs arrive."""
    async for batch in outputs:
        by_choice: dict[int, list[Output]] = {}
        for index, output in batch:
            by_choice.setdefault(index, []).append(output)
        yield [choices[index].add(own) for index, own in by_choice.items()]


def writer_of(asked: ClientRequest, shape: Shape) -> Writer:
    """Return what writes the answer to a request."""
    if isinstance(asked, ResponsesRequest):
        return ResponsesWriter(asked, shape)
    return MessagesWriter(shape) if isinstance(asked, MessagesRequest) else ChunkWriter(shape)


async def stream(send: Send, writer: Writer, deltas: AsyncIterator[Sequence[Delta]]) -> None:
    """Send what is new as events while it arrives; an error is the last one."""
    await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
    try:
        async for batch in deltas:
            events = b"".join(event for delta in batch for event in writer.events(delta))
            await send({"type": "http.response.body", "body": events, "more_body": True})
        last = b"".join(writer.end())
    except RallyError as error:
        last = writer.failed(error)
    await send({"type": "http.response.body", "body": last})
