"""When a response ends by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rallypoint.generation.protocol import SamplingParams

_CONTEXT = 8
"""Tokens before a stop string that are decoded with it: some decoders treat a text's first token in their own way."""


class StopStrings:
    """Looks for the end of one response.

    >>> params = SamplingParams(max_new_tokens=9, stop_tokens=(0,), stop_strings=("cd",), min_new_tokens=2)
    >>> stops = StopStrings(params, lambda tokens: "".join("?abcd"[token] for token in tokens))
    >>> [stops.end_with(tokens) for tokens in ([1], [1, 3], [1, 3, 4], [0], [1, 0])]
    [False, False, True, False, True]
    """

    def __init__(self, params: SamplingParams, decode: Callable[[Sequence[int]], str] | None) -> None:
        self._tokens, self._strings = frozenset(params.stop_tokens), params.stop_strings
        self._min_new_tokens, self._decode = params.min_new_tokens, decode
        # Every token has at least one byte of text, so the string lies within so many last tokens.
        self._window = max((len(text.encode()) for text in params.stop_strings), default=0) + _CONTEXT

    def end_with(self, tokens: Sequence[int]) -> bool:
        """Return whether a response, that had not ended before its last token, has ended now."""
        if len(tokens) < self._min_new_tokens:
            return False
        if tokens[-1] in self._tokens:
            return True
        if not self._strings or self._decode is None:
            return False
        text = self._decode(tokens[-self._window :])
        return any(string in text for string in self._strings)
