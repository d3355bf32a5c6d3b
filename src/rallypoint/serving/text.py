"""Text of tokens that come a few at a time.

Owns: when text can be shown. Must not know: requests, HTTP.

Invariant: what is returned, joined, is the text of all tokens up to the first stop string; nothing that was
returned is taken back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

_REPLACEMENT = "\ufffd"
_NUM_CONTEXT = 8
"""Tokens before new ones that are decoded with them: some decoders treat a text's first token in their own way."""
_NUM_SETTLED = 24
"""So many are kept before the older ones are forgotten."""
_MAX_OPEN = 256
"""Replacements at the end of a text that may still become characters."""


class Detokenizer:
    """Turns tokens into text; a character of several tokens comes with its last one.

    >>> detokenizer = Detokenizer(lambda tokens: bytes(tokens).decode(errors="replace"))
    >>> detokenizer.push([104, 0xC3]), detokenizer.push([0xA4]), detokenizer.push([0xC3]), detokenizer.finish()
    ('h', 'ä', '', '\ufffd')
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        """Decode with a function that turns any number of token ids into text."""
        self._decode = decode
        self._tokens: list[int] = []
        self._num_shown = 0
        """Characters of the text of `_tokens`."""

    def push(self, tokens: Sequence[int]) -> str:
        """Return the text that is certain now."""
        self._tokens += tokens
        text = self._decode(self._tokens)
        # While a character is not complete, some decoders show the bytes of those before it as replacements, too.
        end = len(text.rstrip(_REPLACEMENT))
        is_hopeless = len(text) - end > _MAX_OPEN
        end = len(text) if is_hopeless else end
        new = text[self._num_shown : end]
        self._num_shown = max(self._num_shown, end)
        if is_hopeless or (len(self._tokens) > _NUM_SETTLED and end == len(text)):
            self._forget(even_if_cut=is_hopeless)
        return new

    def finish(self) -> str:
        """Return the rest."""
        rest = self._decode(self._tokens)[self._num_shown :]
        self._num_shown += len(rest)
        return rest

    def _forget(self, *, even_if_cut: bool) -> None:
        """Keep the last few tokens only, from the beginning of a character if there is one."""
        for num in range(_NUM_CONTEXT, _NUM_CONTEXT + 4):
            context = self._decode(self._tokens[-num:])
            if context and (even_if_cut or _REPLACEMENT not in context):
                self._tokens, self._num_shown = self._tokens[-num:], len(context)
                return


class StopText:
    r"""Ends a text before the first stop string, and withholds what may be the beginning of one.

    >>> text = StopText(("END", "\n\n"))
    >>> text.push("the E"), text.push("N"), text.push("TRY EN"), text.push("D."), text.has_ended
    ('the ', '', 'ENTRY ', '', True)

    Too early, a string may begin and not end:

    >>> text = StopText(("END",))
    >>> text.push("END, E", is_early=True), text.push("ND"), text.has_ended
    ('END, ', '', True)
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = strings
        self._longest = max(map(len, strings), default=0)
        self._withheld = ""
        self.has_ended = False

    def push(self, text: str, *, is_early: bool = False) -> str:
        """Return what certainly belongs to the answer; early text completes no stop string."""
        if self.has_ended:
            return ""
        num_before, text = len(self._withheld), self._withheld + text
        # What was withheld has no string that counts in it, so each ends later.
        starts = [(string, max(0, num_before - len(string) + 1)) for string in self._strings]
        places = [place for string, start in starts if (place := text.find(string, start)) >= 0]
        if places and not is_early:
            self.has_ended, self._withheld = True, ""
            return text[: min(places)]
        lengths = range(min(self._longest - 1, len(text)), 0, -1)
        num_withheld = next((n for n in lengths if any(s.startswith(text[-n:]) for s in self._strings)), 0)
        self._withheld = text[len(text) - num_withheld :]
        return text[: len(text) - num_withheld]

    def finish(self) -> str:
        """Return the rest: no stop string came of it."""
        rest, self._withheld = self._withheld, ""
        return rest
