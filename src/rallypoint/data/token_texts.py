"""The text of each token of a response, so that the texts joined are the whole text.

A token alone has no text of its own in every tokenizer: it may be a part of a character, or lose its space at the
beginning. So a token's text is what it adds to the text before it. A character that several tokens make is the last
one's text; those before it have none.
"""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

_UNFINISHED = "\ufffd"
"""What a tokenizer writes for a part of a character."""


class TokenTexts:
    """Finds them; special tokens have texts as well, their names."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._alone: dict[int, str] = {}
        """The texts of single tokens, which mostly are the right ones."""

    def __call__(self, token_ids: Sequence[int]) -> list[str]:
        """Return a text for each token."""
        new = list(dict.fromkeys(token for token in token_ids if token not in self._alone))
        self._alone.update((token, self._decode([token])) for token in new)
        texts = [self._alone[token] for token in token_ids]
        return texts if "".join(texts) == self._decode(token_ids) else self._one_by_one(token_ids)

    def _one_by_one(self, token_ids: Sequence[int]) -> list[str]:
        """Decode ever longer pieces; a piece begins at the token before the last one that finished a character."""
        texts: list[str] = []
        first, told = 0, 0
        for end in range(1, len(token_ids) + 1):
            before, now = self._decode(token_ids[first:told]), self._decode(token_ids[first:end])
            is_whole = not now.endswith(_UNFINISHED) or end == len(token_ids)
            texts.append(now[len(before) :] if is_whole else "")
            if is_whole:
                first, told = told, end
        return texts

    def _decode(self, token_ids: Sequence[int]) -> str:
        return str(
            self._tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        )
