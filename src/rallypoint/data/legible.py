"""Whether tokens represent a text: no unknown token, no lost character, no control token written in the text.

Owns: what a tokenizer makes of the text of messages. Must not know: data sets.

A control token marks the end of a message or its role: every special token (`<eos>`, `<|im_end|>`), and those that the
chat template puts around a message, special or not (`<user>`). Other added tokens, such as `<think>`, are ordinary
words.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import unicodedata
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, cast

from rallypoint.data.chat_text import written
from rallypoint.data.messages import ChatMessage, schemas_text, whole_text
from rallypoint.data.template import template_errors

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MOST_SHOWN = 5
_PROBE = "0"


@dataclasses.dataclass(frozen=True, slots=True)
class Legibility:
    """What a tokenizer cannot represent, and the check of a prompt for it."""

    tokenizer: PreTrainedTokenizerBase
    control: re.Pattern[str] | None
    """Finds a control token in text; None if the tokenizer has none."""
    unknown: dict[int, str]
    """Id -> name of the token that stands for everything unknown."""
    lost: frozenset[str]
    """Visible characters, among those of the texts, that make no token by themselves."""
    known: frozenset[str]
    """Characters of the texts."""

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, texts: Iterable[str]) -> Legibility:
        """Examine a tokenizer for all texts that it will encode."""
        unknown = _unknown_tokens(tokenizer)
        control = _finding(_control_tokens(tokenizer) | set(unknown.values()))
        known = frozenset[str]().union(*texts)
        return cls(tokenizer, control, unknown, _lost_characters(tokenizer, known), known)

    def with_texts(self, texts: Iterable[str]) -> Legibility:
        """Return the same for more texts: only new characters are looked at, and not the whole vocabulary again."""
        new = frozenset[str]().union(*texts) - self.known
        if not new:
            return self
        return dataclasses.replace(self, lost=self.lost | _lost_characters(self.tokenizer, new), known=self.known | new)

    def problem(
        self,
        conversation: Sequence[ChatMessage],
        ids: Sequence[int],
        tools: Sequence[ChatMessage] = (),
        *,
        in_words: bool = True,
    ) -> str | None:
        """Return what the token ids of a conversation in the chat template do not represent; None if nothing.

        Args:
            conversation: messages.
            ids: of its tokens.
            tools: function schemas that it begins with.
            in_words: whether the text of the problem is needed; False is faster.
        """
        texts = [*map(whole_text, conversation), schemas_text(tools)]
        return self._written_control_token(texts) or self._illegible(conversation, ids, tools, texts, in_words)

    def _written_control_token(self, texts: Sequence[str]) -> str | None:
        for index, text in enumerate(texts):
            if self.control is not None and (match := self.control.search(text)):
                where = "the text of the tools" if text is texts[-1] else f"the text of message {index}"
                return (
                    f"{where} has {match.group()!r}, which is a control token of the tokenizer: it "
                    "would end the message or begin another one; take it out, or, if the text is in the chat template "
                    "already, give its messages instead"
                )
        return None

    def _illegible(
        self,
        conversation: Sequence[ChatMessage],
        ids: Sequence[int],
        tools: Sequence[ChatMessage],
        texts: Sequence[str],
        in_words: bool,
    ) -> str | None:
        remedy = "use a model whose tokenizer knows them, or leave the row out"
        has_unknown = not self.unknown.keys().isdisjoint(ids)
        if has_unknown and not in_words:
            return remedy
        if has_unknown and (unknown := self._unknown_parts(conversation, tools)):
            name = next(iter(self.unknown.values()))
            return (
                f"the tokenizer knows no token for {_listed(unknown)}: {len(unknown)} of the prompt's {len(ids)} "
                f"tokens are {name}; {remedy}"
            )
        if lost := [c for text in texts for c in text if c in self.lost]:
            name = type(self.tokenizer).__name__
            return f"the tokenizer ({name}) leaves out {_listed(lost)}, which the model would never see; {remedy}"
        return None

    def _unknown_parts(self, conversation: Sequence[ChatMessage], tools: Sequence[ChatMessage]) -> list[str]:
        """Return the parts of a prompt's text that are unknown tokens."""
        text = written(self.tokenizer, conversation, tools)
        if not self.tokenizer.is_fast:  # it does not say where in the text its tokens are
            each = [(character, self.tokenizer.encode(character, add_special_tokens=False)) for character in text]
            return [character for character, ids in each if not self.unknown.keys().isdisjoint(ids)]
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids, places = cast("list[int]", encoded["input_ids"]), cast("list[tuple[int, int]]", encoded["offset_mapping"])
        pieces = [(token, text[start:stop]) for token, (start, stop) in zip(ids, places, strict=True)]
        # The name itself may stand in the template: some tokenizers have one token for the end and the unknown.
        return [piece for token, piece in pieces if token in self.unknown and piece != self.unknown[token]]


@functools.lru_cache(maxsize=16)
def control_tokens(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str] | None:
    """Return what finds a control token in text; None if the tokenizer, which stays as it is, has none."""
    return _finding(_control_tokens(tokenizer))


def without_control(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    """Return a text with a space in place of each control token."""
    control = control_tokens(tokenizer)
    while control is not None and control.search(text):
        text = control.sub(" ", text)
    return text


def _finding(names: set[str]) -> re.Pattern[str] | None:
    longest_first = sorted(names, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if names else None


def _control_tokens(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    return {name for name in {*special, *tokenizer.all_special_tokens, *_frames(tokenizer)} if name.strip()}


def _frames(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """Return the added tokens that the chat template puts around messages."""
    added = tokenizer.added_tokens_decoder
    found: set[int] = set()
    for roles in (("user",), ("system", "user")):
        conversation = [{"role": role, "content": _PROBE} for role in roles]
        try:
            whole = _write(tokenizer, conversation, cue=False)
            asked = _write(tokenizer, conversation, cue=True)
        except template_errors():
            continue
        found |= {token for token in whole if token in added}
        # Of the cue the assistant's mark alone: what follows it, such as <think>, is what prompts may speak of.
        cue = [token for token in asked[len(whole) :] if token in added]
        found |= set(cue[:1] if asked[: len(whole)] == whole else [])
    return {added[token].content for token in found}


def _write(tokenizer: PreTrainedTokenizerBase, conversation: list[dict[str, str]], *, cue: bool) -> list[int]:
    return cast("list[int]", tokenizer.apply_chat_template(conversation, add_generation_prompt=cue, return_dict=False))


def _unknown_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    names = {cast("str | None", tokenizer.unk_token)}
    if tokenizer.is_fast:
        from tokenizers import models
        from transformers import PreTrainedTokenizerFast

        assert isinstance(tokenizer, PreTrainedTokenizerFast)
        model = tokenizer.backend_tokenizer.model
        if isinstance(model, models.BPE | models.WordLevel | models.WordPiece):
            names.add(model.unk_token)
    vocabulary = tokenizer.get_vocab()
    return {vocabulary[name]: name for name in names if name is not None and name in vocabulary}


def _lost_characters(tokenizer: PreTrainedTokenizerBase, characters: Iterable[str]) -> frozenset[str]:
    # Many tokenizers leave out blanks and invisible characters on purpose.
    visible = sorted(c for c in characters if unicodedata.category(c)[0] not in "CZ")
    if not visible:
        return frozenset()
    encoded = cast("list[list[int]]", tokenizer(visible, add_special_tokens=False)["input_ids"])
    return frozenset(character for character, ids in zip(visible, encoded, strict=True) if not ids)


def _listed(pieces: Sequence[str]) -> str:
    distinct = list(dict.fromkeys(pieces))
    shown = ", ".join(map(repr, distinct[:_MOST_SHOWN]))
    return shown + (f" and {len(distinct) - _MOST_SHOWN} more" if len(distinct) > _MOST_SHOWN else "")
