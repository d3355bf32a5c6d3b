"""Anthropic's Messages API, as a translation of OpenAI's chat API: the blocks of a request, and those of an answer.

Owns: what is said in blocks, the events of their stream, and what is told of an error. Must not know: engines,
sessions, how a conversation becomes tokens.

| block                 | message                                                      |
|-----------------------|--------------------------------------------------------------|
| `text`                | text of the message that it stands in                        |
| `thinking`, `tool_use`| reasoning and calls of the assistant's message               |
| `tool_result`         | a message of role `tool`, before what else the user says     |
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar, cast

from rallypoint.errors import RallyError
from rallypoint.serving.requests import ChatRequest, refused, without_nulls
from rallypoint.serving.responses import JSON, AnsweredCall, Delta, Shape, error_fields, event, fingerprint, status_of

_REFUSED = {
    "thinking": "how much the model reasons is up to its chat template; leave it out, or give chat_template_kwargs",
    "container": "there are no containers here; offer tools of your own",
    "mcp_servers": "no servers are asked from here; offer their tools as your own",
}
_RENAMED = {"stop_sequences": "stop"}
_EXPECTED = {"user": ("text", "tool_result"), "assistant": ("text", "tool_use", "thinking")}
_ERRORS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large"}
_ERRORS |= {429: "rate_limit_error", 503: "overloaded_error"}


class MessagesRequest(ChatRequest):
    """The body of `POST /v1/messages`, as a request for chat."""

    NAMES: ClassVar[Mapping[str, str]] = {
        "stop": "stop_sequences",
        "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    }

    @classmethod
    def flat(cls, body: dict[str, object]) -> dict[str, object]:
        """Return what a body says in the fields of chat.

        Raises:
            EndpointError: a block, a tool or a field is not supported.
        """
        body = without_nulls(body)
        if body.get("thinking") == {"type": "disabled"}:
            del body["thinking"]
        if problems := {name: f"{name}: {why}" for name, why in _REFUSED.items() if body.get(name)}:
            raise refused(problems)
        if body.get("n", 1) != 1:
            raise refused({"n": "n: an answer here is one; ask several times, or /v1/chat/completions"})
        taken = {*_REFUSED, "system", "messages", "tools", "tool_choice"}
        fields = {_RENAMED.get(name, name): value for name, value in body.items() if name not in taken}
        fields["messages"] = _messages(body.get("system"), body.get("messages", []))
        if "tools" in body:
            fields["tools"] = _tools(body["tools"])
        if (choice := body.get("tool_choice")) is not None:
            fields["tool_choice"] = _choice(choice)
            alone = isinstance(choice, dict) and cast("dict[str, object]", choice).get("disable_parallel_tool_use")
            fields["parallel_tool_calls"] = not alone
        return fields


def _messages(system: object, given: object) -> list[dict[str, object]]:
    """Return a system prompt and messages as chat has them.

    >>> result = {"type": "tool_result", "tool_use_id": "1", "content": "4"}
    >>> [one["role"] for one in _messages("Be brief.", [{"role": "user", "content": [result]}])]
    ['system', 'tool']
    """
    messages: list[dict[str, object]] = []
    if system is not None:
        messages.append({"role": "system", "content": _text("system", system)})
    if not isinstance(given, list):
        raise refused({"messages": "messages: expected a list"})
    for place, message in enumerate(given):
        role = message.get("role") if isinstance(message, dict) else None
        if role not in _EXPECTED:
            name = f"messages.{place}.role"
            raise refused({name: f"{name}: expected user or assistant, found {role!r}"})
        blocks = _blocks(f"messages.{place}.content", message.get("content"), _EXPECTED[role])
        messages += _of_assistant(blocks) if role == "assistant" else _of_user(f"messages.{place}.content", blocks)
    if messages and messages[-1]["role"] == "assistant":
        what = "messages: the last one is the assistant's, but no answer can be begun for the model here; leave it out"
        raise refused({"messages": what})
    return messages


def _blocks(name: str, content: object, expected: Sequence[str]) -> list[dict[str, object]]:
    """Return the content of a message as blocks of certain types."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise refused({name: f"{name}: expected a string, or a list of blocks"})
    for place, block in enumerate(content):
        kind = block.get("type") if isinstance(block, dict) else type(block).__name__
        if kind not in expected:
            where = f"{name}.{place}"
            raise refused({where: f"{where}: expected a block of type {' or '.join(expected)}, found {kind!r}"})
    return content


def _text(name: str, content: object) -> str:
    """Return the text of some content that is nothing else."""
    return "".join(str(block.get("text", "")) for block in _blocks(name, content, ("text",)))


def _of_assistant(blocks: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
    text = "".join(str(block.get("text", "")) for block in blocks)
    calls = [
        {
            "id": block.get("id", ""),
            "type": "function",
            "function": {"name": block.get("name"), "arguments": json.dumps(block.get("input") or {})},
        }
        for block in blocks
        if block["type"] == "tool_use"
    ]
    thoughts = "".join(str(block.get("thinking", "")) for block in blocks)
    return [{"role": "assistant", "content": text, "tool_calls": calls, "reasoning": thoughts}]


def _of_user(name: str, blocks: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
    results = [
        {
            "role": "tool",
            "tool_call_id": block.get("tool_use_id", ""),
            "content": _text(f"{name}.{place}.content", block.get("content", "")),
        }
        for place, block in enumerate(blocks)
        if block["type"] == "tool_result"
    ]
    texts = [str(block.get("text", "")) for block in blocks if block["type"] == "text"]
    return [*results, {"role": "user", "content": "".join(texts)}] if texts or not results else results


def _tools(tools: object) -> list[dict[str, object]]:
    """Return tools as chat has them.

    Raises:
        EndpointError: one has no schema.
    """
    if not isinstance(tools, list):
        raise refused({"tools": "tools: expected a list"})
    found: list[dict[str, object]] = []
    for place, tool in enumerate(tools):
        kind = tool.get("type", "custom") if isinstance(tool, dict) else type(tool).__name__
        if kind != "custom":
            what = (
                f"tools.{place}: expected a tool with input_schema, found one of type {kind!r}; offer one of your own"
            )
            raise refused({f"tools.{place}": what})
        function = {name: tool[name] for name in ("name", "description") if name in tool}
        found.append({"type": "function", "function": {**function, "parameters": tool.get("input_schema") or {}}})
    return found


def _choice(choice: object) -> object:
    """Return which tool is to be called, as chat says it."""
    kind = choice.get("type") if isinstance(choice, dict) else choice
    if kind == "tool":
        return {"type": "function", "function": {"name": cast("dict[str, object]", choice).get("name")}}
    return "required" if kind == "any" else kind


class MessagesWriter:
    """Writes the blocks of an answer; see `Writer`."""

    def __init__(self, shape: Shape) -> None:
        """Begin without blocks."""
        self._shape = shape
        self._blocks: list[dict[str, JSON]] = []
        self._is_open = False
        """Whether the last block is text that goes on."""
        self._tokens, self._versions = list[int](), list[int]()
        self._last: Delta | None = None

    def whole(self, deltas: Sequence[Delta]) -> JSON:
        """See `Writer`."""
        for _ in self._all_events(deltas[0]):
            pass
        return self._message()

    def events(self, delta: Delta) -> Iterator[bytes]:
        """See `Writer`."""
        for body in self._all_events(delta):
            yield event(body, str(body["type"]))

    def end(self) -> Iterator[bytes]:
        """See `Writer`."""
        message = self._message()
        delta = {name: message[name] for name in ("stop_reason", "stop_sequence")}
        further = {name: message[name] for name in ("token_ids", "versions") if name in message}
        last: dict[str, JSON] = {"type": "message_delta", "delta": delta, "usage": message["usage"], **further}
        yield event(last, "message_delta")
        yield event({"type": "message_stop"}, "message_stop")

    def failed(self, error: RallyError) -> bytes:
        """See `Writer`."""
        return event(error_body(error), "error")

    def _all_events(self, delta: Delta) -> Iterator[dict[str, JSON]]:
        """Take in what is new, and yield what is to be said of it."""
        if self._last is None:
            yield {"type": "message_start", "message": self._message()}
        self._last = delta
        self._tokens += delta.tokens
        self._versions += delta.versions
        if delta.reasoning:
            yield from self._begin({"type": "thinking", "thinking": "", "signature": ""})
            yield from self._add({"type": "thinking_delta", "thinking": delta.reasoning}, "thinking")
            yield from self._end_block()
        if not self._is_open and (delta.text or (delta.finish_reason and not delta.calls)):
            self._is_open = True
            yield from self._begin({"type": "text", "text": ""})
        if delta.text:
            yield from self._add({"type": "text_delta", "text": delta.text}, "text")
        if delta.finish_reason is not None:
            if self._is_open:
                yield from self._end_block()
            for call in delta.calls:
                yield from self._call(call)

    def _call(self, call: AnsweredCall) -> Iterator[dict[str, JSON]]:
        yield from self._begin({"type": "tool_use", "id": call.id, "name": call.name, "input": {}})
        self._blocks[-1]["input"] = json.loads(call.arguments)
        yield self._at("content_block_delta", {"type": "input_json_delta", "partial_json": call.arguments})
        yield from self._end_block()

    def _begin(self, block: dict[str, JSON]) -> Iterator[dict[str, JSON]]:
        self._blocks.append(dict(block))
        yield {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": block}

    def _add(self, delta: dict[str, JSON], name: str) -> Iterator[dict[str, JSON]]:
        self._blocks[-1][name] = f"{self._blocks[-1][name]}{delta[name]}"
        yield self._at("content_block_delta", delta)

    def _end_block(self) -> Iterator[dict[str, JSON]]:
        self._is_open = False
        yield {"type": "content_block_stop", "index": len(self._blocks) - 1}

    def _at(self, name: str, delta: dict[str, JSON]) -> dict[str, JSON]:
        return {"type": name, "index": len(self._blocks) - 1, "delta": delta}

    def _message(self) -> dict[str, JSON]:
        shape, last = self._shape, self._last
        body: dict[str, JSON] = {
            "id": f"msg_{shape.id}",
            "type": "message",
            "role": "assistant",
            "model": shape.model,
            "content": [*self._blocks],
            "stop_reason": None if last is None else _stop_reason(last),
            "stop_sequence": None if last is None else last.stop_string,
            "usage": {"input_tokens": len(shape.prompts[0]), "output_tokens": len(self._tokens)},
            "system_fingerprint": fingerprint(min(self._versions, default=0)),
        }
        if shape.has_token_ids:
            body |= {"prompt_token_ids": shape.prompts[0], "token_ids": self._tokens, "versions": self._versions}
        return body


def _stop_reason(last: Delta) -> str | None:
    if last.finish_reason is None:
        return None
    if last.finish_reason == "length":
        return "max_tokens"
    return "tool_use" if last.calls else "stop_sequence" if last.stop_string else "end_turn"


def error_body(error: RallyError) -> JSON:
    """Return what a client is told about an error."""
    status = status_of(error)
    kind = _ERRORS.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {**error_fields(error), "type": kind}}
