"""OpenAI's Responses API, as a translation of its chat API: the items of a request, and those of an answer.

Owns: what is said in items, and the events of their stream. Must not know: engines, sessions, how a conversation
becomes tokens. Nothing is stored, so a request has the whole conversation.

| item                                 | message                                                       |
|--------------------------------------|---------------------------------------------------------------|
| `message`                            | with its role and text                                        |
| `reasoning`, `function_call`         | part of the assistant's message with what is beside them      |
| `function_call_output`               | role `tool`                                                   |
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar, Literal

from pydantic import BaseModel, Field, ValidationError

from rallypoint.errors import RallyError
from rallypoint.serving.requests import ChatRequest, refused, without_nulls
from rallypoint.serving.responses import JSON, Delta, Shape, error_fields, event, fingerprint

_REFUSED = {
    "previous_response_id": "nothing is stored here; send the items of the whole conversation as input",
    "conversation": "nothing is stored here; send the items of the whole conversation as input",
    "prompt": "there are no stored prompts here; send instructions and input",
    "reasoning": "how much the model reasons is up to its chat template; leave it out, or give chat_template_kwargs",
}
_NO_EFFECT = ("include", "max_tool_calls", "stream_options")
"""Fields that concern tools that are not here, or padding of events."""
_ECHOED = ("instructions", "tools", "tool_choice", "temperature", "top_p", "max_output_tokens", "metadata")


class _Text(BaseModel):
    type: Literal["input_text", "output_text", "text"]
    text: str


class _Said(BaseModel):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[_Text] = Field(description="a string, or parts of type input_text; the model reads only text")


class _Called(BaseModel):
    call_id: str
    name: str = Field(min_length=1)
    arguments: str


class _Result(BaseModel):
    call_id: str
    output: str | list[_Text] = Field(description="a string, or parts of type input_text; the model reads only text")


class _Thought(BaseModel):
    class Part(BaseModel):
        text: str

    content: list[Part] = Field(default_factory=list)


_ITEMS: Mapping[str, type[BaseModel]] = {
    "message": _Said,
    "function_call": _Called,
    "function_call_output": _Result,
    "reasoning": _Thought,
}


class ResponsesRequest(ChatRequest):
    """The body of `POST /v1/responses`, as a request for chat."""

    NAMES: ClassVar[Mapping[str, str]] = {
        "messages": "input",
        "max_tokens": "max_output_tokens",
        "response_format": "text",
    }

    echoed: dict[str, object] = Field(default_factory=dict)
    """What the answer repeats of the request."""

    @classmethod
    def flat(cls, body: dict[str, object]) -> dict[str, object]:
        """Return what a body says in the fields of chat.

        Raises:
            EndpointError: an item, a tool or a field is not supported.
        """
        body = without_nulls(body)
        if problems := {name: f"{name}: {why}" for name, why in _REFUSED.items() if body.get(name)}:
            raise refused(problems)
        if body.get("n", 1) != 1:
            raise refused({"n": "n: an answer here is one; ask several times, or /v1/chat/completions"})
        taken = {*_NO_EFFECT, *_REFUSED, "input", "instructions", "tools", "tool_choice", "max_output_tokens", "text"}
        fields = {name: value for name, value in body.items() if name not in taken}
        fields["echoed"] = {name: body[name] for name in _ECHOED if name in body}
        fields["messages"] = _messages(body.get("instructions"), body.get("input", ""))
        include, text = body.get("include"), body.get("text")
        fields["logprobs"] = isinstance(include, list) and "message.output_text.logprobs" in include
        if isinstance(text, dict) and (form := text.get("format")) is not None:
            fields["response_format"] = form
        if "max_output_tokens" in body:
            fields["max_tokens"] = body["max_output_tokens"]
        if "tools" in body:
            fields["tools"] = _tools(body["tools"])
        if (choice := body.get("tool_choice")) is not None:
            fields["tool_choice"] = _choice(choice)
        return fields


def _messages(instructions: object, given: object) -> list[dict[str, object]]:
    """Return instructions and input as messages.

    >>> call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    >>> [one["role"] for one in _messages("Be brief.", [{"role": "user", "content": "?"}, call, call])]
    ['system', 'user', 'assistant']
    """
    messages: list[dict[str, object]] = []
    if instructions is not None:
        messages.append({"role": "system", "content": instructions})
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    if not isinstance(given, list):
        raise refused({"input": "input: expected a string, or a list of items"})
    for place, item in enumerate(given):
        _add(messages, _read(f"input.{place}", item))
    for message in messages:
        message.setdefault("content", "")
    return messages


def _read(name: str, item: object) -> BaseModel:
    kind = item.get("type", "message") if isinstance(item, dict) else type(item).__name__
    if not isinstance(item, dict) or kind not in _ITEMS:
        expected = ", ".join(_ITEMS)
        raise refused({name: f"{name}: items of type {kind!r} are not supported, expected one of {expected}"})
    model = _ITEMS[kind]
    try:
        return model.model_validate(without_nulls(item))
    except ValidationError as error:
        first = error.errors()[0]
        field = str(first["loc"][0])
        expected = model.model_fields[field].description
        what = f"expected {expected}" if expected else first["msg"]
        raise refused({f"{name}.{field}": f"{name}.{field}: {what}"}) from None


def _add(messages: list[dict[str, object]], item: BaseModel) -> None:
    """Add an item; what the assistant says, thinks and calls in one turn is one message."""
    last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    if isinstance(item, _Result):
        messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
    elif isinstance(item, _Said) and (item.role != "assistant" or last is None or "content" in last):
        messages.append({"role": item.role, "content": _text(item.content)})
    elif isinstance(item, _Said) and last is not None:
        last["content"] = _text(item.content)
    elif isinstance(item, _Thought):
        thought = "".join(part.text for part in item.content)
        messages.append({"role": "assistant", "reasoning": thought, "tool_calls": []})
    elif isinstance(item, _Called):
        if last is None:
            messages.append(last := {"role": "assistant"})
        function = {"name": item.name, "arguments": item.arguments}
        call = {"id": item.call_id, "type": "function", "function": function}
        last["tool_calls"] = [*last.get("tool_calls", ()), call]  # pyright: ignore[reportGeneralTypeIssues]


def _text(content: str | list[_Text]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _choice(choice: object) -> object:
    """Return which tool is to be called, as chat says it."""
    if isinstance(choice, dict) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice


def _tools(tools: object) -> list[dict[str, object]]:
    """Return tools as chat has them.

    Raises:
        EndpointError: one is not a function.
    """
    if not isinstance(tools, list):
        raise refused({"tools": "tools: expected a list"})
    found: list[dict[str, object]] = []
    for place, tool in enumerate(tools):
        kind = tool.get("type") if isinstance(tool, dict) else type(tool).__name__
        if kind != "function":
            what = f"tools.{place}: expected type function, found {kind!r}, which runs at OpenAI; offer a function"
            raise refused({f"tools.{place}": what})
        function = {name: tool[name] for name in ("name", "description", "parameters") if tool.get(name) is not None}
        found.append({"type": "function", "function": function})
    return found


class ResponsesWriter:
    """Writes the items of an answer; see `Writer`."""

    def __init__(self, asked: ResponsesRequest, shape: Shape) -> None:
        """Begin without items."""
        self._asked, self._shape = asked, shape
        self._done: list[JSON] = []
        """Items that are complete."""
        self._text: str | None = None
        """Text of the message so far; None if there is none."""
        self._logprobs: list[JSON] = []
        self._tokens, self._versions = list[int](), list[int]()
        self._num_events = 0
        self._last: Delta | None = None

    def whole(self, deltas: Sequence[Delta]) -> JSON:
        """See `Writer`."""
        for _ in self._all_events(deltas[0]):
            pass
        return self._response()

    def events(self, delta: Delta) -> Iterator[bytes]:
        """See `Writer`."""
        for body in self._all_events(delta):
            yield self._event(body)

    def end(self) -> Iterator[bytes]:
        """See `Writer`."""
        response = self._response()
        yield self._event({"type": f"response.{response['status']}", "response": response})

    def failed(self, error: RallyError) -> bytes:
        """See `Writer`."""
        return self._event({**error_fields(error), "type": "error"})

    def _event(self, body: dict[str, JSON]) -> bytes:
        self._num_events += 1
        return event({**body, "sequence_number": self._num_events - 1}, str(body["type"]))

    def _all_events(self, delta: Delta) -> Iterator[dict[str, JSON]]:
        """Take in what is new, and yield what is to be said of it."""
        if self._last is None:
            self._last = delta
            yield {"type": "response.created", "response": self._response()}
            yield {"type": "response.in_progress", "response": self._response()}
        self._last = delta
        self._tokens += delta.tokens
        self._versions += delta.versions
        logprobs = self._shape.logprobs(delta) if self._shape.has_logprobs else []
        self._logprobs += logprobs
        if delta.reasoning:
            yield from self._reasoning(delta.reasoning)
        if self._text is None and (delta.text or (delta.finish_reason and not delta.calls)):
            self._text = ""
            yield self._at("response.output_item.added", item=self._message("in_progress", has_part=False))
            yield self._in_part("response.content_part.added", part=self._part())
        if delta.text:
            self._text = (self._text or "") + delta.text
            yield self._in_part("response.output_text.delta", delta=delta.text, logprobs=logprobs)
        if delta.finish_reason is not None:
            yield from self._finish(delta)

    def _finish(self, delta: Delta) -> Iterator[dict[str, JSON]]:
        if self._text is not None:
            yield self._in_part("response.output_text.done", text=self._text, logprobs=self._logprobs)
            yield self._in_part("response.content_part.done", part=self._part())
            yield from self._complete(self._message(_status(delta)))
        for call in delta.calls:
            name = f"fc_{self._shape.id}_{len(self._done)}"
            item: dict[str, JSON] = {"id": name, "type": "function_call", "call_id": call.id, "name": call.name}
            yield self._at("response.output_item.added", item={**item, "arguments": "", "status": "in_progress"})
            yield self._at("response.function_call_arguments.delta", item_id=name, delta=call.arguments)
            yield self._at(
                "response.function_call_arguments.done", item_id=name, name=call.name, arguments=call.arguments
            )
            yield from self._complete({**item, "arguments": call.arguments, "status": "completed"})

    def _reasoning(self, text: str) -> Iterator[dict[str, JSON]]:
        name = f"rs_{self._shape.id}"
        item: dict[str, JSON] = {"id": name, "type": "reasoning", "summary": [], "content": []}
        yield self._at("response.output_item.added", item=item)
        where: dict[str, JSON] = {"item_id": name, "content_index": 0}
        yield self._at("response.reasoning_text.delta", delta=text, **where)
        yield self._at("response.reasoning_text.done", text=text, **where)
        yield from self._complete({**item, "content": [{"type": "reasoning_text", "text": text}]})

    def _complete(self, item: dict[str, JSON]) -> Iterator[dict[str, JSON]]:
        yield self._at("response.output_item.done", item=item)
        self._done.append(item)

    def _at(self, kind: str, /, **fields: JSON) -> dict[str, JSON]:
        """Return an event of the item that is not complete."""
        return {"type": kind, "output_index": len(self._done), **fields}

    def _in_part(self, kind: str, /, **fields: JSON) -> dict[str, JSON]:
        return self._at(kind, item_id=f"msg_{self._shape.id}", content_index=0, **fields)

    def _part(self) -> dict[str, JSON]:
        return {"type": "output_text", "text": self._text or "", "annotations": [], "logprobs": [*self._logprobs]}

    def _message(self, status: str, *, has_part: bool = True) -> dict[str, JSON]:
        head = {"id": f"msg_{self._shape.id}", "type": "message", "role": "assistant", "status": status}
        return {**head, "content": [self._part()] if has_part else []}

    def _response(self) -> dict[str, JSON]:
        shape, num_prompt, last = self._shape, len(self._shape.prompts[0]), self._last
        assert last is not None, "something has come"
        status = _status(last) if last.finish_reason else "in_progress"
        usage = {
            "input_tokens": num_prompt,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": len(self._tokens),
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": num_prompt + len(self._tokens),
        }
        body: dict[str, JSON] = {
            "id": f"resp_{shape.id}",
            "object": "response",
            "created_at": shape.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": shape.model,
            "output": [*self._done],
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
            **self._asked.echoed,  # pyright: ignore[reportAssignmentType] - it was JSON
            "usage": usage if last.finish_reason else None,
            "system_fingerprint": fingerprint(min(self._versions, default=last.version)),
        }
        if shape.has_token_ids:
            body |= {"prompt_token_ids": shape.prompts[0], "token_ids": self._tokens, "versions": self._versions}
        return body


def _status(delta: Delta) -> str:
    return "incomplete" if delta.finish_reason == "length" else "completed"
