"""The bodies of responses in OpenAI's chat and completions API, and in vLLM's of token ids, whole or in chunks.

Owns: the shape of every body, and of the events of a stream. Must not know: HTTP, engines, how text is cut off tokens.

Additions to OpenAI's format: with `return_token_ids`, the `token_ids` and `versions` of every choice, one entry per
token, and the prompt's ids; with logprobs, `sampled_logprobs`. Of vLLM's format is `prompt_logprobs`.
"""

from __future__ import annotations

import dataclasses
import json
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple, Protocol, TypeAlias, cast

from rallypoint.errors import BusyError, EndpointError, RallyError, RequestError
from rallypoint.generation import PromptLogprobs

JSON: TypeAlias = "Mapping[str, JSON] | Sequence[JSON] | str | float | bool | None"

_LOWEST_LOGPROB = -9999.0
"""JSON has no infinity."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """New tokens and text of one choice."""

    index: int
    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Logprobs of the model as trained; one per token, as are the next two."""
    sampled_logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    version: int
    """Version of the weights when it came."""
    finish_reason: Literal["stop", "length"] | None
    stop_string: str | None = None
    """The string that has ended the text; None if none has."""
    prompt_logprobs: PromptLogprobs | None = None
    message: Mapping[str, object] | None = None
    """What the whole answer says, with its calls of tools, at the end of one that is read for them."""
    reasoning: str = ""
    """All of its reasoning, once that is known."""

    @property
    def calls(self) -> list[AnsweredCall]:
        """Calls of tools, at the end."""
        calls = cast("Sequence[Mapping[str, str]]", (self.message or {}).get("tool_calls") or ())
        functions = [cast("Mapping[str, str]", call["function"]) for call in calls]
        return [AnsweredCall(call["id"], f["name"], f["arguments"]) for call, f in zip(calls, functions, strict=True)]


class AnsweredCall(NamedTuple):
    """A call in an answer."""

    id: str
    name: str
    arguments: str
    """JSON."""


class Writer(Protocol):
    """Writes one answer: whole, or as the events of a stream."""

    def whole(self, deltas: Sequence[Delta]) -> JSON:
        """Return the body of an answer that is not streamed, from the whole of each choice."""
        ...

    def events(self, delta: Delta) -> Iterator[bytes]:
        """Yield the events that say what is new of a choice."""
        ...

    def end(self) -> Iterator[bytes]:
        """Yield the last events, when all choices have ended."""
        ...

    def failed(self, error: RallyError) -> bytes:
        """Return the event that says why there will be no more."""
        ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What the bodies for one request have in common."""

    kind: Literal["chat", "text", "tokens"]
    model: str
    prompts: tuple[tuple[int, ...], ...]
    num_samples: int
    """n: choices of each prompt; those of a prompt are neighbours."""
    has_logprobs: bool
    has_token_ids: bool
    has_usage: bool
    """Whether chunks have a field for it."""
    token_text: Callable[[int], str]
    num_prompt_logprobs: int | None = None
    """Likeliest tokens in place of each of a prompt's; None if nothing is said of prompts."""
    id: str = dataclasses.field(default_factory=lambda: uuid.uuid4().hex)
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))

    def usage(self, num_tokens: int) -> JSON:
        """Count the tokens of the prompts, each once, beside those of the choices."""
        num_prompt_tokens = sum(map(len, self.prompts))
        return {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": num_tokens,
            "total_tokens": num_prompt_tokens + num_tokens,
        }

    def envelope(self, version: int, choices: Sequence[JSON], *, is_chunk: bool) -> dict[str, JSON]:
        """Return what is around choices."""
        if self.kind == "tokens":
            common = {"model": self.model, "system_fingerprint": fingerprint(version), "choices": choices}
            return {"request_id": self.id, **common, "prompt_token_ids": self.prompts[0]}
        is_chat = self.kind == "chat"
        name = "chat.completion" if is_chat else "text_completion"
        body: dict[str, JSON] = {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{self.id}",
            "object": name + (".chunk" if is_chat and is_chunk else ""),
            "created": self.created,
            "model": self.model,
            "system_fingerprint": fingerprint(version),
            "choices": choices,
        }
        if is_chat and self.has_token_ids and not is_chunk:
            body["prompt_token_ids"] = self.prompts[0]
        return body

    def choice(self, delta: Delta, *, is_chunk: bool, is_first: bool = True) -> JSON:
        """Return what is said of one choice."""
        choice: dict[str, JSON] = {"index": delta.index}
        if self.kind == "text":
            choice["text"] = delta.text
        elif self.kind == "chat":
            role: dict[str, JSON] = {"role": "assistant"} if is_first else {}
            choice["delta" if is_chunk else "message"] = role | _said(delta, is_chunk=is_chunk)
        choice["logprobs"] = self._logprobs(delta) if self.has_logprobs else None
        calls = delta.finish_reason == "stop" and delta.calls
        choice["finish_reason"] = "tool_calls" if calls else delta.finish_reason
        if (num := self.num_prompt_logprobs) is not None:
            choice["prompt_logprobs"] = [None, *(_place(said, num) for said in delta.prompt_logprobs or ())]
        if self.has_token_ids:
            choice |= {"token_ids": delta.tokens, "versions": delta.versions}
            if is_first and self.kind != "tokens" and (self.kind == "text" or is_chunk):
                choice["prompt_token_ids"] = self.prompts[delta.index // self.num_samples]
        return choice

    def _logprobs(self, delta: Delta) -> JSON:
        logprobs = [max(logprob, _LOWEST_LOGPROB) for logprob in delta.logprobs]
        sampled = [max(logprob, _LOWEST_LOGPROB) for logprob in delta.sampled_logprobs]
        if self.kind == "text":
            texts = [self.token_text(token) for token in delta.tokens]
            return {"tokens": texts, "token_logprobs": logprobs, "top_logprobs": None, "sampled_logprobs": sampled}
        return {"content": self.logprobs(delta), "sampled_logprobs": sampled}

    def logprobs(self, delta: Delta) -> list[JSON]:
        """Return what is said of each token."""
        texts = [f"token_id:{token}" if self.kind == "tokens" else self.token_text(token) for token in delta.tokens]
        return [
            {"token": text, "logprob": max(logprob, _LOWEST_LOGPROB), "bytes": _bytes(text), "top_logprobs": []}
            for text, logprob in zip(texts, delta.logprobs, strict=True)
        ]


class ChunkWriter:
    """Writes the chunks of OpenAI's chat and completions API; see `Writer`."""

    def __init__(self, shape: Shape) -> None:
        """Begin without choices."""
        self._shape = shape
        self._has_begun: set[int] = set()
        self._num_tokens, self._version = 0, 0

    def whole(self, deltas: Sequence[Delta]) -> JSON:
        """See `Writer`."""
        version = min((version for delta in deltas for version in delta.versions), default=0)
        choices = [self._shape.choice(delta, is_chunk=False) for delta in deltas]
        body = self._shape.envelope(version, choices, is_chunk=False)
        return body | {"usage": self._shape.usage(sum(len(delta.tokens) for delta in deltas))}

    def events(self, delta: Delta) -> Iterator[bytes]:
        """See `Writer`."""
        self._num_tokens += len(delta.tokens)
        self._version = delta.version
        is_first = delta.index not in self._has_begun
        says = delta.text or delta.reasoning or delta.finish_reason
        if says or is_first or self._shape.has_token_ids or self._shape.has_logprobs:
            self._has_begun.add(delta.index)
            choice = self._shape.choice(delta, is_chunk=True, is_first=is_first)
            usage = {"usage": None} if self._shape.has_usage else {}
            yield event(self._shape.envelope(delta.version, [choice], is_chunk=True) | usage)

    def end(self) -> Iterator[bytes]:
        """See `Writer`."""
        if self._shape.has_usage:
            usage = self._shape.usage(self._num_tokens)
            yield event(self._shape.envelope(self._version, [], is_chunk=True) | {"usage": usage})
        yield b"data: [DONE]\n\n"

    def failed(self, error: RallyError) -> bytes:
        """See `Writer`."""
        return event(error_body(error))


def event(body: JSON, name: str | None = None) -> bytes:
    """Return a body as an event of a stream."""
    head = b"" if name is None else f"event: {name}\n".encode()
    return head + b"data: " + dump(body) + b"\n\n"


def dump(body: JSON) -> bytes:
    """Return a body as bytes."""
    # What a client sent may hold half a surrogate pair, and an error may quote it.
    return json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode(errors="replace")


def _said(delta: Delta, *, is_chunk: bool) -> dict[str, JSON]:
    said: dict[str, JSON] = {"content": delta.text}
    if delta.reasoning:
        said["reasoning"] = delta.reasoning
    if delta.calls:
        calls: list[JSON] = []
        for at, call in enumerate(delta.calls):
            place: dict[str, JSON] = {"index": at} if is_chunk else {}
            function = {"name": call.name, "arguments": call.arguments}
            calls.append({**place, "id": call.id, "type": "function", "function": function})
        said |= {"content": delta.text or None, "tool_calls": calls}
    return said


def _place(said: Mapping[int, float], num: int) -> JSON:
    """Return what is said of one token of a prompt; ranks are those of the likeliest, others' are not known.

    >>> _place({7: -0.1, 3: -2.5, 9: -4.0}, num=2)["9"]
    {'logprob': -4.0, 'rank': None}
    """
    return {
        str(token): {"logprob": max(logprob, _LOWEST_LOGPROB), "rank": rank if rank <= num else None}
        for rank, (token, logprob) in enumerate(said.items(), 1)
    }


def fingerprint(version: int) -> str:
    """Return the name of a version of the weights in responses.

    >>> fingerprint(20)
    'version-20'
    """
    return f"version-{version}"


def status_of(error: RallyError) -> int:
    """Return the HTTP status for an error; 500 unless it is the client's fault."""
    if isinstance(error, EndpointError):
        return error.status
    if isinstance(error, BusyError):
        return 503
    return 400 if isinstance(error, RequestError) else 500


def error_body(error: RallyError) -> JSON:
    """Return what a client is told about an error."""
    return {"error": error_fields(error)}


def error_fields(error: RallyError) -> dict[str, JSON]:
    """Return it without its envelope."""
    known = error if isinstance(error, EndpointError) else None
    status = status_of(error)
    kinds = {401: "authentication_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {
        "message": str(error),
        "type": kind,
        "param": known.param if known else None,
        "code": known.code if known else None,
    }


def _bytes(text: str) -> list[int] | None:
    """Return the bytes of a token's text; None for a part of a character, whose bytes are not known here."""
    return None if "\ufffd" in text else list(text.encode())
