r"""Messages of conversations, and the tools that they may call, as data have them: in the form of OpenAI's API.

Owns: which fields there are, and what is wrong with one. Must not know: files, tokenizers, templates.

    {"role": "assistant", "content": null, "tool_calls": [
        {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": "{\"a\": 1}"}}]}
    {"role": "tool", "tool_call_id": "call_1", "content": "3"}
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias, cast

from rallypoint.data.files import found, suggestion

ChatMessage: TypeAlias = Mapping[str, object]
"""A message as OpenAI's API has it: `role`, `content`, and `tool_calls`, `tool_call_id` or `name`."""
Role = Literal["system", "user", "assistant", "tool"]
ROLES: tuple[Role, ...] = ("system", "user", "assistant", "tool")
MOST_DEEP = 64
"""Levels of the arguments of a call."""
_REASONING = ("reasoning_content", "reasoning", "thinking")
_FURTHER = ("name", "tool_calls", "tool_call_id", *_REASONING)
_SCHEMA = "{'type': 'function', 'function': {'name': ..., 'parameters': ...}}"
_CALL = "{'id': ..., 'type': 'function', 'function': {'name': ..., 'arguments': ...}}"


@dataclasses.dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation."""

    role: Role
    content: str
    """Text; empty if the assistant only calls tools."""
    further: Mapping[str, object] = dataclasses.field(default_factory=dict[str, object])
    """What else the message has: `tool_calls`, `tool_call_id`, `name`, `reasoning_content`, `reasoning`, `thinking`."""

    @property
    def fields(self) -> dict[str, object]:
        """All of it, as OpenAI's API has it."""
        return {"role": self.role, "content": self.content, **self.further}


@dataclasses.dataclass(frozen=True, slots=True)
class CallMessage:
    """A call in a message."""

    id: object
    name: object
    arguments: object
    """What their JSON says, or the text if it is none."""


def calls_of(message: Mapping[str, object]) -> list[CallMessage]:
    """Return the calls of a message as in OpenAI's API, or as templates take it.

    >>> calls_of({"tool_calls": [{"id": "1", "function": {"name": "f", "arguments": '{"a": 1}'}}]})
    [CallMessage(id='1', name='f', arguments={'a': 1})]
    """
    calls: list[CallMessage] = []
    for call in map(as_mapping, as_list(message.get("tool_calls") or [])):
        function = as_mapping(call.get("function") or call)
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            with contextlib.suppress(ValueError, RecursionError):
                arguments = _shallow(json.loads(arguments), arguments)
        elif is_deep(arguments):  # as text that is not JSON
            arguments = f"more than {MOST_DEEP} levels of brackets"
        calls.append(CallMessage(call.get("id"), function.get("name"), arguments))
    return calls


def _shallow(value: object, text: str) -> object:
    return text if is_deep(value) else value


def is_deep(value: object) -> bool:
    """Whether a value has so many levels that what reads it may not come to its end.

    >>> is_deep([[{"a": 1}]]), is_deep(json.loads("[" * 99 + "]" * 99))
    (False, True)
    """
    level = [value]
    for _ in range(MOST_DEEP):
        lists = [
            [*one.values()] if isinstance(one, Mapping) else one for one in level if isinstance(one, Mapping | list)
        ]
        if not lists:
            return False
        level = [inner for one in cast("list[list[object]]", lists) for inner in one]
    return True


def with_arguments(message: Mapping[str, object], *, as_text: bool) -> dict[str, object]:
    """Return a message with the arguments of its calls as text in JSON, or as what that says.

    >>> call = {"function": {"name": "now", "arguments": None}}
    >>> with_arguments({"tool_calls": [call]}, as_text=True)["tool_calls"]
    [{'type': 'function', 'function': {'name': 'now', 'arguments': '{}'}}]
    """
    calls: list[object] = []
    for call in calls_of(message):
        given = {} if call.arguments is None else call.arguments  # of a function without parameters
        arguments = json.dumps(given, ensure_ascii=False) if as_text else given
        key = {} if call.id is None else {"id": call.id}
        calls.append({**key, "type": "function", "function": {"name": call.name, "arguments": arguments}})
    return {**message, "tool_calls": calls} if calls else dict(message)


def as_list(value: object) -> list[object]:
    """Return a list as it is, and a list of anything else alone."""
    return cast("list[object]", value) if isinstance(value, list) else [value]


def as_mapping(value: object) -> Mapping[str, object]:
    """Return an object as it is, and an empty one for anything else."""
    return cast("Mapping[str, object]", value) if isinstance(value, Mapping) else {}


def whole_text(message: ChatMessage) -> str:
    r"""Return all that a message says: its reasoning, its text, and its calls as name and arguments.

    >>> call = {"function": {"name": "f", "arguments": '{"a": 1}'}}
    >>> whole_text({"role": "assistant", "content": "So:", "tool_calls": [call]})
    'So:\nf({"a": 1})'
    """
    said = [reasoning_in(message), str(message.get("content") or "")]
    called = [(call.name, json.dumps(call.arguments, ensure_ascii=False, default=str)) for call in calls_of(message)]
    return "\n".join(filter(None, [*said, *(f"{name}({arguments})" for name, arguments in called)]))


def reasoning_in(message: ChatMessage) -> str:
    """Return the reasoning of a message, which has a field of its own; empty if there is none."""
    return next((str(message[name]) for name in _REASONING if message.get(name)), "")


def read_messages(value: object, column: str, role: Role | None, wrong: list[tuple[str, str]]) -> tuple[Message, ...]:
    """Return a list of messages; text is one message of a role, if there is one.

    Args:
        value: of the cell.
        column: that it is in.
        role: of text; None if text is a problem.
        wrong: where problems are added, each with its place.
    """
    if isinstance(value, str):
        if value.lstrip().startswith(("[{", "{")) and '"role"' in value:
            wrong.append((column, f"expected a list of messages, found the same written as {found(value)}"))
        elif role is None:
            wrong.append((column, f"expected a list of messages, found {found(value)}"))
        elif not value.strip():
            wrong.append((column, _no_text(value)))
        return (Message(role or "user", value),)
    if not isinstance(value, list) or not value:
        wrong.append((column, f"expected a list of messages or text, found {found(value)}"))
        return ()
    messages: list[Message] = []
    names: dict[object, object] = {}
    for index, entry in enumerate(cast("list[object]", value)):
        if (problem := _problem(entry)) is not None:
            wrong.append((f"{column}[{index}]{problem[0]}", problem[1]))
            continue
        fields = cast("dict[str, Any]", entry)
        further = {name: fields[name] for name in _FURTHER if fields.get(name)}
        if "tool_calls" in further:
            further = with_arguments(further, as_text=True)
            names |= {call.id: call.name for call in calls_of(further)}
        if fields["role"] == "tool" and "name" not in further and (name := names.get(further.get("tool_call_id"))):
            further["name"] = name  # templates may show it, and OpenAI's API leaves it out
        messages.append(Message(cast("Role", sys.intern(fields["role"])), fields.get("content") or "", further))
    return tuple(messages)


def _problem(message: object) -> tuple[str, str] | None:
    """Return which part of a message is wrong, and how."""
    if not isinstance(message, dict):
        return "", f"expected an object with 'role' and 'content', found {found(message)}"
    fields = cast("dict[str, object]", message)
    if (problem := _problem_of_texts(fields)) is not None:
        return problem
    role, content = cast("str", fields["role"]), cast("str | None", fields.get("content"))
    if fields.get("function_call"):
        return ".function_call", f"expected the newer 'tool_calls', a list of {_CALL}"
    if fields.get("tool_calls"):
        return _problem_of_calls(role, fields["tool_calls"])
    # Many data sets have an empty message of the system in every row, and a tool may have nothing to say.
    is_said = bool((content or "").strip()) or role in ("system", "tool")
    return None if is_said else (".content", _no_text(content or ""))


def _problem_of_texts(fields: Mapping[str, object]) -> tuple[str, str] | None:
    needed = ("role",) if fields.get("tool_calls") or fields.get("function_call") else ("role", "content")
    for name in needed:
        if name not in fields:
            return "", f"expected '{name}'{suggestion(name, list(fields)) or f', found {found(fields)}'}"
    for name in ("role", "content", "name", "tool_call_id", *_REASONING):
        # Null is what files with a table of columns have in place of what is absent.
        if not isinstance(fields.get(name), str) and (name in needed or fields.get(name) is not None):
            return f".{name}", f"expected text, found {found(fields.get(name))}"
    if (role := cast("str", fields["role"])) not in ROLES:
        return ".role", f"expected one of {', '.join(ROLES)}, found {role!r}{suggestion(role.lower(), ROLES)}"
    # A chat template may show these; dropped in silence, the prompt would be another one.
    known = ("role", "content", "function_call", *_FURTHER)
    strangers = [name for name, field in fields.items() if name not in known and field is not None]
    said = f"expected only 'role', 'content', {', '.join(map(repr, _FURTHER))} in a message"
    return (f".{strangers[0]}", said) if strangers else None


def _problem_of_calls(role: str, calls: object) -> tuple[str, str] | None:
    if role != "assistant":
        return ".tool_calls", f"expected calls of tools in messages of the assistant alone, found role {role!r}"
    if not isinstance(calls, list):
        return ".tool_calls", f"expected a list of {_CALL}, found {found(calls)}"
    for index, call in enumerate(calls_of({"tool_calls": calls})):
        if not isinstance(call.name, str) or not call.name:
            given = cast("list[object]", calls)[index]
            return f".tool_calls[{index}]", f"expected {_CALL}, found {found(given)}"
        if not isinstance(call.arguments, dict | None):
            return (
                f".tool_calls[{index}].function.arguments",
                f"expected an object, or the JSON of one, found {found(call.arguments)}",
            )
    return None


def _no_text(text: str) -> str:
    return f"expected text, found {'only blanks' if text else 'empty text'}"


def read_tools(value: object, wrong: list[tuple[str, str]]) -> tuple[ChatMessage, ...]:
    """Return the tools of a row as OpenAI's function schemas: a list of them, or of their JSON, or the JSON of a list.

    Rows with the same tools share them. Problems are added to `wrong`, each with its place.

    >>> read_tools('[{"name": "add", "parameters": {}}]', [])
    ({'type': 'function', 'function': {'name': 'add', 'parameters': {}}},)
    """
    if value is None or value in ("", []):
        return ()
    tools, problem = _tools_of(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
    wrong += [problem] if problem else []
    return tools


@functools.lru_cache(maxsize=1024)
def _tools_of(text: str) -> tuple[tuple[ChatMessage, ...], tuple[str, str] | None]:
    listed = _parsed(text)
    if listed is None:
        return (), None
    if not isinstance(listed, list):
        return (), ("tools", f"expected a list of function schemas, or the JSON of one, found {found(listed)}")
    tools: list[ChatMessage] = []
    for index, one in enumerate(map(_parsed, cast("list[object]", listed))):
        fields = cast("dict[str, object]", one) if isinstance(one, dict) else {}
        function = fields.get("function", fields)
        if not isinstance(function, dict) or not isinstance(cast("dict[str, object]", function).get("name"), str):
            return (), (f"tools[{index}]", f"expected a function schema, {_SCHEMA}, found {found(one)}")
        tools.append(fields if "function" in fields else {"type": "function", "function": fields})
    return tuple(tools), None


def _parsed(value: object) -> object:
    """Return what JSON says, where a value is the text of some."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value


def without_nulls(value: object) -> object:
    """Return a value of a table's cell without keys whose value is null.

    Every row of a column of objects has the keys of all rows there: null is what a row did not have.

    >>> without_nulls([{"name": "add", "arguments": {"a": 1, "where": None}, "few": [None]}])
    [{'name': 'add', 'arguments': {'a': 1}, 'few': [None]}]
    """
    if isinstance(value, dict):
        fields = cast("dict[str, object]", value)
        return {name: without_nulls(one) for name, one in fields.items() if one is not None}
    return [without_nulls(one) for one in cast("list[object]", value)] if isinstance(value, list) else value


def schemas_text(tools: Sequence[ChatMessage]) -> str:
    """Return what tools are described by, as text."""
    return json.dumps(list(tools), ensure_ascii=False) if tools else ""
