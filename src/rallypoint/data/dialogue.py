"""Dialogues: conversations with their tokens, of which the policy has sampled the answers.

Owns: which tokens stand between two answers. Must not know: engines, rows, what calls of tools mean.

Invariant: what was sampled is never encoded again. Rendering a conversation anew would break that: templates drop
reasoning, move tools, and write calls in a spelling of their own. So only what follows on an answer is taken from the
template. It is rendered behind a stand-in answer with a mark:

    <user> 0 <assistant> mark7 <end> <user> and + 1 ? <end> <assistant>
                               ----------------------------------------  follows on any answer

The first token of that ends the turn. It is left out if it was sampled, and is context if the turn was cut.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, cast

from rallypoint.data.chat_text import chat_text, left_out, written
from rallypoint.data.legible import control_tokens
from rallypoint.data.messages import ChatMessage, calls_of, reasoning_in
from rallypoint.data.template import MEND_TEMPLATE, TemplateProbe, special_ids
from rallypoint.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_NEW = "probe8"


@dataclasses.dataclass(frozen=True, slots=True)
class Dialogue:
    """A conversation and its tokens; `continue_with` and `answered` return longer ones.

    >>> from rallypoint.data.tokenizer import make_digits_tokenizer
    >>> tokenizer = make_digits_tokenizer()
    >>> asked = Dialogue.begin(tokenizer, [{"role": "user", "content": "1+1"}], stop_tokens=(0,))
    >>> sampled = tokenizer.encode("2<eos>", add_special_tokens=False)
    >>> again = asked.answered(sampled, {"role": "assistant", "content": "2"}).continue_with(
    ...     [{"role": "user", "content": "2+2"}]
    ... )
    >>> tokenizer.decode(again.tokens).replace(" ", "")
    '<user>1+1<assistant>2<eos><user>2+2<assistant>'
    """

    tokenizer: PreTrainedTokenizerBase
    stop_tokens: tuple[int, ...]
    """Each of them ends an answer."""
    messages: tuple[ChatMessage, ...]
    tokens: tuple[int, ...]
    """Ids of all of it, with the cue for the assistant at the end unless it ends with an answer."""
    tools: tuple[ChatMessage, ...] = ()
    """OpenAI's function schemas, which the template is given."""
    num_old: int = 0
    """Messages that stood there before the newest ones were added."""

    @classmethod
    def begin(
        cls,
        tokenizer: PreTrainedTokenizerBase,
        messages: Sequence[ChatMessage],
        tools: Sequence[ChatMessage] = (),
        *,
        stop_tokens: Sequence[int],
    ) -> Dialogue:
        """Write a conversation in the chat template, with the cue for the assistant.

        Raises:
            ModelError: it does not fit the template, a message is not in what that writes, or has a control token.
        """
        text = chat_text(tokenizer, messages, tools)
        _check_no_control(tokenizer, messages)
        return cls(tokenizer, tuple(stop_tokens), tuple(messages), _encode(tokenizer, text), tuple(tools))

    @property
    def num_calls(self) -> int:
        """Calls of tools in it."""
        return sum(len(calls_of(message)) for message in self.messages)

    def answered(self, response: Sequence[int], message: ChatMessage) -> Dialogue:
        """Add an answer.

        Args:
            response: the ids that were sampled, with the token that ended them, if one did.
            message: what they say, with the role of the assistant.
        """
        return dataclasses.replace(self, messages=(*self.messages, message), tokens=(*self.tokens, *map(int, response)))

    def continue_with(self, messages: Sequence[ChatMessage]) -> Dialogue:
        """Add messages to a dialogue that ends with an answer, and the cue for the next one.

        Raises:
            ModelError: they do not fit the template, or one of them is not in what that writes.
        """
        ids = self._following(messages)
        borders = _Borders.of(self.tokenizer, self.stop_tokens)
        last = self.tokens[-1]
        # Another end than the template's stands in for it; a token that begins the next message is part of that.
        if last == ids[0] or (last in self.stop_tokens and ids[0] in borders.closing):
            ids = ids[1:]
        num_old, tokens = len(self.messages), self.tokens + ids
        return dataclasses.replace(self, messages=(*self.messages, *messages), tokens=tokens, num_old=num_old)

    def stripped_with(self, messages: Sequence[ChatMessage]) -> Dialogue | None:
        """Write a dialogue and more messages anew, if the template leaves out reasoning of earlier answers there.

        What was sampled is then other tokens, of a sequence of its own, in which it is context.

        Returns:
            None: nothing is left out, so that `continue_with` is what the model reads elsewhere, too.

        Raises:
            ModelError: as that of `continue_with`.
        """
        whole = [*self.messages, *messages]
        said = [reasoning for one in whole if (reasoning := reasoning_in(one).strip())]
        given = [{**one, "reasoning_content": reasoning_in(one)} if reasoning_in(one) else one for one in whole]
        if not said:
            return None
        text = written(self.tokenizer, given, self.tools)
        if all(one in text for one in said):
            return None
        _check_no_control(self.tokenizer, messages)
        if (problem := left_out(messages, text)) is not None:
            raise ModelError(f"{problem}; {MEND_TEMPLATE}")
        tokens, num_old = _encode(self.tokenizer, text), len(self.messages)
        return dataclasses.replace(self, messages=tuple(whole), tokens=tokens, num_old=num_old)

    def new_of(self, messages: Sequence[ChatMessage]) -> Sequence[ChatMessage] | None:
        """Return what a whole conversation adds to this one; None if it does not begin with what was said here."""
        num = len(self.messages)
        if len(messages) < num or any(not _is_same(*pair) for pair in zip(self.messages, messages[:num], strict=True)):
            return None
        return messages[num:]

    def _following(self, messages: Sequence[ChatMessage]) -> tuple[int, ...]:
        """Return the tokens that follow on any answer, from that on which ends it."""
        _check_no_control(self.tokenizer, messages)
        borders = _Borders.of(self.tokenizer, self.stop_tokens)
        said = json.dumps([*messages], default=str)
        mark = next(mark for number in itertools.count(7) if (mark := f"mark{number}") not in said)
        refusal = "it leaves out a stand-in answer"
        # The history numbers calls in some templates; another one may refuse what was sampled.
        histories: list[Sequence[ChatMessage]] = [self.messages[:-1], [_message("user", "0")]]
        stand_ins = [*_stand_ins(self.messages[-1], messages, mark)]
        for history, stand_in in itertools.product(histories, stand_ins):
            try:
                text = written(self.tokenizer, [*history, stand_in, *messages], self.tools)
            except ModelError as error:
                refusal = str(error)
                continue
            if mark not in text:
                continue
            behind = mark + text.rpartition(mark)[2]
            if (problem := left_out(messages, behind)) is not None:
                raise ModelError(f"{problem}; {MEND_TEMPLATE}")
            ids = _encode(self.tokenizer, behind)
            end = next((place for place, token in enumerate(ids) if token in borders.ends), None)
            if end is not None:
                return ids[end:]
            refusal = "it ends no answer with a special token"
        raise ModelError(f"the chat template cannot continue behind an answer: {refusal}; {MEND_TEMPLATE}")


@dataclasses.dataclass(frozen=True, slots=True)
class _Borders:
    """The tokens with which a template ends messages."""

    ends: frozenset[int]
    """Ids that end an answer."""
    closing: frozenset[int]
    """Those that end messages, and do not begin others, as `<|user|>` of GLM does."""

    @staticmethod
    @functools.lru_cache(maxsize=16)
    def of(tokenizer: PreTrainedTokenizerBase, stop_tokens: tuple[int, ...]) -> _Borders:
        """Look at what the tokenizer's template, which stays as it is, writes between two messages."""
        special, stops = special_ids(tokenizer), frozenset(stop_tokens)
        closing, own = {TemplateProbe.of(tokenizer).end} - {None}, list[int]()
        try:
            text = written(tokenizer, [_message("user", "0"), _message("assistant", "mark7"), _message("user", _NEW)])
        except ModelError:
            text = ""
        before, _, behind = text.rpartition("mark7")[2].partition(_NEW)
        between = [token for token in _encode(tokenizer, before) if token in special]
        if not stops.intersection(between):  # such as <|end|> of gpt-oss, which ends sampling with <|return|>
            own = between[:1]
        closing.update(token for token in _encode(tokenizer, behind) if token in special)
        return _Borders(stops.union(own), frozenset(cast("set[int]", closing)))


def _stand_ins(answer: ChatMessage, messages: Sequence[ChatMessage], mark: str) -> Iterator[ChatMessage]:
    """Yield answers with a mark at the end that templates may take in place of one, the likeliest first.

    Some take only an answer that calls the tools whose results follow, some only a single call, or no content.
    """
    calls = calls_of(answer)
    results = [message for message in messages if message.get("role") == "tool"]
    if calls:
        yield from _calling([(call.name, call.id) for call in calls], mark)
    yield _message("assistant", mark)
    if results and not calls:
        yield from _calling([(one.get("name") or "tool", one.get("tool_call_id")) for one in results], mark)


def _calling(called: Sequence[tuple[object, object]], mark: str) -> Iterator[ChatMessage]:
    for number, content in itertools.product(dict.fromkeys((len(called), 1)), ("", None)):
        calls: list[object] = []
        for place, (name, key) in enumerate(called[:number], start=1):
            function = {"name": name, "arguments": {"mark": mark} if place == number else {}}
            calls.append({"id": key or f"call{place:05}", "type": "function", "function": function})
        yield {"role": "assistant", "content": content, "tool_calls": calls}


def _message(role: str, content: str) -> ChatMessage:
    return {"role": role, "content": content}


def _check_no_control(tokenizer: PreTrainedTokenizerBase, messages: Sequence[ChatMessage]) -> None:
    """Refuse messages that would write the end of a message, or another one, such as what a tool has read somewhere."""
    control = control_tokens(tokenizer)
    for index, one in enumerate(messages):
        said = str(one.get("content") or "")
        # What the policy says is its own, and is encoded only where somebody goes back in the conversation.
        if one["role"] != "assistant" and control is not None and (found := control.search(said)):
            raise ModelError(
                f"the text of message {index} ({one['role']}) has {found.group()!r}, which is a control token of the "
                "tokenizer: it would end the message or begin another one; take it out, or write it in another way"
            )


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[int, ...]:
    return tuple(cast("list[int]", tokenizer.encode(text, add_special_tokens=False)))


def _is_same(one: ChatMessage, other: ChatMessage) -> bool:
    """Whether two messages say the same, however their calls are spelled."""
    return one == other or _essence(one) == _essence(other)


def _essence(message: ChatMessage) -> tuple[object, ...]:
    calls = [(call.name, call.arguments) for call in calls_of(message)]
    return message.get("role"), message.get("content") or "", message.get("tool_call_id"), calls
