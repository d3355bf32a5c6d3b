"""What clients may ask for: the fields of OpenAI's requests, those of vLLM's for token ids, and a few of our own.

Owns: which fields are supported, their ranges, and the errors about others. Must not know: HTTP, engines.

Invariant: a field is obeyed, or cannot change the answer, or is refused by name. A null field counts as absent, because
some clients send a whole object back.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, Self, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails, from_json

from rallypoint.config.limits import MAX_TOP_K, MIN_TEMPERATURE
from rallypoint.errors import EndpointError

IGNORED = frozenset(
    ("metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "service_tier", "store", "user")
) | {"cache_salt", "priority", "request_id", "routed_experts_prompt_start"}
"""Fields that do not affect the tokens, only when they are sampled, or what is reused for it."""

NEUTRAL: dict[str, tuple[object, ...]] = {
    "background": (False,),
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "functions": ([],),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "presence_penalty": (0,),
    "response_format": ({"type": "text"},),
    "skip_special_tokens": (True,),
    "suffix": ("",),
    "truncation": ("disabled",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
}
"""Unsupported fields -> the values that have no effect."""

_MAX_STOP_CHARACTERS, _MAX_STOP_TOKENS = 256, 256
_TOOL_CHOICE = "auto or none: no call can be promised; send auto, tools with only the one that is meant, and ask again"
_SEVERAL_CALLS = "true: how many tools an answer calls is up to the model; leave it out, and use the first call"

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
StopString = Annotated[str, Field(min_length=1, max_length=_MAX_STOP_CHARACTERS)]


def without_nulls(fields: Mapping[str, object]) -> dict[str, object]:
    """Return some fields without those that are null."""
    return {name: value for name, value in fields.items() if value is not None}


def _without_nulls(fields: object) -> object:
    return without_nulls(cast("Mapping[str, object]", fields)) if isinstance(fields, Mapping) else fields


class StreamOptions(BaseModel):
    """How a stream is written."""

    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool = False
    """Whether a last chunk, without choices, counts the tokens."""


class TextPart(BaseModel):
    """Some text of a message."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["text"]
    text: str


class CalledFunction(BaseModel):
    """What a call of a tool asks for."""

    name: str = Field(min_length=1)
    arguments: str = "{}"
    """JSON."""


class ToolCall(BaseModel):
    """A call in an answer of the assistant."""

    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction


class ToolFunction(BaseModel):
    """What the model is told of a function."""

    model_config = ConfigDict(extra="allow")

    name: str = Field(min_length=1)


class Tool(BaseModel):
    """A function that the model may call."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["function"]
    function: ToolFunction


class Message(BaseModel):
    """A turn of a conversation."""

    model_config = ConfigDict(extra="forbid")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] = Field(description="a string, or a list of parts of type text")
    name: str = ""
    tool_calls: list[ToolCall] = Field(default_factory=list)
    tool_call_id: str = ""
    reasoning: str = ""
    reasoning_content: str = ""
    """Another name of it."""

    @model_validator(mode="before")
    @classmethod
    def _nulls(cls, fields: object) -> object:
        found = _without_nulls(fields)
        if isinstance(found, dict) and cast("dict[str, object]", found).get("tool_calls"):
            return {"content": "", **cast("dict[str, object]", found)}
        return found

    @model_validator(mode="after")
    def _only_assistants_call(self) -> Self:
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"only the assistant calls tools, found tool_calls in a message of role {self.role!r}")
        return self

    def as_template_takes(self) -> dict[str, object]:
        """Return the message with what templates read, as far as it is there."""
        fields: dict[str, object] = {"role": self.role, "content": self.text}
        if self.tool_calls:
            fields["tool_calls"] = [call.model_dump() for call in self.tool_calls]
        if self.role == "tool":
            fields |= {"tool_call_id": self.tool_call_id} | ({"name": self.name} if self.name else {})
        if reasoning := self.reasoning or self.reasoning_content:
            fields["reasoning_content"] = reasoning
        return fields

    @property
    def text(self) -> str:
        """The whole text."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ClientRequest(BaseModel, abc.ABC):
    """The fields of both kinds of request."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    model: str | None = None
    """None: the model that is served."""
    n: int = Field(1, ge=1)
    """Answers to each prompt."""
    max_tokens: int | None = Field(None, ge=1)
    min_tokens: int = Field(0, ge=0)
    """Tokens before which no stop token or string ends an answer."""
    temperature: float = Field(1.0, ge=0, le=100)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(-1, ge=-1, le=MAX_TOP_K)
    """-1 or 0: all tokens."""
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, ge=0.01, le=100)
    stop: str | list[StopString] = Field(
        default_factory=list,
        max_length=_MAX_STOP_CHARACTERS,
        description=f"a string or a list of strings, of 1 to {_MAX_STOP_CHARACTERS} characters each",
    )
    stop_token_ids: list[TokenId] = Field(default_factory=list[int], max_length=_MAX_STOP_TOKENS)
    """Further tokens that end an answer and belong to it."""
    ignore_eos: bool = False
    """Whether the model's own stop tokens do not end an answer."""
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    """None: a new one every time."""
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    return_token_ids: bool = False

    _nulls = model_validator(mode="before")(_without_nulls)

    NAMES: ClassVar[Mapping[str, str]] = {}
    """Fields -> their names in the body, where these are others."""

    @classmethod
    def flat(cls, body: dict[str, object]) -> dict[str, object]:
        """Return a body with all its fields side by side."""
        return body

    @property
    def limit(self) -> int | None:
        """Most tokens of an answer; None if the client does not say."""
        return self.max_tokens

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Strings that end an answer and are not part of it."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    @abc.abstractmethod
    def wants_logprobs(self) -> bool:
        """Whether each token's logprob is asked for."""

    @property
    @abc.abstractmethod
    def num_alternatives(self) -> int:
        """Number of alternative tokens per position whose logprobs are asked for."""


class ChatRequest(ClientRequest):
    """The body of `POST /v1/chat/completions`."""

    messages: list[Message] = Field(min_length=1)
    tools: list[Tool] = Field(default_factory=list)
    tool_choice: Literal["none", "auto"] = Field("auto", description=_TOOL_CHOICE)
    """Whether the model is told of the tools."""
    parallel_tool_calls: Literal[True] = Field(True, description=_SEVERAL_CALLS)
    chat_template_kwargs: dict[str, object] = Field(default_factory=dict)
    """Arguments of the chat template, by name."""
    max_completion_tokens: int | None = Field(None, ge=1)
    """The newer name of max_tokens."""
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)

    @property
    def schemas(self) -> list[dict[str, object]]:
        """The tools that the model is told of."""
        # Nothing is said of `strict` in the prompt: it is for a server, which holds a model to its schemas.
        tools = [] if self.tool_choice == "none" else self.tools
        return [tool.model_dump(exclude={"function": {"strict"}}) for tool in tools]

    @property
    def limit(self) -> int | None:
        """Most tokens of an answer; None: as many as there is room for."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def wants_logprobs(self) -> bool:
        """See `ClientRequest`."""
        return self.logprobs

    @property
    def num_alternatives(self) -> int:
        """See `ClientRequest`."""
        return self.top_logprobs


class CompletionRequest(ClientRequest):
    """The body of `POST /v1/completions`."""

    prompt: str | list[str] | list[int] | list[list[int]] = Field(
        description="a string, a list of strings, a list of token ids, or a list of lists of token ids; not empty"
    )
    max_tokens: int | None = Field(16, ge=1)
    logprobs: int | None = Field(None, ge=0, le=20)
    prompt_logprobs: int | None = Field(None, ge=0)
    """As vLLM's: likeliest tokens in place of each of the prompt's, whose logprobs are asked for."""
    add_special_tokens: bool = True
    """Whether the tokenizer puts its special tokens around a text."""

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """One or more prompts, as texts or as token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]  # pyright: ignore[reportReturnType] - all are integers when the first one is
        return self.prompt  # pyright: ignore[reportReturnType]

    @property
    def wants_logprobs(self) -> bool:
        """See `ClientRequest`."""
        return self.logprobs is not None

    @property
    def num_alternatives(self) -> int:
        """See `ClientRequest`."""
        return self.logprobs or 0


class GenerateRequest(ClientRequest):
    """The body of `POST /inference/v1/generate`, whose `sampling_params` are read as fields of the body itself."""

    token_ids: list[TokenId] = Field(min_length=1, description="the prompt as a list of token ids, not empty")
    logprobs: int | None = Field(None, ge=0, le=1)
    """None for none; 0 and 1 for that of each sampled token."""
    skip_special_tokens: bool = True
    """Ignored, as the next: an answer has no text."""
    detokenize: bool = True
    return_token_ids: bool = True
    """An answer always has them."""

    @classmethod
    def flat(cls, body: dict[str, object]) -> dict[str, object]:
        """See `ClientRequest`."""
        inner = body.get("sampling_params")
        if inner is None:
            return body
        if not isinstance(inner, dict):
            raise refused({"sampling_params": f"sampling_params: expected an object, found {type(inner).__name__}"})
        outer = {name: value for name, value in body.items() if name != "sampling_params"}
        if twice := sorted(outer.keys() & inner.keys()):
            raise refused({name: f"{name}: expected in the body or in sampling_params, not in both" for name in twice})
        return {**outer, **inner}

    @property
    def wants_logprobs(self) -> bool:
        """See `ClientRequest`."""
        return self.logprobs is not None

    @property
    def num_alternatives(self) -> int:
        """See `ClientRequest`; 1 is what clients send who read the sampled token's alone."""
        return 0


RequestT = TypeVar("RequestT", bound=ClientRequest)


def read_request(kind: type[RequestT], body: bytes) -> RequestT:
    """Return what the body of a request asks for.

    Raises:
        EndpointError: it is not a JSON object, or fields are unknown, out of range or not supported; all are named.
    """
    try:
        fields = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise EndpointError(400, f"the body is not JSON in UTF-8: {error}") from None
    if not isinstance(fields, dict):
        raise EndpointError(400, f"the body is a JSON {type(fields).__name__}, expected an object")
    try:
        asked = kind.model_validate(kind.flat(fields))
    except ValidationError as error:
        raise refused(_problems(kind, error.errors(include_url=False, include_input=False))) from None
    if problems := _unsupported(asked):
        raise refused(problems)
    return asked


def refused(problems: Mapping[str, str]) -> EndpointError:
    """Return the error that says what is wrong, by field."""
    return EndpointError(400, "; ".join(problems.values()), param=next(iter(problems)))


def _problems(kind: type[ClientRequest], errors: list[ErrorDetails]) -> dict[str, str]:
    """Return what is wrong by field; a field with alternatives gets one sentence for all of them."""
    problems: dict[str, str] = {}
    for error in errors:
        place = [str(part) for part in error["loc"]]
        expected = kind.model_fields[place[0]].description if place[0] in kind.model_fields else None
        if "content" in place:
            place, expected = place[: place.index("content") + 1], Message.model_fields["content"].description
        elif expected:
            place = place[:1]
        name = ".".join((kind.NAMES.get(place[0], place[0]), *place[1:]))
        message = error["msg"][0].lower() + error["msg"][1:].removeprefix("Input ")
        if error["type"] == "extra_forbidden":
            message = "is not supported"
        problems.setdefault(name, f"{name}: expected {expected}" if expected else f"{name}: {message}")
    return problems


def _unsupported(asked: ClientRequest) -> dict[str, str]:
    problems: dict[str, str] = {}
    for name, value in (asked.model_extra or {}).items():
        if name in IGNORED or any(value == neutral for neutral in NEUTRAL.get(name, ())):
            continue
        said = asked.NAMES.get(name, name)
        problems[said] = f"{said} is not supported" if name in NEUTRAL else f"{said} is no field of this endpoint"
    if 0 < asked.temperature < MIN_TEMPERATURE:
        problems["temperature"] = f"temperature: expected 0 (greedy) or at least {MIN_TEMPERATURE}"
    if asked.num_alternatives:
        name = "top_logprobs" if isinstance(asked, ChatRequest) else "logprobs"
        problems[name] = (
            f"{name}: only the sampled token's logprob is known; expected 0, found {asked.num_alternatives}"
        )
    if isinstance(asked, CompletionRequest) and asked.prompt_logprobs is not None and asked.stream:
        problems["prompt_logprobs"] = "prompt_logprobs: not available with stream=true"
    if isinstance(asked, CompletionRequest) and len(asked.prompt) == 0 and not isinstance(asked.prompt, str):
        problems["prompt"] = f"prompt: expected {CompletionRequest.model_fields['prompt'].description}"
    if "" in asked.stop_strings:
        problems["stop"] = f"stop: expected {ClientRequest.model_fields['stop'].description}"
    return problems
