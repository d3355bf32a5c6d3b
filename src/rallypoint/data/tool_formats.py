r"""Calls of tools in the text of an answer, in the spellings of model families.

Owns: what each family writes. Must not know: tokenizers, what tools do. Nothing here raises: what is not a call is
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
| `gemma`   | Gemma 4                | `<\|tool_call>call:f{a:1,b:<\|"\|>text<\|"\|>}<tool_call\|>`                  |
| `deepseek`| DeepSeek V3, R1        | a line with the name after `<｜tool▁sep｜>`, then JSON in a fence              |
|           | DeepSeek V3.1          | `<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>`               |
| `kimi`    | Kimi K2                | `<\|tool_call_begin\|>functions.f:0<\|tool_call_argument_begin\|>{"a": 1}`     |
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias, cast

from rallypoint.data.files import found
from rallypoint.data.messages import MOST_DEEP, as_list, as_mapping, is_deep

Call: TypeAlias = tuple[str, dict[str, object]]
"""Name of a tool, and its arguments."""
_NO_BLANK = re.compile(r"\S")
_BARE_KEY = re.compile(r"([{,]\s*)([^\s\"\\{}\[\],:]+)\s*:")


@dataclasses.dataclass(slots=True)
class ParsedAnswer:
    """What an answer says."""

    content: str
    """Its text, without the calls that were read."""
    calls: list[Call] = dataclasses.field(default_factory=list[Call])
    malformed: list[str] = dataclasses.field(default_factory=list[str])
    """What is wrong with each call that could not be read."""
    reasoning: str | None = None
    ids: list[str] = dataclasses.field(default_factory=list[str])
    """Ids of the calls that were read, if the format has ids."""

    def take(self, part: ParsedAnswer) -> None:
        """Add what a part of it says."""
        self.content += part.content
        self.calls += part.calls
        self.malformed += part.malformed


Types: TypeAlias = Mapping[tuple[str, str], frozenset[str]]
"""Tool and parameter -> the JSON types that it may have."""
ToolFormat: TypeAlias = Callable[[str, Types], ParsedAnswer]


def format_of(template: str) -> ToolFormat:
    """Return the format in which a model writes calls: its chat template has an example, or renders earlier calls.

    >>> format_of("{{ '[TOOL_CALLS]' }}").__name__, format_of("{{ '<tool_call>' }}").__name__
    ('mistral', 'tagged')
    """
    if "[TOOL_CALLS]" in template:
        return mistral
    if "<|channel|>" in template and "<|start|>" in template:
        return harmony
    marked = {"<|tool_call>": gemma, "<｜tool▁call▁begin｜>": deepseek, "<|tool_call_begin|>": kimi}
    if (found := next((mark for mark in marked if mark in template), None)) is not None:
        return marked[found]
    if "<tool_call>" not in template and re.search(r"""\\?["']parameters\\?["']: """, template):
        return llama
    return tagged


def beginnings(form: ToolFormat, *, has_tools: bool) -> tuple[str, ...]:
    """Return the marks of a format: before the first of them, all of an answer is content."""
    if form is harmony:
        return ("",)  # what comes before a header is not said
    if not has_tools:
        return ()
    marks: dict[ToolFormat, tuple[str, ...]] = {
        llama: ("{", "<|python_tag|>"),
        mistral: ("[TOOL_CALLS]",),
        gemma: ("<|tool_call>",),
        deepseek: ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
        kimi: ("<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
    }
    return marks.get(form, ("<tool_call>",))


def types_of(tools: Sequence[Mapping[str, object]]) -> dict[tuple[str, str], frozenset[str]]:
    """Return the types of all parameters of OpenAI's function schemas.

    >>> types_of([{"function": {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}}}}}])
    {('add', 'a'): frozenset({'integer'})}
    """
    types: dict[tuple[str, str], frozenset[str]] = {}
    for tool in tools:
        function = as_mapping(tool.get("function") or tool)
        for name, schema in as_mapping(as_mapping(function.get("parameters")).get("properties")).items():
            types[str(function.get("name")), name] = frozenset(_types(schema))
    return types


def tagged(text: str, types: Types) -> ParsedAnswer:
    """Read calls in `<tool_call>` tags: JSON, `<function=...>`, or `<arg_key>`.

    >>> tagged('Let me see. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', {})
    ParsedAnswer(content='Let me see. ', calls=[('add', {'a': 1})], malformed=[], reasoning=None, ids=[])
    """
    return _in_blocks(text, "<tool_call>", "</tool_call>", lambda block: _read_block(block, types))


def llama(text: str, _: Types) -> ParsedAnswer:
    """Read an answer that is one or more objects of JSON, after `<|python_tag|>` or not.

    >>> llama('{"name": "add", "parameters": {"a": 1}}', {}).calls
    [('add', {'a': 1})]
    """
    body = text.strip().removeprefix("<|python_tag|>").strip()
    if not body.startswith("{") or '"name"' not in body:
        return ParsedAnswer(text)
    return _read_all(text, lambda: [_as_call(one) for one in _values(body, ";")])


def mistral(text: str, _: Types) -> ParsedAnswer:
    """Read what follows `[TOOL_CALLS]`: a list of JSON, or a name and `[ARGS]` for each call.

    >>> mistral('[TOOL_CALLS]add[CALL_ID]123456789[ARGS]{"a": 1}', {}).calls
    [('add', {'a': 1})]
    """
    content, *parts = text.split("[TOOL_CALLS]")
    said = ParsedAnswer(content)
    for part in parts:
        name, named, arguments = part.partition("[ARGS]")
        if named:
            name = name.partition("[CALL_ID]")[0].strip()
            one = _read_all(f"[TOOL_CALLS]{part}", lambda name=name, given=arguments: [(name, _arguments(given, name))])
        else:
            one = _read_all(f"[TOOL_CALLS]{part}", lambda part=part: [_as_call(each) for each in as_list(_loads(part))])
        said.take(one)
    return said


def harmony(text: str, _: Types) -> ParsedAnswer:
    """Read the messages of an answer: those to functions are calls, those of the channel `analysis` are reasoning.

    >>> harmony('<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant to=functions.add<|channel|>commentary'
    ...         ' <|constrain|>json<|message|>{"a": 1}', {})
    ParsedAnswer(content='', calls=[('add', {'a': 1})], malformed=[], reasoning='Hm.', ids=[])
    """
    said = ParsedAnswer("")
    for part in re.split(r"<\|(?:end|call|return)\|>", text):
        header, begun, body = part.partition("<|message|>")
        channel = re.search(r"<\|channel\|>\s*(\w+)", header)
        recipient = re.search(r"\bto=(?:functions\.)?([^\s<]+)", header)
        if not begun:
            said.content += "" if channel else part.removeprefix("<|start|>assistant")
        elif recipient:
            said.take(_read_all(part, lambda name=recipient[1], body=body: [(name, _arguments(body, name))]))
        elif channel and channel[1] == "analysis":
            said.reasoning = (said.reasoning or "") + body
        else:
            said.content += body
    return said


def gemma(text: str, _: Types) -> ParsedAnswer:
    """Read calls whose arguments are JSON but for keys, which have no quotes, and texts, whose quotes are tokens.

    >>> gemma('<|tool_call>call:add{a:1,to:<|"|>me<|"|>}<tool_call|>', {}).calls
    [('add', {'a': 1, 'to': 'me'})]
    """

    def read(block: str) -> Call:
        if (call := re.fullmatch(r"call:\s*([^\s{]+)\s*(\{.*)", block, re.DOTALL)) is None:
            raise _NoCallError(f"expected call:NAME{{...}}, found {block[:40]!r}")
        parts = call[2].split('<|"|>')
        parts[::2] = [_BARE_KEY.sub(r'\1"\2":', part).replace("None", "null") for part in parts[::2]]
        parts[1::2] = map(json.dumps, parts[1::2])
        return call[1], _arguments("".join(parts), call[1])

    return _in_blocks(text, "<|tool_call>", "<tool_call|>", read)


def deepseek(text: str, _: Types) -> ParsedAnswer:
    """Read calls between marks: a name and JSON, which has a line of its own in a fence in the older form.

    >>> deepseek('<｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>', {}).calls
    [('add', {'a': 1})]
    """

    def read(block: str) -> Call:
        name, is_there, given = block.partition("<｜tool▁sep｜>")
        if not is_there:
            raise _NoCallError(f"expected the name of a tool and <｜tool▁sep｜>, found {block[:40]!r}")
        if (fenced := re.fullmatch(r"\s*(\S+)\s*```(?:json)?(.*?)(?:```\s*)?", given, re.DOTALL)) is not None:
            name, given = fenced.groups()
        return name.strip(), _arguments(given, name.strip())

    text = re.sub("<｜tool▁calls▁(begin|end)｜>", "", text)
    return _in_blocks(text, "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", read)


def kimi(text: str, _: Types) -> ParsedAnswer:
    """Read calls between marks: an id, which has the name and a number, and JSON.

    >>> kimi('<|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>', {})
    ParsedAnswer(content='', calls=[('add', {'a': 1})], malformed=[], reasoning=None, ids=['functions.add:0'])
    """
    ids = list[str]()

    def read(block: str) -> Call:
        key, is_there, given = block.partition("<|tool_call_argument_begin|>")
        named = re.fullmatch(r"(?:functions\.)?(\S+?)(?::\d+)?", key.strip())
        if named is None or not is_there:
            raise _NoCallError(f"expected functions.NAME:0 and <|tool_call_argument_begin|>, found {block[:40]!r}")
        call = named[1], _arguments(given, named[1])
        ids.append(key.strip())
        return call

    text = re.sub(r"<\|tool_calls_section_(begin|end)\|>", "", text)
    said = _in_blocks(text, "<|tool_call_begin|>", "<|tool_call_end|>", read)
    return dataclasses.replace(said, ids=ids)


class _NoCallError(ValueError):
    """A text is not a call; every function that reads one raises it."""


def _read_all(text: str, read: Callable[[], list[Call]]) -> ParsedAnswer:
    """Return the calls of a text, of which all or none are read."""
    try:
        return ParsedAnswer("", read())
    except _NoCallError as error:
        return ParsedAnswer(text, malformed=[str(error)])


def _in_blocks(text: str, opening: str, closing: str, read: Callable[[str], Call]) -> ParsedAnswer:
    """Return the calls between the marks of a text; one that cannot be read does not affect the others."""
    content, *parts = text.split(opening)
    said, rests = ParsedAnswer(""), [content]
    for part in parts:
        block, is_closed, rest = part.partition(closing)
        try:
            said.calls.append(read(block.strip()))
        except _NoCallError as error:
            said.malformed.append(str(error) if is_closed else f"{error}; it has no {closing}")
            rest = opening + part
        rests.append(rest if rest.strip() else "")
    said.content = "".join(rests)
    return said


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
        opened = body.split("<parameter=")[1:]
        pairs = _pairs(opened, ">", "", "</parameter>")
        # The line breaks around a value are of the format.
        pairs = [(key, value.removeprefix("\n").removesuffix("\n")) for key, value in pairs]
    else:
        name = re.split(r"[\s<]", block, maxsplit=1)[0]
        opened = block.split("<arg_key>")[1:]
        pairs = _pairs(opened, "</arg_key>", "<arg_value>", "</arg_value>")
        if not opened and block != name:
            raise _NoCallError(
                f"expected an object in JSON, <function=...> or a name with <arg_key>, found {block[:40]!r}"
            )
    if not name:
        raise _NoCallError("the call has no name")
    if (num := len(opened)) != len(pairs):
        raise _NoCallError(f"the call of {name} has {num} parameters, but {len(pairs)} with a value that is closed")
    return name, _encodable({key.strip(): _typed(value, types.get((name, key.strip()))) for key, value in pairs})


def _pairs(opened: Sequence[str], end: str, opening: str, closing: str) -> list[tuple[str, str]]:
    """Return keys, up to their end, and closed values; an expression would look for an end at every beginning again."""
    pairs: list[tuple[str, str]] = []
    for one in opened:
        key, _, rest = one.partition(end)
        rest = rest.lstrip() if opening else rest
        value, is_closed, _ = rest.removeprefix(opening).partition(closing)
        if key and is_closed and rest.startswith(opening):
            pairs.append((key, value))
    return pairs


def _typed(text: str, types: frozenset[str] | None) -> object:
    """Return a value that is written without quotes, as one of the types that its parameter may have."""
    if types is None or ("string" in types and not (text.strip() == "null" and "null" in types)):
        return text
    try:
        return _loads(text)
    except _NoCallError:  # the call of the tool reports what is expected
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
    if is_deep(arguments):
        raise _NoCallError(f"expected arguments of at most {MOST_DEEP} levels, found more brackets than that")
    try:
        json.dumps(arguments, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise _NoCallError("expected text, found half of a surrogate pair") from None
    return arguments


def _loads(text: str) -> object:
    (value,) = _values(text, "")
    return value


def _values(text: str, separator: str) -> list[object]:
    """Return the JSON values of a text, which are separated by blanks or `separator`."""
    decoder, values = json.JSONDecoder(parse_constant=_no_constant), list[object]()
    place = _behind_blanks(text, 0)
    while place < len(text) or not values:
        try:
            value, place = decoder.raw_decode(text, place)
        except RecursionError:
            raise _NoCallError("expected JSON, found more brackets than can be read") from None
        except ValueError as error:
            raise _NoCallError(f"expected JSON: {error}") from None
        values.append(value)
        place = _behind_blanks(text, place)
        if place < len(text) and not separator:
            raise _NoCallError(f"expected nothing after the JSON, found {text[place : place + 40]!r}")
        if separator and text.startswith(separator, place):
            place = _behind_blanks(text, place + len(separator))
    return values


def _behind_blanks(text: str, place: int) -> int:
    found = _NO_BLANK.search(text, place)
    return len(text) if found is None else found.start()


def _no_constant(name: str) -> object:
    raise _NoCallError(f"{name} is not JSON")


def _types(schema: object) -> list[str]:
    fields = as_mapping(schema)
    named = [*as_list(fields["type"])] if "type" in fields else []
    for key in ("anyOf", "oneOf"):
        named += [name for one in as_list(fields.get(key) or []) for name in _types(one)]
    if "enum" in fields and not named:
        named += ["string" for value in as_list(fields["enum"]) if isinstance(value, str)]
    return [str(name) for name in named]
