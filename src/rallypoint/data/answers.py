"""What a sampled answer says, as a message: its reasoning and its text.

Owns: which part of the tokens is which. Must not know: engines, what calls of tools do.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rallypoint.data.template import TemplateProbe, special_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_REASONING = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"))
"""Tags around reasoning."""


def read_answer(
    tokenizer: PreTrainedTokenizerBase, response: Sequence[int], stop_tokens: Sequence[int]
) -> dict[str, object]:
    """Return a sampled answer as a message with `role`, `content`, and `reasoning` if it has some.

    Args:
        tokenizer: the model's, with its chat template.
        response: the ids that were sampled, with the token that ended them, if one did.
        stop_tokens: ids that end an answer.
    """
    form = _Form.of(tokenizer)
    ids = list(response[:-1] if response and response[-1] in stop_tokens else response)
    reasoning, content = form.split(str(tokenizer.decode(ids, skip_special_tokens=False)))
    message: dict[str, object] = {"role": "assistant", "content": form.without_special(content)}
    if reasoning is not None:
        message["reasoning"] = form.without_special(reasoning)
    return message


class _Form:
    """How answers of a model are to be read."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        names = [str(tokenizer.convert_ids_to_tokens(token)) for token in special_ids(tokenizer)]
        longest_first = sorted(filter(None, names), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._opened = TemplateProbe.of(tokenizer).opened

    @staticmethod
    @functools.lru_cache(maxsize=16)
    def of(tokenizer: PreTrainedTokenizerBase) -> _Form:
        """Return that of a tokenizer, whose template stays as it is."""
        return _Form(tokenizer)

    def without_special(self, text: str) -> str:
        """Return a text without special tokens."""
        return self._special.sub("", text)

    def split(self, text: str) -> tuple[str | None, str]:
        """Return the reasoning of an answer, or None, and the rest; what was cut within its reasoning has no more."""
        for opening, closing in _REASONING:
            begun = text.lstrip()
            if self._opened == opening or begun.startswith(opening):
                reasoning, _, content = begun.removeprefix(opening).partition(closing)
                return reasoning.strip("\n"), content.lstrip("\n")
        return None, text
