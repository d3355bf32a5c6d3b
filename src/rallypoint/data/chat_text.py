"""Text of conversations in a chat template: their messages, calls and tools, none of which may be lost; their turns.

Owns: in which ways calls are given to a template, whether what it writes is whole, and where a turn of the assistant
begins and ends in it. Must not know: data sets, tokens.

    <user> 2 + 2 = ? <assistant> <call> add ... <end> <tool> 4 <end> <assistant> It is 4. <end>
                                 --------------------                            --------------

A turn begins after the cue that the template puts there when an answer is asked for, and ends before the next one
begins; a template with `{% generation %}` says itself which parts are the assistant's.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, cast

from rallypoint.data.conversations import Conversation, TrainedTurns
from rallypoint.data.messages import ChatMessage, calls_of, with_arguments
from rallypoint.data.template import MEND_TEMPLATE, check_arguments, template_errors
from rallypoint.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MARK_THEM = "mark the assistant's turns in the template with {% generation %} and {% endgeneration %}"
_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""What a template says that its author has marked the assistant's turns with."""
_CLOSING = re.compile(r"</\w+>")
_WORD = re.compile(r"\w+", re.ASCII)


def chat_texts(
    tokenizer: PreTrainedTokenizerBase,
    conversations: Sequence[tuple[Sequence[ChatMessage], Sequence[ChatMessage]]],
) -> list[str | ModelError]:
    """Return what `chat_text` does for each of some conversations and their tools, or its error.

    Those without tools and calls are written in one call.
    """
    plain = [said for said, tools in conversations if not tools and not any(map(calls_of, said))]
    found: list[str | ModelError] = []
    try:
        given = [[dict(message) for message in said] for said in plain]
        written = tokenizer.apply_chat_template(given, add_generation_prompt=True, tokenize=False) if given else []  # pyright: ignore[reportArgumentType]
        texts = iter(cast("list[str]", written))
    except template_errors():
        texts, plain = iter(()), []  # the others are written in the same way, so that one that does not fit stands out
    beside = {id(said) for said in plain}
    for said, tools in conversations:
        try:
            if id(said) in beside:
                text = next(texts)
                _check_whole(said, tools, text)
            else:
                text = chat_text(tokenizer, said, tools)
            found.append(text)
        except ModelError as error:
            found.append(error)
    return found


def chat_text(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[ChatMessage],
    tools: Sequence[ChatMessage] = (),
    arguments: Mapping[str, object] | None = None,
) -> str:
    """Return messages in the chat template, with the cue for the assistant.

    Args:
        tokenizer: has the template.
        messages: all of the conversation.
        tools: OpenAI's function schemas.
        arguments: of the template, by name.

    Raises:
        ModelError: they do not fit it, a message is not in what it writes, or it reads no such argument.
    """
    if arguments:
        check_arguments(tokenizer, arguments, "chat_template_kwargs", "the chat template")
    text = written(tokenizer, messages, tools, arguments)
    _check_whole(messages, tools, text)
    return text


def written(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[ChatMessage],
    tools: Sequence[ChatMessage] = (),
    arguments: Mapping[str, object] | None = None,
) -> str:
    """Return the same, whatever the template leaves out.

    Raises:
        ModelError: they do not fit the template.
    """
    text, refusal = None, None
    for given in spelled(messages):
        try:
            found = render(tokenizer, given, tools, cue=True, arguments=arguments)
        except template_errors() as error:
            refusal = refusal or error
            continue
        if lost_call(given, tools, found) is None:
            return found
        text = found if text is None else text
    if text is None:
        raise ModelError(f"the messages do not fit the model's chat template: {refusal}")
    return text


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[ChatMessage],
    tools: Sequence[ChatMessage],
    *,
    cue: bool,
    arguments: Mapping[str, object] | None = None,
) -> str:
    """Return what the template writes; it may raise one of `template_errors`."""
    given = [dict(message) for message in messages]
    schemas = [dict(tool) for tool in tools] or None
    return cast(
        "str",
        tokenizer.apply_chat_template(
            given,  # pyright: ignore[reportArgumentType]
            tools=schemas,  # pyright: ignore[reportArgumentType]
            add_generation_prompt=cue,
            tokenize=False,
            **(arguments or {}),  # pyright: ignore[reportArgumentType]
        ),
    )


def spelled(messages: Sequence[ChatMessage]) -> Iterator[list[dict[str, object]]]:
    """Yield messages in the ways in which templates take calls, the likeliest first.

    Arguments are an object, or its JSON; ids are as they are, or of nine letters and digits as Mistral has them, or a
    name and a number as Kimi K2.
    """
    if not any(map(calls_of, messages)):
        yield [dict(message) for message in messages]
        return
    for id_of, as_text in itertools.product((None, _nine_letters, _name_and_number), (False, True)):
        given = messages if id_of is None else _with_ids(messages, id_of)
        # Text that is null would be left out of the message.
        yield [{**with_arguments(one, as_text=as_text), "content": one.get("content") or ""} for one in given]


def _nine_letters(number: int, _: object) -> str:
    return f"call{number + 1:05}"


def _name_and_number(number: int, name: object) -> str:
    return f"functions.{name}:{number}"


def _with_ids(messages: Sequence[ChatMessage], id_of: Callable[[int, object], str]) -> Iterator[ChatMessage]:
    """Yield messages with other ids of their calls, which results have, too; results without one answer in turn."""
    ids, count = dict[object, str](), 0
    for message in messages:
        new: dict[str, object] = {}
        calls = [dict(cast("ChatMessage", call)) for call in cast("Sequence[object]", message.get("tool_calls") or ())]
        if calls:
            names = [call.name for call in calls_of(message)]
            given = [id_of(number, name) for number, name in enumerate(names, start=count)]
            ids = {call.get("id") or place: key for place, (call, key) in enumerate(zip(calls, given, strict=True))}
            new["tool_calls"] = [call | {"id": key} for call, key in zip(calls, given, strict=True)]
            count += len(calls)
        elif message.get("role") == "tool" and ids:
            key = message.get("tool_call_id")
            new["tool_call_id"] = ids.pop(key if key in ids else next(iter(ids)))
        yield {**message, **new}


def _check_whole(messages: Sequence[ChatMessage], tools: Sequence[ChatMessage], text: str) -> None:
    problem = left_out(messages, text) or lost_call(messages, tools, text)
    if problem is not None:
        raise ModelError(f"{problem}; {MEND_TEMPLATE}")


def lost_call(messages: Sequence[ChatMessage], tools: Sequence[ChatMessage], text: str) -> str | None:
    """Return which call, or which tool, a text in the chat template does not have, in words; None if there is none.

    >>> call = {"function": {"name": "add", "arguments": '{"to": "Ann"}'}}
    >>> lost_call([{"role": "assistant", "tool_calls": [call, call]}], [], '<call>add(to="Ann")</call>')
    "the chat template leaves out the call of 'add' in message 0"
    """
    counts = Counter[str]()
    for index, message in enumerate(messages):
        for call in calls_of(message):
            counts[name := str(call.name)] += 1
            if text.count(name) < counts[name] or not all(word in text for word in _words(call.arguments)):
                return f"the chat template leaves out the call of {name!r} in message {index}"
    names = (str(cast("ChatMessage", tool.get("function") or tool).get("name")) for tool in tools)
    untold = next((name for name in names if text.count(name) <= counts[name]), None)
    return None if untold is None else f"the chat template does not tell the model of the tool {untold!r}"


def _words(value: object) -> Iterator[str]:
    """Yield the longest word of each text in the arguments of a call, which every spelling has."""
    if isinstance(value, str) and (words := _WORD.findall(value)):
        yield max(words, key=len)
    inner = cast("Mapping[str, object]", value).values() if isinstance(value, Mapping) else value
    if isinstance(value, Mapping | list):
        for one in cast("Iterable[object]", inner):
            yield from _words(one)


def _in_json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def left_out(conversation: Sequence[ChatMessage], text: str) -> str | None:
    """Return what a text in the chat template has lost of its messages, in words; None if nothing.

    Blanks do not count, nor does what precedes the last word of an answer: many templates leave out its reasoning. What
    a tool says may be written in JSON.

    >>> left_out([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2"}], "<user>2 +  2")
    "the chat template leaves out the text of message 0 (system), 'Be brief.'"
    """
    dense = ""
    for index, message in enumerate(conversation):
        said = str(message.get("content") or "").strip()
        if message["role"] == "assistant":
            said = "".join(_CLOSING.split(said)[-1].split()[-1:])
        if said in text or _in_json(said) in text:
            continue
        dense = dense or "".join(text.split())
        if "".join(said.split()) not in dense:
            shown = said if len(said) <= 40 else f"{said[:40]}..."
            return f"the chat template leaves out the text of message {index} ({message['role']}), {shown!r}"
    return None


class TurnFinder:
    """Writes conversations in a tokenizer's chat template, and finds the turns of the assistant in them."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Look whether the template marks them."""
        self._tokenizer = tokenizer
        self.is_marked = bool(_MARKED.search(str(tokenizer.chat_template)))

    def turns(self, row: Conversation) -> TrainedTurns:
        """Write a conversation.

        Raises:
            ValueError: a message, a call or a tool is not in the text, there is nothing before a turn, or the template
                writes it in another way when an answer is asked for.
        """
        refusal: Exception | None = None
        for messages in spelled([message.fields for message in row.messages]):
            try:
                return self._marked(row, messages) if self.is_marked else self._between_cues(row, messages)
            except template_errors() as error:
                # What is wrong with the text says more than that a way to give calls is not the template's.
                is_of_text = isinstance(error, ValueError) and not isinstance(refusal, ValueError)
                refusal = error if refusal is None or is_of_text else refusal
        assert refusal is not None, "there is one spelling at least"
        raise refusal

    def alone(self, turns: TrainedTurns, index: int) -> str:
        """Return what the template writes for one turn of the assistant, without what follows."""
        messages = turns.messages
        if self.is_marked:
            text, marked = self._render_marked(turns.row, messages[: index + 1])
            return text[marked[-1][0] :] if marked else text
        begin = len(self._text(turns.row, messages[:index], cue=True))
        return self._text(turns.row, messages[: index + 1], cue=False)[begin:]

    def _marked(self, row: Conversation, messages: Sequence[ChatMessage]) -> TrainedTurns:
        begin = len(self._text(row, messages[: row.first_trained], cue=True)) if row.first_trained else 0
        text, marked = self._render_marked(row, messages)
        _check_row(row, messages, text)
        spans = tuple(span for span in marked if span[0] >= begin)
        return TrainedTurns(row, messages, text, spans, self._cues(row, messages, text))

    def _between_cues(self, row: Conversation, messages: Sequence[ChatMessage]) -> TrainedTurns:
        text, starts = self._text(row, messages, cue=False), list[int]()
        _check_row(row, messages, text)
        for index, message in enumerate(row.messages):
            if message.role != "assistant" or index < row.first_trained:
                continue
            if index == 0:
                raise ValueError(
                    "it begins with the assistant, and a template writes the cue of a turn after another one; put a "
                    f"turn of the user or the system before it, or {_MARK_THEM}"
                )
            before = self._text(row, messages[:index], cue=True)
            if not text.startswith(before):
                raise ValueError(
                    f"what is before message {index} is written differently when an answer is asked for, so the "
                    f"beginning of the turn cannot be found; {_MARK_THEM}"
                )
            starts.append(len(before))
        return TrainedTurns(
            row, messages, text, tuple(zip(starts, [*starts[1:], len(text)], strict=True)), tuple(starts)
        )

    def _cues(self, row: Conversation, messages: Sequence[ChatMessage], text: str) -> tuple[int, ...]:
        """Return where the cues end of the turns that a marked template writes; -1 for one that is not in the text."""
        cues = list[int]()
        for index in range(max(1, row.first_trained), len(messages)):
            if messages[index]["role"] != "assistant":
                continue
            try:
                before = self._text(row, messages[:index], cue=True)
            except template_errors():  # so that no model can be asked here
                continue
            cues.append(len(before) if text.startswith(before) else -1)
        return tuple(cues)

    def _text(self, row: Conversation, messages: Sequence[ChatMessage], *, cue: bool) -> str:
        return render(self._tokenizer, messages, row.tools, cue=cue)

    def _render_marked(self, row: Conversation, messages: Sequence[ChatMessage]) -> tuple[str, list[tuple[int, int]]]:
        """Return the text, and where the template says that the assistant speaks."""
        from transformers.utils import chat_template_utils

        render_template = cast(
            "Callable[..., tuple[list[str], list[list[tuple[int, int]]]]]", chat_template_utils.render_jinja_template
        )
        texts, marked = render_template(
            conversations=[[dict(message) for message in messages]],
            tools=[dict(tool) for tool in row.tools] or None,
            chat_template=self._tokenizer.get_chat_template(),
            return_assistant_tokens_mask=True,
            **self._tokenizer.special_tokens_map,
        )
        return texts[0], marked[0]


def _check_row(row: Conversation, messages: Sequence[ChatMessage], text: str) -> None:
    # What an answer loses is counted; see `num_shortened`.
    others = [one if one["role"] != "assistant" else {**one, "content": ""} for one in messages]
    problem = left_out(others, text) or lost_call(messages, row.tools, text)
    if problem is not None:
        raise ValueError(f"{problem}; {MEND_TEMPLATE}")
