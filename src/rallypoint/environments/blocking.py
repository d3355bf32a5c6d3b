"""Episodes that may block: plain functions, each rollout in a process of its own, which can be ended.

Owns: what such a function samples with, over a socket, and how it is called. Must not know: who answers, or torch.

    def episode(client, example):
        said = client.chat(max_tokens=20)
        time.sleep(1)                                   # nobody waits for it
        return float(said["content"] == example.ground_truth)
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from rallypoint.data.dataset import Example
from rallypoint.data.messages import Message
from rallypoint.environments.failures import EpisodeFailed
from rallypoint.environments.given import GIVEN, is_given
from rallypoint.environments.in_process import RolloutTask
from rallypoint.environments.outcome import unwrapped
from rallypoint.errors import (
    EpisodeError,
    GenerationError,
    NotFiniteError,
    RequestError,
    RowFullError,
    UserCodeError,
    first_line,
)
from rallypoint.user_code import is_written_plain, misfit, own_signature, split

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rallypoint.environments.tools import Tools

Method = Literal["sample", "call", "chat"]
SIZE = struct.Struct("!Q")
"""Stands before every message: the bytes that it has."""
_ERRORS = {kind.__name__: kind for kind in (RowFullError, GenerationError, EpisodeError, RequestError)}
_EXPECTED = "expected a function of (client, example)"


@dataclasses.dataclass(frozen=True, slots=True)
class SampledTurn:
    """A turn as such a function gets it; see `Turn`."""

    prompt: tuple[int, ...]
    response: tuple[int, ...]
    logprobs: tuple[float, ...]
    sampled_logprobs: tuple[float, ...]
    version: int
    truncated: bool
    limit: Literal["turn", "row", "engine"] | None

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> SampledTurn:
        """Return the turn that JSON says."""
        ids = {name: tuple(fields[name]) for name in ("prompt", "response", "logprobs", "sampled_logprobs")}
        return cls(**ids, version=fields["version"], truncated=fields["truncated"], limit=fields["limit"])


class PlainClient:
    """Samples for one episode, as `Client` does, for a caller who waits; threads may share it."""

    def __init__(self, address: str, key: str, prompt: tuple[int, ...], tokenizer: str) -> None:
        """Connect to nobody yet.

        Args:
            address: of the socket of the process that samples.
            key: of the rollout.
            prompt: its token ids.
            tokenizer: its folder.
        """
        self.prompt = prompt
        """Token ids of the prompt, with which the first turn begins."""
        self.engine_errors: list[BaseException] = []
        """What was raised because the engine failed."""
        self.tools: Tools | None = None
        """Those of Python that `chat` was given, which count their errors themselves."""
        self._address, self._key, self._tokenizer = address, key, tokenizer

    @functools.cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's; it is loaded when it is asked for."""
        from rallypoint.data import load_tokenizer

        return load_tokenizer(self._tokenizer)

    def sample(
        self,
        tokens: Sequence[int],
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        temperature: float | None = None,
    ) -> SampledTurn:
        """See `Client.sample`."""
        limits = {"max_tokens": max_tokens, "stop": stop, "temperature": temperature}
        return SampledTurn.of(self._ask("sample", tokens=_as_json(tokens), **limits))

    def call(
        self,
        tokens: Sequence[int],
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        temperature: float | None = None,
    ) -> SampledTurn:
        """See `Client.call`."""
        limits = {"max_tokens": max_tokens, "stop": stop, "temperature": temperature}
        return SampledTurn.of(self._ask("call", tokens=_as_json(tokens), **limits))

    def chat(
        self,
        messages: Sequence[Mapping[str, object] | Message] = (),
        tools: Tools | Sequence[Mapping[str, object]] | None = None,
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        temperature: float | None = None,
        state: str | None = None,
    ) -> dict[str, object]:
        """See `Client.chat`."""
        if tools is not None:
            from rallypoint.environments.tools import Tools  # takes longer than the rest of this program

            self.tools = tools if isinstance(tools, Tools) else self.tools
        limits = {"max_tokens": max_tokens, "stop": stop, "temperature": temperature, "state": state}
        schemas = None if tools is None else list(tools)
        if self.tools is not None and self.tools is tools and self.tools.has_foreign:
            schemas = self.tools.legible(self.tokenizer)
        return self._ask("chat", messages=_as_json(messages), tools=schemas, **limits)

    def _ask(self, method: Method, **arguments: object) -> dict[str, Any]:
        try:
            asked = json.dumps({"key": self._key, "method": method, "arguments": arguments}, default=_plain).encode()
        except (TypeError, ValueError) as error:
            raise EpisodeError(f"client.{method}: {first_line(error)}") from None
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(self._address)
            connection.sendall(SIZE.pack(len(asked)) + asked)
            (size,) = SIZE.unpack(_read(connection, SIZE.size))
            said = json.loads(_read(connection, size))
        if "error" not in said:
            return said["answer"]
        error = _ERRORS.get(said["error"], EpisodeError)(said["text"])
        if isinstance(error, GenerationError) and not isinstance(error, RowFullError):
            self.engine_errors.append(error)
        raise error


def _as_json(entries: object) -> object:
    """Return a sequence as a list; what is none stays as it is, for the other side to say so."""
    return list(entries) if isinstance(entries, Sequence) and not isinstance(entries, str | bytes) else _plain(entries)


def _plain(value: object) -> object:
    """Return what JSON can hold in place of a message, or of numbers of another library."""
    if isinstance(value, Message):
        return {"role": value.role, "content": value.content}
    plain = unwrapped(value)
    if plain is value and not isinstance(value, str | int | float | Mapping | None):
        raise TypeError(f"found {type(value).__name__}, which JSON does not have")
    return plain


def _read(connection: socket.socket, size: int) -> bytes:
    read = bytearray()
    while len(read) < size:
        piece = connection.recv(min(size - len(read), 2**20))
        if not piece:
            raise EpisodeError("the rollout of this client has ended")
        read += piece
    return bytes(read)


@dataclasses.dataclass(frozen=True, slots=True)
class EpisodeCall:
    """What a plain episode is called with for one rollout."""

    name: str
    """Name of the example, for messages."""
    address: str
    """Path of the socket on which it is answered."""
    key: str
    prompt: tuple[int, ...]
    example: Example
    group: int = 0


@dataclasses.dataclass(frozen=True)
class EpisodeTask(RolloutTask[EpisodeCall]):
    """A plain episode."""

    WHOSE: ClassVar[str] = "the episode"

    tokenizer: str = ""
    """Folder of the model's."""

    def misfit(self, function: object) -> str | None:
        """See `RolloutTask.misfit`."""
        return find_misfit(function)

    def begin(self, function: Callable[..., object], call: EpisodeCall) -> tuple[object, Callable[[], int | None]]:
        """See `RolloutTask.begin`."""
        client = PlainClient(call.address, call.key, call.prompt, self.tokenizer)
        try:
            value = function(client, call.example)
        except (GenerationError, NotFiniteError) as error:
            if any(error is each for each in client.engine_errors):
                raise _EngineError(str(error)) from error
            raise
        return value, lambda: client.tools.num_errors if client.tools is not None else None

    def raised(self, error: BaseException) -> EpisodeFailed:
        """See `Task.raised`."""
        return EpisodeFailed("engine", str(error)) if isinstance(error, _EngineError) else super().raised(error)


class _EngineError(Exception):
    """The engine failed, and the episode did not catch that."""


class PlainEpisode(Protocol):
    """Makes one rollout and may block; what it returns is an episode's result."""

    def __call__(self, client: PlainClient, example: Example) -> object:
        """Sample, and return the reward or what else an episode returns."""
        ...


def is_blocking(spec: str) -> bool:
    """Whether a name stands for a plain function of (client, example), by the file's text."""
    try:
        if not is_given(spec):
            return is_written_plain(*split(spec, usual_name="episode"), first="client")
        return spec in GIVEN and is_plain(GIVEN[spec].function)
    except UserCodeError:  # which is told where the episode is checked
        return False


def is_plain(function: object) -> bool:
    """Whether a function is plain, and its first argument is called `client`.

    >>> def plain(client, example): ...
    >>> async def other(client, example): ...
    >>> is_plain(plain), is_plain(other), is_plain(dict)
    (True, False, False)
    """
    if not inspect.isfunction(function) or inspect.iscoroutinefunction(inspect.unwrap(function)):
        return False
    return next(iter(own_signature(function).parameters), "") == "client"


def find_misfit(function: object) -> str | None:
    """Say why a function is not a plain episode."""
    if not callable(function):
        return f"{_EXPECTED}, found {type(function).__name__}"
    return misfit(own_signature(function), 2, _EXPECTED)
