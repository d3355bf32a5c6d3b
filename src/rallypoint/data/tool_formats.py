r"""Calls of tools in the text of an answer, in the spellings of model families.

Owns: what each family writes. Must not know: tokenizers, what tools do. Nothing here raises: what is no call is
malformed, and its text stays in the content.

| format    | families               | a call                                                                       |
|-----------|------------------------|------------------------------------------------------------------------------|
| `tagged`  | Hermes, Qwen2.5 and 3  | `<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>`                |
|           | Qwen3-Coder, Qwen3.5   | `<tool_call><function=f><parameter=a>1</parameter></function></tool_call>`   |
|           | GLM-4.5 and later      | `<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>`       |
| `llama`   | Llama 3.1 to 3.3       | `{"name": "f", "parameters": {"a": 1}}`, the whole answer                    |
| `mistral` | Mistral                | `[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]`                         |
|           | Devstral, Ministral    | `[TOOL_CALLS]f[ARGS]{"a": 1}`                                                |
| `harmony` | gpt-oss                | `<\|channel\|>commentary to=functions.f<\|message\|>{"a": 1}`                |
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias, cast

from rallypoint.data.files import found

Call: TypeAlias = tuple[str, dict[str, object]]
"""Name of a tool, and its arguments."""


@dataclasses.dataclass(frozen=True, slots=True)
class CallMessage:
    """A call in a message."""

    id: object
    name: object
    arguments: object
    """What their JSON says, or the text if it is none."""


@dataclasses.dataclass(slots=True)
class Said:
    """What an answer says."""

    content: str
    """Its text, without the calls that were read."""
    calls: list[Call] = dataclasses.field(default_factory=list[Call])
    malformed: list[str] = dataclasses.field(default_factory=list[str])
    """What is wrong with each call that could not be read."""
    reasoning: str | None = None


Types: TypeAlias = Mapping[tuple[str, str], frozenset[str]]
"""Tool and parameter -> the JSON types that it may have."""
ToolFormat: TypeAlias = Callable[[str, Types], Said]


def calls_of(message: Mapping[str, object]) -> list[CallMessage]:
    """Return the calls of a message as in OpenAI's API, or as templates take it.

    >>> calls_of({"tool_calls": [{"id": "1", "function": {"name": "f", "arguments": '{"a": 1}'}}]})
    [CallMessage(id='1', name='f', arguments={'a': 1})]
    """
    calls: list[CallMessage] = []
    for call in map(_mapping, _listed(message.get("tool_calls") or [])):
        function = _mapping(call.get("function") or call)
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            with contextlib.suppress(ValueError):
                arguments = json.loads(arguments)
        calls.append(CallMessage(call.get("id"), function.get("name"), arguments))
    return calls


def with_arguments(message: Mapping[str, object], *, as_text: bool) -> dict[str, object]:
    """Return a message with the arguments of its calls as text in JSON, or as what that says."""
    calls: list[object] = []
    for call in calls_of(message):
        arguments = json.dumps(call.arguments, ensure_ascii=False) if as_text else call.arguments
        calls.append({"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}})
    return {**message, "tool_calls": calls} if calls else dict(message)


def format_of(template: str) -> ToolFormat:
    """Return how a model with a chat template writes calls, which that gives as an example, or writes into the history.

    >>> format_of("{{ '[TOOL_CALLS]' }}").__name__, format_of("{{ '<tool_call>' }}").__name__
    ('mistral', 'tagged')
    """
    if "[TOOL_CALLS]" in template:
        return mistral
    if "<|channel|>" in template and "<|start|>" in template:
        return harmony
    if "<tool_call>" not in template and re.search(r"""\\?["']parameters\\?["']: """, template):
        return llama
    return tagged


def beginnings(form: ToolFormat, *, has_tools: bool) -> tuple[str, ...]:
    """Return the texts from one of which on an answer in a format may be something else than its content."""
    if form is harmony:
        return ("",)  # what comes before a header is not said
    if not has_tools:
        return ()
    if form is llama:
        return "{", "<|python_tag|>"
    return ("[TOOL_CALLS]",) if form is mistral else ("<tool_call>",)


def types_of(tools: Sequence[Mapping[str, object]]) -> dict[tuple[str, str], frozenset[str]]:
    """Return the types of all parameters of OpenAI's function schemas.

    >>> types_of([{"function": {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}}}}}])
    {('add', 'a'): frozenset({'integer'})}
    """
    types: dict[tuple[str, str], frozenset[str]] = {}
    for tool in tools:
        function = _mapping(tool.get("function") or tool)
        for name, schema in _mapping(_mapping(function.get("parameters")).get("properties")).items():
            types[str(function.get("name")), name] = frozenset(_types(schema))
    return types


def tagged(text: str, types: Types) -> Said:
    """Read calls in `<tool_call>` tags: JSON, `<function=...>`, or `<arg_key>`.

    >>> tagged('Let me see. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', {})
    Said(content='Let me see. ', calls=[('add', {'a': 1})], malformed=[], reasoning=None)
    """
    said = Said("")
    for number, part in enumerate(re.split(r"<tool_call>", text)):
        if number == 0:
            said.content = part
            continue
        block, closing, rest = part.partition("</tool_call>")
        try:
            said.calls.append(_read_block(block.strip(), types))
        except _NoCallError as error:
            said.malformed.append(str(error) if closing else f"{error}; it has no </tool_call>")
            rest = f"<tool_call>{part}"
        said.content += rest if rest.strip() else ""
    return said


def llama(text: str, _: Types) -> Said:
    """Read an answer that is one or more objects of JSON, behind `<|python_tag|>` or not.

    >>> llama('{"name": "add", "parameters": {"a": 1}}', {}).calls
    [('add', {'a': 1})]
    """
    body = text.strip().removeprefix("<|python_tag|>").strip()
    if not body.startswith("{") or '"name"' not in body:
        return Said(text)
    return _read_all(text, lambda: [_as_call(one) for one in _values(body, ";")])


def mistral(text: str, _: Types) -> Said:
    """Read what follows `[TOOL_CALLS]`: a list of JSON, or a name and `[ARGS]` for each call.

    >>> mistral('[TOOL_CALLS]add[CALL_ID]123456789[ARGS]{"a": 1}', {}).calls
    [('add', {'a': 1})]
    """
    content, *parts = text.split("[TOOL_CALLS]")
    said = Said(content)
    for part in parts:
        name, named, arguments = part.partition("[ARGS]")
        if named:
            name = name.partition("[CALL_ID]")[0].strip()
            one = _read_all(f"[TOOL_CALLS]{part}", lambda name=name, given=arguments: [(name, _arguments(given, name))])
        else:
            one = _read_all(f"[TOOL_CALLS]{part}", lambda part=part: [_as_call(each) for each in _listed(_loads(part))])
        said.calls += one.calls
        said.malformed += one.malformed
        said.content += one.content
    return said


def harmony(text: str, _: Types) -> Said:
    """Read the messages of an answer: those to functions are calls, those of the channel `analysis` are reasoning.

    >>> harmony('<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant to=functions.add<|channel|>commentary'
    ...         ' <|constrain|>json<|message|>{"a": 1}', {})
    Said(content='', calls=[('add', {'a': 1})], malformed=[], reasoning='Hm.')
    """
    said = Said("")
    for part in re.split(r"<\|(?:end|call|return)\|>", text):
        header, begun, body = part.partition("<|message|>")
        channel = re.search(r"<\|channel\|>\s*(\w+)", header)
        recipient = re.search(r"\bto=(?:functions\.)?([^\s<]+)", header)
        if not begun:
            said.content += "" if channel else part.removeprefix("<|start|>assistant")
        elif recipient:
            one = _read_all(part, lambda name=recipient[1], body=body: [(name, _arguments(body, name))])
            said.calls += one.calls
            said.malformed += one.malformed
            said.content += one.content
        elif channel and channel[1] == "analysis":
            said.reasoning = (said.reasoning or "") + body
        else:
            said.content += body
    return said


class _NoCallError(ValueError):
    """Something is no call; so do all below raise it that read one."""


def _read_all(text: str, read: Callable[[], list[Call]]) -> Said:
    """Return the calls of a text, of which all or none are read."""
    try:
        return Said("", read())
    except _NoCallError as error:
        return Said(text, malformed=[str(error)])


def _read_block(block: str, types: Types) -> Call:
    """Return the call between two tags.

    Raises:
        _NoCallError: it is none.
    """
    if block.startswith("{"):
        return _as_call(_loads(block))
    if (function := re.match(r"<function=([^>\s]+)>(.*)", block, re.DOTALL)) is not None:
        name, body = function.groups()
        if "</function>" not in body:
            raise _NoCallError(f"the call of {name} has no </function>")
        pairs = re.findall(r"<parameter=([^>]+)>(.*?)</parameter>", body, re.DOTALL)
        # The line breaks around a value are of the format.
        pairs = [(key.strip(), value.removeprefix("\n").removesuffix("\n")) for key, value in pairs]
        opened = body.count("<parameter=")
    else:
        name = re.split(r"[\s<]", block, maxsplit=1)[0]
        pairs = re.findall(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", block, re.DOTALL)
        opened = block.count("<arg_key>")
        if not opened and block != name:
            raise _NoCallError(
                f"expected an object in JSON, <function=...> or a name with <arg_key>, found {block[:40]!r}"
            )
    if not name:
        raise _NoCallError("the call has no name")
    if opened != len(pairs):
        raise _NoCallError(f"the call of {name} has {opened} parameters, but {len(pairs)} with a value that is closed")
    return name, _encodable({key.strip(): _typed(value, types.get((name, key.strip()))) for key, value in pairs})


def _typed(text: str, types: frozenset[str] | None) -> object:
    """Return a value that stands without quotes, by the types that its parameter may have."""
    if types is None or ("string" in types and not (text.strip() == "null" and "null" in types)):
        return text
    try:
        return _loads(text)
    except _NoCallError:  # whoever calls the tool says what is expected there
        return text


def _as_call(value: object) -> Call:
    """Return the call that an object of JSON is."""
    if not isinstance(value, dict):
        raise _NoCallError(f"expected an object with 'name' and 'arguments', found {found(value)}")
    fields = cast("dict[str, object]", value)
    function = fields.get("function")
    if "name" not in fields and isinstance(function, dict):
        fields = cast("dict[str, object]", function)
    name = fields.get("name")
    if not isinstance(name, str) or not name:
        raise _NoCallError(f"expected the name of a tool as 'name', found {found(name)}")
    given = next((fields[key] for key in ("arguments", "parameters") if key in fields), {})
    return name, _arguments(given, name)


def _arguments(given: object, name: str) -> dict[str, object]:
    if isinstance(given, str):
        given = _loads(given)
    if not isinstance(given, dict):
        raise _NoCallError(f"expected an object as the arguments of {name}, found {found(given)}")
    return _encodable(cast("dict[str, object]", given))


def _encodable(arguments: dict[str, object]) -> dict[str, object]:
    try:
        json.dumps(arguments, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise _NoCallError("expected text, found half of a surrogate pair") from None
    return arguments


def _loads(text: str) -> object:
    (value,) = _values(text, "")
    return value


def _values(text: str, separator: str) -> list[object]:
    """Return the values of JSON in a text, which are separated by blanks and so."""
    decoder, place, values = json.JSONDecoder(parse_constant=_no_constant), 0, list[object]()
    while place < len(text) or not values:
        try:
            place = len(text) - len(text[place:].lstrip())
            value, place = decoder.raw_decode(text, place)
        except RecursionError:
            raise _NoCallError("expected JSON, found more brackets than can be read") from None
        except ValueError as error:
            raise _NoCallError(f"expected JSON: {error}") from None
        values.append(value)
        rest = text[place:].lstrip()
        if rest and not separator:
            raise _NoCallError(f"expected nothing behind the JSON, found {rest[:40]!r}")
        place = len(text) - len(rest.removeprefix(separator).lstrip())
    return values


def _no_constant(name: str) -> object:
    raise _NoCallError(f"{name} is no JSON")


def _listed(value: object) -> list[object]:
    return cast("list[object]", value) if isinstance(value, list) else [value]


def _types(schema: object) -> list[str]:
    fields = _mapping(schema)
    named = [*_listed(fields["type"])] if "type" in fields else []
    for key in ("anyOf", "oneOf"):
        named += [name for one in _listed(fields.get(key) or []) for name in _types(one)]
    if "enum" in fields and not named:
        named += ["string" for value in _listed(fields["enum"]) if isinstance(value, str)]
    return [str(name) for name in named]


def _mapping(value: object) -> Mapping[str, object]:
    return cast("Mapping[str, object]", value) if isinstance(value, Mapping) else {}
