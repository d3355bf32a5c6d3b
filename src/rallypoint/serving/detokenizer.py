"""Text of tokens that come a few at a time.

Owns: when text can be shown, and where a stop string ends it. Must not know: HTTP, engines.

Invariant: the pieces returned, joined, are the text of all tokens up to the first stop string; no piece is taken back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from rallypoint.data import AnswerReader
from rallypoint.generation import Output, SamplingParams
from rallypoint.serving.responses import Delta

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
        self.ended_by: str | None = None
        """The string that has ended it."""

    @property
    def has_ended(self) -> bool:
        """Whether a string has."""
        return self.ended_by is not None

    def push(self, text: str, *, is_early: bool = False) -> str:
        """Return what certainly belongs to the answer; early text completes no stop string."""
        if self.has_ended:
            return ""
        num_before, text = len(self._withheld), self._withheld + text
        # What was withheld has no string that counts in it, so each ends later.
        starts = [(string, max(0, num_before - len(string) + 1)) for string in self._strings]
        places = [(place, string) for string, start in starts if (place := text.find(string, start)) >= 0]
        if places and not is_early:
            place, self.ended_by = min(places)
            self._withheld = ""
            return text[:place]
        lengths = range(min(self._longest - 1, len(text)), 0, -1)
        num_withheld = next((n for n in lengths if any(s.startswith(text[-n:]) for s in self._strings)), 0)
        self._withheld = text[len(text) - num_withheld :]
        return text[: len(text) - num_withheld]

    def finish(self) -> str:
        """Return the rest: no stop string came of it."""
        rest, self._withheld = self._withheld, ""
        return rest


class Choice:
    """Turns outputs into text, tokens and a reason to end."""

    def __init__(
        self,
        index: int,
        params: SamplingParams,
        decode: Callable[[Sequence[int]], str],
        reader: AnswerReader | None = None,
    ) -> None:
        """Begin without tokens.

        Args:
            index: the choice's place in the answer.
            params: those that it is sampled with.
            decode: turns tokens into text.
            reader: tells reasoning and calls of tools from the text; None: all of it is shown.
        """
        self.index = index
        self.tokens: tuple[int, ...] = ()
        """Ids of all tokens so far."""
        self._reader, self._has_reasoned = reader, False
        self._detokenizer = Detokenizer(decode if reader is None else reader.decode)
        self._text, self._shown = StopText(params.stop_strings), ""
        self._stop_tokens, self._min_tokens = frozenset(params.stop_tokens), params.min_new_tokens

    def add(self, outputs: Iterable[Output]) -> Delta:
        """Return what has become known by some outputs, the next ones of this choice."""
        outputs = tuple(outputs)
        tokens = tuple(token for output in outputs for token in output.tokens)
        # A string that is complete before the last token of the minimum does not count.
        num_early = max(0, self._min_tokens - 1 - len(self.tokens))
        self.tokens += tokens
        reason = outputs[-1].finish_reason
        ends_by_token = reason == "stop" and bool(tokens) and tokens[-1] in self._stop_tokens
        shown = tokens[:-1] if ends_by_token else tokens
        text = self._text.push(self._content_of(self._detokenizer.push(shown[:num_early])), is_early=True)
        text += self._text.push(self._content_of(self._detokenizer.push(shown[num_early:])))
        message = None
        if reason is not None:
            rest = self._content_of(self._detokenizer.finish())
            if self._reader is not None:
                message, more = self._reader.finish(self.tokens)
                rest += more
            text += self._text.push(rest) + self._text.finish()
        self._shown += text
        if message is not None:  # as it was shown: a client sends back what it has read
            message["content"] = self._shown
        return Delta(
            index=self.index,
            text=text,
            reasoning=self._new_reasoning(message),
            message=message,
            tokens=tokens,
            logprobs=tuple(logprob for output in outputs for logprob in output.logprobs),
            sampled_logprobs=tuple(logprob for output in outputs for logprob in output.sampled_logprobs),
            version=outputs[-1].version,
            versions=tuple(output.version for output in outputs for _ in output.tokens),
            finish_reason=None if reason is None else "length" if reason == "length" else "stop",
            stop_string=self._text.ended_by,
            prompt_logprobs=outputs[-1].prompt_logprobs,
        )

    def _content_of(self, text: str) -> str:
        return text if self._reader is None else self._reader.push(text)

    def _new_reasoning(self, message: Mapping[str, object] | None) -> str:
        """Return the reasoning if it has become known."""
        if self._reader is None or self._has_reasoned:
            return ""
        reasoning = str((message or {}).get("reasoning") or self._reader.reasoning or "")
        self._has_reasoned = bool(reasoning)
        return reasoning
