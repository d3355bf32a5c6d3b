"""Sessions: rollouts whose calls come over HTTP, each under an address and a key of its own.

Owns: which sessions there are, which conversation a call continues, and what an answer says. Must not know:
what samples, processes, what a rollout is for.

A call whose messages begin with what was said continues the tokens of that; any other begins anew. The answer to a
message is never encoded again (`data/dialogue.py`). Calls may run at the same time.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import hashlib
import hmac
import itertools
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, Protocol, TypeVar, cast

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.routing import Mount, Route
from starlette.types import Receive, Scope, Send
from transformers import PreTrainedTokenizerBase

from rallypoint.data import ChatMessage, Dialogue, Message
from rallypoint.environments.chat import Chat, said_in
from rallypoint.errors import EndpointError, EpisodeError, RallyError, RowFullError
from rallypoint.generation import Output, SamplingParams, outputs_of
from rallypoint.serving.anthropic_messages import MessagesRequest
from rallypoint.serving.app import key_of, with_errors
from rallypoint.serving.bridge import Arrivals
from rallypoint.serving.codec import longest_token, max_characters
from rallypoint.serving.detokenizer import Choice
from rallypoint.serving.handlers import (
    check_name,
    model_routes,
    read_body,
    respond,
    stream,
    while_connected,
    writer_of,
)
from rallypoint.serving.openai_responses import ResponsesRequest
from rallypoint.serving.requests import ChatRequest, ClientRequest, GenerateRequest, RequestT, read_request
from rallypoint.serving.responses import Delta, Shape
from rallypoint.types import Turn

ResultT = TypeVar("ResultT")

_MOST_CALLS = 64
"""Calls of one session at a time."""
_ENDED = "this session has ended: its rollout is over, and nothing that is sampled now would be trained"


class Caller(Protocol):
    """Samples for a session, from any thread."""

    def __call__(
        self,
        tokens: Sequence[int],
        said: tuple[tuple[str, str], ...],
        *,
        max_tokens: int | None,
        stop: Sequence[str],
        temperature: float | None,
        deliver: Callable[[Output], None] | None,
    ) -> Future[Turn]:
        """Have a response sampled, see `EpisodeClient.answer`; cancelling what is returned gives it up.

        With `deliver` its outputs are passed on as they come, the last one before the turn is there, from any thread.
        """
        ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What all sessions of a run have in common."""

    name: str
    """Name by which agents ask for the model."""
    tokenizer: PreTrainedTokenizerBase
    """For sessions alone, as it is used in a thread."""
    stop_tokens: tuple[int, ...]
    """Each of them ends a response."""
    max_tokens: int
    """Tokens of a row."""
    strips_thinking: bool = False
    """See `RolloutConfig.thinking`."""


class Session:
    """The calls of one rollout."""

    def __init__(self, key: str, call: Caller, params: SamplingParams, chat: Chat) -> None:
        """Begin without calls.

        Args:
            key: under which it is found.
            call: samples for it.
            params: how its rollout is drawn.
            chat: what was said in it.
        """
        self.key, self.call, self.params, self.chat = key, call, params, chat
        self.failure: RallyError | None = None
        """Why the newest call failed; None after one that did not."""
        self.num_running = 0

    def failed(self, error: RallyError) -> RallyError:
        """Keep why a call failed."""
        self.failure = error
        return error

    @contextlib.contextmanager
    def calling(self) -> Iterator[None]:
        """Count a call as long as the block lasts.

        Raises:
            EndpointError: there are too many.
        """
        if self.num_running >= _MOST_CALLS:
            message = f"{self.num_running} calls of this session are under way, expected at most {_MOST_CALLS}"
            raise EndpointError(429, f"{message}; try again", code="rate_limit_exceeded")
        self.num_running += 1
        try:
            yield
        finally:
            self.num_running -= 1


class Sessions:
    """The sessions that are open, by their keys; opened and closed from any thread."""

    def __init__(self, served: Served) -> None:
        """Begin without any."""
        self.served = served
        self.thread = ThreadPoolExecutor(1, "dialogues")
        """Encodes; see `Codec`."""
        self.max_characters = max_characters(longest_token(served.tokenizer), served.max_tokens)
        """Characters of messages that no row has room for."""
        self._open: dict[str, Session] = {}
        self._numbers, self._secret = itertools.count(1), secrets.token_bytes(32)

    def open(
        self,
        call: Caller,
        params: SamplingParams,
        tokens: tuple[int, ...],
        messages: Sequence[Message],
        tools: Sequence[ChatMessage] = (),
    ) -> Session:
        """Begin a session.

        Args:
            call: samples for it.
            params: how its rollout is drawn.
            tokens: of its prompt.
            messages: likewise.
            tools: function schemas, likewise.
        """
        key = self._key_of(str(next(self._numbers)))
        served, strips = self.served, self.served.strips_thinking
        chat = Chat(served.tokenizer, served.stop_tokens, (tokens, messages), tools, strips_thinking=strips)
        self._open[key] = session = Session(key, call, params, chat)
        return session

    def close(self, session: Session) -> None:
        """Refuse its calls from now on."""
        self._open.pop(session.key, None)

    def find(self, key: str) -> Session:
        """Return an open session.

        Raises:
            EndpointError: it has ended, or there never was one.
        """
        if (session := self._open.get(key)) is not None:
            return session
        if hmac.compare_digest(key.encode(), self._key_of(key.partition("-")[0]).encode()):
            raise EndpointError(410, _ENDED, code="session_ended")
        message = "no session has this key; make the client inside the agent's function"
        raise EndpointError(401, message, code="invalid_api_key")

    def _key_of(self, number: str) -> str:
        """Return the key of a session by its number, which nobody can guess."""
        return f"{number}-{hmac.new(self._secret, number.encode(), hashlib.sha256).hexdigest()[:32]}"


class SessionRoute(Generic[RequestT]):
    """A route on which sessions are sampled, as an ASGI application."""

    def __init__(self, sessions: Sessions, kind: type[RequestT], max_body_bytes: int, patience_s: float) -> None:
        """Answer requests of at most `max_body_bytes`, which must arrive within `patience_s` seconds."""
        self._sessions, self._kind, self._limits = sessions, kind, (max_body_bytes, patience_s)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read a request, sample, and answer, unless the client disconnects first."""
        with contextlib.suppress(ClientDisconnect):
            session = _session_of(self._sessions, scope)
            body = await read_body(Request(scope, receive), *self._limits)
            asked = read_request(self._kind, body)
            check_name(asked.model, self._sessions.served.name)
            _check_fields(asked, session.params)
            await while_connected(receive, self._answer(session, asked, scope, receive, send))

    async def _answer(self, session: Session, asked: RequestT, scope: Scope, receive: Receive, send: Send) -> None:
        with session.calling():
            try:
                dialogue = await self._dialogue(session, asked)
            except RallyError as error:
                raise _refusal(session.failed(error)) from error
            tokens = dialogue.tokens if dialogue is not None else tuple(cast("GenerateRequest", asked).token_ids)
            writer = writer_of(asked, self._shape(asked, tokens, is_chat=dialogue is not None))
            async with contextlib.aclosing(self._deltas(session, asked, tokens, dialogue)) as deltas:
                first = await anext(deltas)  # a call that is refused has a status
                if asked.stream:
                    await stream(send, writer, _again(first, deltas))
                    return
            (whole,) = first
        await respond(writer.whole([whole]))(scope, receive, send)

    async def _dialogue(self, session: Session, asked: RequestT) -> Dialogue | None:
        """Return what messages make; None for token ids."""
        if not isinstance(asked, ChatRequest):
            return None
        if asked.chat_template_kwargs:
            message = "chat_template_kwargs: a run's prompts have those of data.template; leave it out"
            raise EndpointError(400, message, param="chat_template_kwargs")
        messages = [one.as_template_takes() for one in asked.messages]
        length, most = sum(len(str(value)) for one in messages for value in one.values()), self._sessions.max_characters
        if length > most:  # nobody waits until it is encoded
            raise RowFullError(f"the messages have {length:,} characters, more than any row ({most:,})")
        return await self._encoded(functools.partial(session.chat.asked, is_whole=True), messages, asked.schemas)

    async def _deltas(
        self, session: Session, asked: RequestT, tokens: tuple[int, ...], dialogue: Dialogue | None
    ) -> AsyncGenerator[list[Delta], None]:
        """Yield what becomes known of an answer while it is sampled: at its end only if nobody reads a stream.

        Raises:
            RallyError: what the client is to be told.
        """
        served, strings = self._sessions.served, (*session.params.stop_strings, *asked.stop_strings)
        params = dataclasses.replace(session.params, stop_strings=strings)
        reader = await self._encoded(session.chat.reader, dialogue) if dialogue is not None else None
        choice = Choice(0, params, lambda ids: str(served.tokenizer.decode(list(ids))), reader)
        arrived = Arrivals[Output]()
        sampled = session.call(
            tokens,
            said_in(dialogue) if dialogue is not None else (),
            max_tokens=asked.limit,
            stop=asked.stop_strings,
            temperature=asked.temperature if "temperature" in asked.model_fields_set else None,
            deliver=arrived.deliver if asked.stream else None,
        )
        sampled.add_done_callback(lambda _: arrived.end())
        try:
            last: Sequence[Output] = ()
            async for outputs in arrived.read():
                if outputs[-1].finish_reason is not None:
                    last = outputs
                else:
                    yield [choice.add(outputs)]
            turn = await _turn_of(sampled)
            session.failure = None
        except RallyError as error:
            raise _refusal(session.failed(error)) from error
        finally:
            sampled.cancel()
        delta = choice.add(last or outputs_of(turn))
        if dialogue is not None:
            assert delta.message is not None, "it has ended"
            await self._encoded(session.chat.keep, dialogue, turn.response, delta.message)
        yield [delta]

    def _shape(self, asked: RequestT, tokens: tuple[int, ...], *, is_chat: bool) -> Shape:
        served = self._sessions.served
        return Shape(
            kind="chat" if is_chat else "tokens",
            model=served.name,
            prompts=(tokens,),
            num_samples=1,
            has_logprobs=asked.wants_logprobs,
            has_token_ids=asked.return_token_ids,
            has_usage=asked.stream_options.include_usage,
            token_text=lambda token: str(served.tokenizer.decode([token])),
        )

    async def _encoded(self, work: Callable[..., ResultT], *arguments: object) -> ResultT:
        """Have the thread of the tokenizer do some work."""
        return await asyncio.get_running_loop().run_in_executor(self._sessions.thread, work, *arguments)


async def _again(first: list[Delta], others: AsyncIterator[list[Delta]]) -> AsyncIterator[list[Delta]]:
    """Yield what was taken out of an iterator, and the rest of that."""
    yield first
    async for batch in others:
        yield batch


async def _turn_of(sampled: Future[Turn]) -> Turn:
    try:
        return await asyncio.wrap_future(sampled)
    except asyncio.CancelledError:
        if (task := asyncio.current_task()) is not None and task.cancelling():
            raise  # the client has gone
        raise EndpointError(410, _ENDED, code="session_ended") from None


def make_sessions_app(sessions: Sessions, *, max_body_bytes: int, patience_s: float = 60.0) -> Starlette:
    """Return an application in which each session has an address, and which knows sessions by their keys, too."""
    served, limits = sessions.served, (max_body_bytes, patience_s)
    routes = [
        *model_routes(served.name, served.max_tokens, lambda request: _session_of(sessions, request.scope)),
        Route("/v1/chat/completions", SessionRoute(sessions, ChatRequest, *limits), methods=["POST"]),
        Route("/v1/responses", SessionRoute(sessions, ResponsesRequest, *limits), methods=["POST"]),
        Route("/v1/messages", SessionRoute(sessions, MessagesRequest, *limits), methods=["POST"]),
        Route("/inference/v1/generate", SessionRoute(sessions, GenerateRequest, *limits), methods=["POST"]),
    ]
    return with_errors([Mount("/sessions/{session}", routes=routes), *routes])


def _session_of(sessions: Sessions, scope: Scope) -> Session:
    """Return the session that a path names, or else a key."""
    named = scope["path_params"].get("session")
    return sessions.find(str(named or key_of(Headers(scope=scope))))


def _check_fields(asked: ClientRequest, params: SamplingParams) -> None:
    """Refuse what would sample a rollout in another way than it is trained.

    Raises:
        EndpointError: a field differs from the run's; the first one is named.
    """
    fixed = {
        "n": 1,
        "top_p": params.top_p,
        "top_k": params.top_k or -1,
        "min_p": params.min_p,
        "repetition_penalty": params.repetition_penalty,
        "min_tokens": params.min_new_tokens,
        "ignore_eos": False,
    }
    for name, value in fixed.items():
        found = getattr(asked, name)
        if name in asked.model_fields_set and found != value:
            message = f"{name}: a rollout is sampled as the run says, with {value}; leave it out, found {found}"
            raise EndpointError(400, message, param=name)
    if further := sorted({*asked.stop_token_ids} - {*params.stop_tokens}):
        message = f"stop_token_ids: expected some of {list(params.stop_tokens)}, which end responses; found {further}"
        raise EndpointError(400, message, param="stop_token_ids")


def _refusal(error: RallyError) -> RallyError:
    """Return what a client is told of an error of its call."""
    if isinstance(error, RowFullError):
        return EndpointError(400, str(error), param="messages", code="context_length_exceeded")
    said = str(error).removeprefix("client.chat: ")
    return EndpointError(400, said, param="messages") if isinstance(error, EpisodeError) else error
