"""Dialogues: conversations with their tokens, of which the policy has sampled the answers.

Owns: which tokens stand between two answers. Must not know: engines, rows, what calls of tools mean.

Invariant: what was sampled is never encoded again. Rendering a conversation anew would break that: templates drop
reasoning, move tools, and write calls in a spelling of their own. So only what follows on an answer is taken from the
template. It is rendered after a stand-in answer with a mark:

    <user> 0 <assistant> mark7 <end> <user> and + 1 ? <end> <assistant>
                               ----------------------------------------  follows on any answer

The first token of that ends the turn. It is left out if it was sampled, and is context if the turn was cut. Where
it does not depend on what was said before, the template is given a short history, so that a turn costs the same
whether it is the second or the sixtieth; and a longer dialogue keeps what is new in it, and the one that it continues.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, cast

from rallypoint.data.chat_text import chat_text, left_out, written
from rallypoint.data.legible import control_tokens
from rallypoint.data.messages import ChatMessage, calls_of, reasoning_in, whole_text
from rallypoint.data.template import MEND_TEMPLATE, TemplateProbe, special_ids
from rallypoint.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_NEW = "probe8"
_LOOK: tuple[ChatMessage, ...] = (
    {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}},
)
_SWITCH = re.compile(r"(?<!<)/(no_?)?think", re.IGNORECASE)
"""What a template looks for in messages, however old, to know whether the next answer is to have reasoning."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
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
    own_messages: tuple[ChatMessage, ...]
    """Those after the dialogue that it continues."""
    own_tokens: tuple[int, ...]
    """Ids of these, with the cue for the assistant at the end unless they end with an answer."""
    tools: tuple[ChatMessage, ...] = ()
    """OpenAI's function schemas, which the template is given."""
    num_old: int = 0
    """Messages that stood there before the newest ones were added."""
    parent: Dialogue | None = None
    """The dialogue that it continues."""
    num_before: int = 0
    """Messages of that."""
    num_calls_before: int = 0
    """Calls of tools in it."""

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
        _check_texts(tokenizer, messages, tools)
        return cls(tokenizer, tuple(stop_tokens), tuple(messages), _encode(tokenizer, text), tuple(tools))

    @property
    def messages(self) -> tuple[ChatMessage, ...]:
        """All of them."""
        return tuple(message for one in self._chain() for message in one.own_messages)

    @property
    def tokens(self) -> tuple[int, ...]:
        """Ids of all of it."""
        return tuple(itertools.chain.from_iterable(one.own_tokens for one in self._chain()))

    @property
    def num_messages(self) -> int:
        """How many there are."""
        return self.num_before + len(self.own_messages)

    @property
    def num_calls(self) -> int:
        """Calls of tools in it."""
        return self.num_calls_before + sum(len(calls_of(message)) for message in self.own_messages)

    def _chain(self) -> list[Dialogue]:
        """Return it after all those that it continues."""
        chain, one = list[Dialogue](), self
        while one is not None:
            chain.append(one)
            one = one.parent
        return chain[::-1]

    def _continued(self, messages: Sequence[ChatMessage], tokens: Sequence[int], num_old: int) -> Dialogue:
        return dataclasses.replace(
            self,
            own_messages=tuple(messages),
            own_tokens=tuple(tokens),
            num_old=num_old,
            parent=self,
            num_before=self.num_messages,
            num_calls_before=self.num_calls,
        )

    def answered(self, response: Sequence[int], message: ChatMessage) -> Dialogue:
        """Add an answer.

        Args:
            response: the ids that were sampled, with the token that ended them, if one did.
            message: what they say, with the role of the assistant.
        """
        return self._continued([message], [*map(int, response)], self.num_old)

    def continue_with(self, messages: Sequence[ChatMessage]) -> Dialogue:
        """Add messages to a dialogue that ends with an answer, and the cue for the next one.

        Raises:
            ModelError: they do not fit the template, or one of them is not in what that writes.
        """
        ids = self._following(messages)
        borders = _Borders.of(self.tokenizer, self.stop_tokens)
        last = next(one.own_tokens[-1] for one in reversed(self._chain()) if one.own_tokens)
        # Another end than the template's stands in for it; a token that begins the next message is part of that.
        if last == ids[0] or (last in self.stop_tokens and ids[0] in borders.closing):
            ids = ids[1:]
        return self._continued(messages, ids, self.num_messages)

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
        _check_texts(self.tokenizer, messages)
        if (problem := left_out(messages, text)) is not None:
            raise ModelError(f"{problem}; {MEND_TEMPLATE}")
        tokens, stops = _encode(self.tokenizer, text), self.stop_tokens
        return Dialogue(self.tokenizer, stops, tuple(whole), tokens, self.tools, num_old=self.num_messages)

    def new_of(self, messages: Sequence[ChatMessage]) -> Sequence[ChatMessage] | None:
        """Return what a whole conversation adds to this one; None if it does not begin with what was said here."""
        num = self.num_messages
        if len(messages) < num or any(not _is_same(*pair) for pair in zip(self.messages, messages[:num], strict=True)):
            return None
        return messages[num:]

    def _following(self, messages: Sequence[ChatMessage]) -> tuple[int, ...]:
        """Return the tokens that follow on any answer, from that on which ends it."""
        _check_texts(self.tokenizer, messages)
        borders = _Borders.of(self.tokenizer, self.stop_tokens)
        said = json.dumps([*messages], default=str)
        mark = next(mark for number in itertools.count(7) if (mark := f"mark{number}") not in said)
        refusal = "it leaves out a stand-in answer"
        stand_ins = [*_stand_ins(self.own_messages[-1], messages, mark)]
        for history, stand_in in itertools.product(self._histories(messages, borders), stand_ins):
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
        raise ModelError(f"the chat template cannot continue after an answer: {refusal}; {MEND_TEMPLATE}")

    def _histories(self, messages: Sequence[ChatMessage], borders: _Borders) -> Iterator[Sequence[ChatMessage]]:
        """Yield what may stand before a stand-in answer, the likeliest first."""
        short = [_message("user", "0")]
        if all(message.get("role") in borders.local for message in messages):
            first = self._chain()[0].own_messages[:1]
            yield [*(one for one in first if one.get("role") in ("system", "developer")), *short]
        yield self.messages[:-1]  # it numbers calls in some templates
        yield short  # what was sampled may be refused


@dataclasses.dataclass(frozen=True, slots=True)
class _Borders:
    """The tokens with which a template ends messages."""

    ends: frozenset[int]
    """Ids that end an answer."""
    closing: frozenset[int]
    """Those that end messages, and do not begin others, as `<|user|>` of GLM does."""
    local: frozenset[str] = frozenset()
    """Roles of messages after an answer for which the template writes the same whatever was said before."""

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
        return _Borders(stops.union(own), frozenset(cast("set[int]", closing)), _local_roles(tokenizer))


def _local_roles(tokenizer: PreTrainedTokenizerBase) -> frozenset[str]:
    """Return the roles of `_Borders.local`: what follows on a stand-in answer is compared after several histories."""
    if _SWITCH.search(str(tokenizer.chat_template)):
        return frozenset()
    user, answer = _message("user", "0"), _message("assistant", "1")
    call, marked = ({**next(_calling([("look", "call00001")], mark))} for mark in ("2", "mark7"))
    result: ChatMessage = {"role": "tool", "tool_call_id": "call00001", "name": "look", "content": "3"}
    histories = [[user], [user, answer, user], [user, call, result, answer, user], [user, call, result] * 2]
    local = set[str]()
    for stand_in, new in ((_message("assistant", "mark7"), user), (marked, result)):
        tails = [_tail(tokenizer, [*history, stand_in, new]) for history in histories]
        if None not in tails[:2] and len({*tails} - {None}) == 1:  # it may have no place for calls
            local.add(str(new["role"]))
    return frozenset(local)


def _tail(tokenizer: PreTrainedTokenizerBase, messages: Sequence[ChatMessage]) -> str | None:
    """Return what follows on the mark; None if the template does not take the messages, or leaves it out."""
    try:
        _, is_there, tail = written(tokenizer, messages, _LOOK).rpartition("mark7")
    except ModelError:
        return None
    return tail if is_there else None


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


def _check_texts(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[ChatMessage], tools: Sequence[ChatMessage] = ()
) -> None:
    """Refuse texts that no tokenizer takes, and such as would write the end of a message, or another one."""
    control = control_tokens(tokenizer)
    texts = [(f"the schema of tool {index}", json.dumps(one, ensure_ascii=False)) for index, one in enumerate(tools)]
    for index, one in enumerate(messages):
        # What the policy says is its own, and is encoded only where somebody goes back in the conversation.
        said = (whole_text(one), one.get("name"), one.get("tool_call_id"))
        texts.append((f"the text of message {index} ({one['role']})", "\n".join(map(str, filter(None, said)))))
    for where, text in texts:
        if control is not None and not where.endswith("(assistant)") and (found := control.search(text)):
            raise ModelError(
                f"{where} has {found.group()!r}, which is a control token of the tokenizer: it would end the message "
                "or begin another one; take it out, or write it in another way"
            )
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ModelError(f"{where} has half of a surrogate pair, which is not text; take it out") from None


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[int, ...]:
    return tuple(cast("list[int]", tokenizer.encode(text, add_special_tokens=False)))


def _is_same(one: ChatMessage, other: ChatMessage) -> bool:
    """Whether two messages say the same, however their calls are spelled."""
    return one == other or _essence(one) == _essence(other)


def _essence(message: ChatMessage) -> tuple[object, ...]:
    calls = [(call.name, call.arguments) for call in calls_of(message)]
    content = str(message.get("content") or "")
    # Some frameworks strip answers; what was sampled stays as it is, whatever they send back.
    said = content.strip() if message.get("role") == "assistant" else content
    return message.get("role"), said, message.get("tool_call_id"), calls
