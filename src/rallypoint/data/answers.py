"""What a sampled answer says, as a message: its reasoning, its text, and its calls of tools.

Owns: which part of the tokens is which. Must not know: engines, what calls of tools do.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rallypoint.data.template import TemplateProbe, special_ids
from rallypoint.data.tool_formats import ParsedAnswer, beginnings, format_of, harmony, types_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_REASONING = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|channel>thought", "<channel|>"),
)
"""Tags around reasoning."""


def read_answer(
    tokenizer: PreTrainedTokenizerBase,
    response: Sequence[int],
    *,
    stop_tokens: Sequence[int],
    tools: Sequence[Mapping[str, object]] = (),
    num_calls: int = 0,
) -> dict[str, object]:
    """Return a sampled answer as a message.

    Args:
        tokenizer: the model's, with its chat template, which says how the model writes calls.
        response: the ids that were sampled, with the token that ended them, if one did.
        stop_tokens: ids that end an answer.
        tools: function schemas that the model was given; without any nothing is a call.
        num_calls: calls of the conversation so far, by which those of the answer are numbered.

    Returns:
        `role` and `content`, `reasoning` and `tool_calls` if it has some, and `malformed`: what is wrong with each call
        that could not be read, whose text stays in the content.
    """
    form = _Form.of(tokenizer)
    ids = list(response[:-1] if response and response[-1] in stop_tokens else response)
    said = form.read(str(tokenizer.decode(ids, skip_special_tokens=False)), tools)
    message: dict[str, object] = {"role": "assistant", "content": form.without_special(said.content)}
    if said.reasoning is not None:
        message["reasoning"] = form.without_special(said.reasoning)
    if said.calls:
        numbers = range(num_calls + 1, num_calls + 1 + len(said.calls))
        ids = said.ids or [f"call{number:05}" for number in numbers]  # some templates want nine letters and digits
        message["tool_calls"] = [
            {
                "id": key,
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)},
            }
            for key, (name, arguments) in zip(ids, said.calls, strict=True)
        ]
    if said.malformed:
        message["malformed"] = said.malformed
    return message


class AnswerReader:
    """Reads an answer while it comes: its content as far as that is certain, and the whole message in the end.

    Reasoning is known when it is over, and calls of tools at the end, with all that comes after the first of them.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        stop_tokens: Sequence[int],
        tools: Sequence[Mapping[str, object]] = (),
        num_calls: int = 0,
    ) -> None:
        """Begin without tokens; the arguments are those of `read_answer`."""
        self._form = _Form.of(tokenizer)
        self._read = functools.partial(
            read_answer, tokenizer, stop_tokens=stop_tokens, tools=tools, num_calls=num_calls
        )
        self._beginnings = self._form.beginnings(has_tools=bool(tools))
        self._until = re.compile("|".join(map(re.escape, self._beginnings)) if self._beginnings else "(?!)")
        self.decode = lambda tokens: str(tokenizer.decode(list(tokens), skip_special_tokens=False))
        """Returns the text of tokens as `push` takes it."""
        self.reasoning: str | None = None
        """Reasoning that is over."""
        self._shown = ""
        self._waiting, self._has_begun, self._is_over = "", False, False

    def push(self, text: str) -> str:
        """Return the content that is certain with more of the answer's text, special tokens and all."""
        if self._is_over:
            return ""
        self._waiting += text
        if not self._has_begun:
            reasoning, content = self._form.split(self._waiting)
            if not content.strip() or (reasoning is None and self._form.may_be_reasoning(self._waiting)):
                return ""
            self._has_begun, self._waiting = True, content
            self.reasoning = None if reasoning is None else self._form.without_special(reasoning)
        if (found := self._until.search(self._waiting)) is not None:
            self._is_over, end = True, len(self._waiting[: found.start()].rstrip()) and found.start()
        else:
            end = len(self._waiting) - _num_begun(self._waiting, self._beginnings)
        certain, self._waiting = self._form.without_special(self._waiting[:end]), self._waiting[end:]
        self._shown += certain
        return certain

    def finish(self, response: Sequence[int]) -> tuple[dict[str, object], str]:
        """Return the message of the whole answer, and the rest of its content."""
        message = self._read(response)
        content = str(message["content"])
        return message, content[len(self._shown) :] if content.startswith(self._shown) else ""


def _num_begun(text: str, beginnings: Sequence[str]) -> int:
    """Return how many of the last characters of a text may be the first ones of some strings.

    >>> _num_begun("a <tool", ["<tool_call>", "<t"])
    5
    """
    longest = max(map(len, beginnings), default=1) - 1
    lengths = range(min(longest, len(text)), 0, -1)
    return next((n for n in lengths if any(one.startswith(text[-n:]) for one in beginnings)), 0)


class _Form:
    """How answers of a model are to be read."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        names = [str(tokenizer.convert_ids_to_tokens(token)) for token in special_ids(tokenizer)]
        longest_first = sorted(filter(None, names), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._opened = TemplateProbe.of(tokenizer).opened
        templates = tokenizer.chat_template
        self._format = format_of(templates if isinstance(templates, str) else json.dumps(templates))

    @staticmethod
    @functools.lru_cache(maxsize=16)
    def of(tokenizer: PreTrainedTokenizerBase) -> _Form:
        """Return that of a tokenizer, whose template stays as it is."""
        return _Form(tokenizer)

    def without_special(self, text: str) -> str:
        """Return a text without special tokens."""
        return self._special.sub("", text)

    def read(self, text: str, tools: Sequence[Mapping[str, object]]) -> ParsedAnswer:
        """Return what a text says."""
        if self._format is harmony:  # it has reasoning of its own
            return harmony(text, types_of(tools))
        reasoning, content = self.split(text)
        said = self._format(content, types_of(tools)) if tools else ParsedAnswer(content)
        said.reasoning = reasoning
        return said

    def beginnings(self, *, has_tools: bool) -> tuple[str, ...]:
        """Return the texts from which on an answer may be something else than content."""
        return beginnings(self._format, has_tools=has_tools)

    def may_be_reasoning(self, text: str) -> bool:
        """Whether an answer whose text begins so may begin with reasoning."""
        return self._format is not harmony and any(opening.startswith(text.lstrip()) for opening, _ in _REASONING)

    def split(self, text: str) -> tuple[str | None, str]:
        """Return the reasoning of an answer, or None, and the rest; what was cut within its reasoning has no more."""
        for opening, closing in () if self._format is harmony else _REASONING:  # which has channels
            begun = text.lstrip()
            if self._opened == opening or begun.startswith(opening):
                reasoning, _, content = begun.removeprefix(opening).partition(closing)
                return reasoning.strip("\n"), content.lstrip("\n")
        return None, text
