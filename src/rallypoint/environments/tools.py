"""Tools: typed Python functions that the policy may call.

Owns: their schemas, and what becomes of a call. Must not know: models, how a call was spelled.

    def add(a: int, b: int) -> int:
        \"\"\"Add two numbers.\"\"\"
        return a + b

    async def episode(client, example):
        tools = Tools(add)
        answer = await client.chat(tools=tools)
        while results := await tools.results(answer):
            answer = await client.chat(results)
        return {"reward": float(str(example.ground_truth) in answer["content"]), **tools.metrics}
"""

from __future__ import annotations

import abc
import asyncio
import functools
import inspect
import json
import os
import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, cast, get_type_hints, overload

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.errors import PydanticUserError

from rallypoint.data import ChatMessage, Message
from rallypoint.data.legible import without_control
from rallypoint.data.messages import calls_of
from rallypoint.environments.own_thread import OwnThread
from rallypoint.errors import RallyError, RowFullError, UserCodeError, first_line
from rallypoint.user_code import own_signature

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rallypoint.data.dataset import Example
    from rallypoint.environments.chat import Messages
    from rallypoint.environments.client import Client

Tool: TypeAlias = Callable[..., object]
"""A typed function with a docstring."""
_MAX_SHOWN = 3
"""Misfits of a call's arguments that are said."""


class ToolError(Exception):
    """Raised by a tool: all of its text is the call's result, and counts as an error of the policy's."""


class DescribedTool(abc.ABC):
    """A tool that is described already, as that of an MCP server."""

    name: str
    schema: ChatMessage
    """As in OpenAI's API."""
    is_foreign = False
    """Whether somebody else has written the schema, as that of a server."""

    @abc.abstractmethod
    def checked(self, arguments: object) -> dict[str, object]:
        """Return arguments as `run` takes them.

        Raises:
            ValidationError: they do not fit.
        """

    @abc.abstractmethod
    async def run(self, arguments: Mapping[str, object]) -> object:
        """Call it; raises anything, see `Tools.results`."""


class Tools(Sequence[ChatMessage]):
    """Functions as OpenAI's function schemas; `results` calls those that an answer asks for."""

    def __init__(self, *functions: Tool | DescribedTool) -> None:
        """Describe functions by their signatures and docstrings; they may be async, and others run in threads.

        Raises:
            UserCodeError: one cannot be described; the parameter is named.
        """
        described = [one if isinstance(one, DescribedTool) else _described(one) for one in functions]
        self._tools = {tool.name: tool for tool in described}
        if len(self._tools) < len(functions):
            raise UserCodeError(f"expected tools with different names, found {', '.join(self._tools)} for all of them")
        self.num_calls = 0
        """Calls so far, those with errors too."""
        self.num_errors = 0
        """Calls that could not be read, name no tool, do not fit its parameters, or raised."""

    @overload
    def __getitem__(self, index: int) -> ChatMessage: ...
    @overload
    def __getitem__(self, index: slice) -> list[ChatMessage]: ...
    def __getitem__(self, index: int | slice) -> ChatMessage | list[ChatMessage]:
        """Return the schema of a tool."""
        return [tool.schema for tool in self._tools.values()][index]

    def __len__(self) -> int:
        return len(self._tools)

    @property
    def has_foreign(self) -> bool:
        """Whether somebody else has written some of the schemas."""
        return any(tool.is_foreign for tool in self._tools.values())

    def legible(self, tokenizer: PreTrainedTokenizerBase) -> list[ChatMessage]:
        """Return the schemas; in those that somebody else has written a space stands for each control token."""
        return [
            _mapped(tool.schema, lambda text: without_control(tokenizer, text)) if tool.is_foreign else tool.schema
            for tool in self._tools.values()
        ]

    @property
    def metrics(self) -> dict[str, float]:
        """What was counted, by name."""
        return {"tool_calls": self.num_calls, "tool_errors": self.num_errors}

    async def results(self, answer: ChatMessage) -> list[dict[str, object]]:
        """Call what an answer asks for, in its order, and return messages with the results; none if it calls nothing.

        What a tool raises becomes its result, for the policy to read.

        Raises:
            RallyError: a tool raised one, such as EnvironmentFailedError: it costs the rollout.
        """
        results: list[dict[str, object]] = []
        for call in calls_of(answer):
            said = await self._call(str(call.name), call.arguments)
            results.append({"role": "tool", "tool_call_id": call.id, "name": call.name, "content": said})
        for problem in cast("Sequence[str]", answer.get("malformed") or ()):
            self.num_calls += 1
            said = self._error(f"the call cannot be read: {problem}")
            results.append({"role": "tool", "tool_call_id": "unreadable", "name": "unknown", "content": said})
        return results

    async def _call(self, name: str, arguments: object) -> str:
        self.num_calls += 1
        if (tool := self._tools.get(name)) is None:
            return self._error(f"there is no tool {name!r}; expected one of {', '.join(self._tools)}")
        try:
            given = tool.checked(arguments)
        except ValidationError as error:
            misfits = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors(include_url=False)]
            return self._error("; ".join(misfits[:_MAX_SHOWN]))
        try:
            found = await tool.run(given)
        except RallyError:
            raise
        except ToolError as error:
            return self._error(str(error))
        except Exception as error:  # noqa: BLE001 - the user's code may raise anything: the policy reads it
            return self._error(f"{type(error).__name__}: {first_line(error)}")
        return found if isinstance(found, str) else json.dumps(found, ensure_ascii=False, default=str)

    def _error(self, said: str) -> str:
        self.num_errors += 1
        return f"error: {said}"


class ToolUse:
    """An episode in which the policy may call tools until it answers without a call; the reward function scores it.

    `rally.train("grpo", episode=ToolUse(add, max_turns=4), reward=...)`
    """

    def __init__(
        self, *functions: Tool | DescribedTool, max_turns: int | None = None, system: str | None = None
    ) -> None:
        """Describe the tools.

        Args:
            functions: see `Tools`.
            max_turns: answers at most; None: as many as the row has room for.
            system: message of the system before each prompt; a prompt's own comes after it.

        Raises:
            UserCodeError: one cannot be described.
        """
        Tools(*functions)
        self._functions, self._max_turns, self._system = functions, max_turns, system

    async def __call__(self, client: Client, example: Example) -> None:
        """Make one rollout. One whose row is full ends there, if it has an answer.

        Raises:
            RowFullError: prompt and tools leave no room for an answer.
        """
        tools, num_turns = Tools(*self._functions), 0
        messages: Messages = self._prompt(example)
        try:
            while num_turns == 0 or messages:
                answer = await client.chat(messages, tools)
                num_turns += 1
                if num_turns == self._max_turns:
                    return
                messages = await tools.results(answer)
        except RowFullError:
            if not num_turns:
                raise

    def _prompt(self, example: Example) -> list[Message]:
        """Return the messages of a prompt with that of the system; none for those of the example as they are."""
        if self._system is None:
            return []
        said = [one for one in example.prompt if one.role == "system"]
        system = "\n\n".join([self._system, *(one.content for one in said)])
        return [Message("system", system), *(one for one in example.prompt if one.role != "system")]


class _Tool(DescribedTool):
    """A function that was described."""

    def __init__(self, function: Callable[..., object]) -> None:
        self._function = function
        self.name = str(getattr(function, "__name__", type(function).__name__))
        about, said_of = _read_docstring(inspect.getdoc(function) or "")
        if not about:
            raise UserCodeError(f"the tool {self.name} has no docstring, which says what it does; give it one")
        self._names: dict[str, str] = {}
        fields: dict[str, Any] = {}
        hints = _hints(function, self.name)
        for number, (name, parameter) in enumerate(own_signature(function).parameters.items()):
            fields[f"field_{number}"] = self._field(name, parameter, hints, said_of.get(name))
            self._names[f"field_{number}"] = name  # a name of the user's may be one of pydantic's
        config = ConfigDict(extra="forbid", arbitrary_types_allowed=False)
        self._model = cast("type[BaseModel]", create_model(self.name, __config__=config, **fields))
        parameters = _without_titles(self._model.model_json_schema())
        parameters.setdefault("properties", {})
        self.schema: ChatMessage = {
            "type": "function",
            "function": {"name": self.name, "description": about, "parameters": parameters},
        }

    def _field(
        self, name: str, parameter: inspect.Parameter, hints: Mapping[str, Any], about: str | None
    ) -> tuple[Any, Any]:
        which = f"parameter {name!r} of the tool {self.name}"
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise UserCodeError(f"{which} cannot be described: expected one that is given by name, found {parameter}")
        if name not in hints:
            raise UserCodeError(f"{which} has no type; expected one, such as {name}: int")
        default = ... if parameter.default is parameter.empty else parameter.default
        field = Field(default, alias=name, description=about) if about else Field(default, alias=name)
        try:
            create_model(self.name, one=(hints[name], field)).model_json_schema()
        except (PydanticUserError, TypeError) as error:
            shown = inspect.formatannotation(hints[name])
            raise UserCodeError(
                f"{which} has the type {shown}, which cannot be described; expected one that JSON has, such as int, "
                f"str or list[str]: {first_line(error).partition('. Set')[0]}"
            ) from None
        return hints[name], field

    def checked(self, arguments: object) -> dict[str, object]:
        """See `DescribedTool`."""
        values = self._model.model_validate(arguments)
        return {name: getattr(values, field) for field, name in self._names.items()}

    async def run(self, arguments: Mapping[str, object]) -> object:
        """Call the function, in a thread if it is not async."""
        if inspect.iscoroutinefunction(self._function):
            return await self._function(**arguments)
        thread = OwnThread(self.name)
        try:
            async with _places():
                return await thread.call(functools.partial(self._function, **arguments))
        finally:
            thread.end()


_PLACES: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = weakref.WeakKeyDictionary()


def _places() -> asyncio.Semaphore:
    """Return the places for calls that block, of this loop: a few more than cores, as programs may need one each.

    A call that hangs frees its place when its rollout is given up.
    """
    return _PLACES.setdefault(asyncio.get_running_loop(), asyncio.Semaphore((os.cpu_count() or 1) + 4))


@functools.lru_cache(maxsize=64)
def _described(function: Callable[..., object]) -> _Tool:
    if not callable(function) or isinstance(function, type):
        raise UserCodeError(f"a tool is a function, found {function!r}")
    return _Tool(function)


def _hints(function: Callable[..., object], name: str) -> dict[str, Any]:
    try:
        return get_type_hints(function, include_extras=True)
    except (AttributeError, NameError, SyntaxError, TypeError) as error:
        raise UserCodeError(f"a type of the tool {name} cannot be found: {type(error).__name__}: {error}") from None


def _read_docstring(text: str) -> tuple[str, dict[str, str]]:
    r"""Return what a docstring says of a function, and of its parameters: in Google's form, or as `:param a:`.

    >>> _read_docstring("Add.\n\nArgs:\n    a: one,\n        whole\n    b (int): two\n\nReturns:\n    c: 3")
    ('Add.', {'a': 'one, whole', 'b': 'two'})
    """
    about, said = list[str](), dict[str, str]()
    section, name, indent = "", "", 0
    for line in text.splitlines():
        depth = len(line) - len(line.lstrip())
        title = re.fullmatch(r"(Args|Arguments|Parameters|Returns|Yields|Raises|Examples?|Notes?):\s*", line)
        one = re.match(r"\s*:(param) (?:\w+ )?(\w+):\s*(.*)", line)
        if one is None and section in ("Args", "Arguments", "Parameters") and not (name and depth > indent):
            one = re.match(r"(\s+)(\w+)(?: \([^)]*\))?:\s*(.*)", line)
        if title:
            section, name = title[1], ""
        elif one:
            section, (name, said[one[2]]), indent = section or one[1], (one[2], one[3]), depth
        elif name and depth > indent:
            said[name] = f"{said[name]} {line.strip()}"
        elif not section:
            about.append(line)
    return "\n".join(about).strip(), said


def _mapped(value: object, change: Callable[[str], str]) -> Any:
    """Return JSON with its texts and keys changed."""
    if isinstance(value, Mapping):
        return {change(key): _mapped(one, change) for key, one in cast("Mapping[str, object]", value).items()}
    if isinstance(value, list):
        return [_mapped(one, change) for one in cast("list[object]", value)]
    return change(value) if isinstance(value, str) else value


def _without_titles(schema: object) -> Any:
    """Return a schema without the titles that pydantic adds, which say nothing new."""
    if isinstance(schema, Mapping):
        fields = cast("Mapping[str, object]", schema)
        kept = (name for name, one in fields.items() if name != "title" or not isinstance(one, str))
        return {name: _without_titles(fields[name]) for name in kept}
    if isinstance(schema, list):
        return [_without_titles(one) for one in cast("list[object]", schema)]
    return schema
