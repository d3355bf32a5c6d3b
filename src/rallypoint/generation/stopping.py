"""When a response ends by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rallypoint.generation.protocol import SamplingParams

_CONTEXT = 8
"""Characters before a stop string that are decoded too: some decoders treat a text's first token in their own way."""


class StopStrings:
    """Looks for the end of one response.

    >>> params = SamplingParams(max_new_tokens=9, stop_tokens=(0,), stop_strings=("cd",), min_new_tokens=3)
    >>> stops = StopStrings(params, lambda tokens: "".join("?abcd"[token] for token in tokens))
    >>> [stops.end_with(tokens) for tokens in ([1, 3], [1, 3, 4], [0], [1, 1, 0])]
    [False, True, False, True]

    A string that was complete before the minimum length does not count:

    >>> stops.end_with([3, 4]), stops.end_with([3, 4, 1]), stops.end_with([3, 4, 1, 3, 4])
    (False, False, True)
    """

    def __init__(self, params: SamplingParams, decode: Callable[[Sequence[int]], str] | None) -> None:
        self._tokens, self._strings = frozenset(params.stop_tokens), params.stop_strings
        self._min_new_tokens, self._decode = params.min_new_tokens, decode
        # Of text before the last token: a string that this token completes begins there.
        self._num_characters = max(map(len, params.stop_strings), default=0) + _CONTEXT

    def end_with(self, tokens: Sequence[int]) -> bool:
        """Return whether a response, that had not ended before its last token, has ended now."""
        if len(tokens) < self._min_new_tokens:
            return False
        if tokens[-1] in self._tokens:
            return True
        if not self._strings or self._decode is None:
            return False
        window = self._num_characters + 1
        before = self._decode(tokens[-window:-1])
        # Special tokens have no text, and a character may take several tokens.
        while len(before) < self._num_characters and window < len(tokens):
            window *= 2
            before = self._decode(tokens[-window:-1])
        text = self._decode(tokens[-window:])
        # What was there without the last token came before the minimum length.
        return any(text.rfind(string) > before.rfind(string) for string in self._strings)
