"""One choice of an answer, as its outputs come in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from rallypoint.generation import Output, SamplingParams
from rallypoint.serving.answers import Delta
from rallypoint.serving.text import Detokenizer, StopText


class Choice:
    """Turns outputs into text, tokens and a reason to end."""

    def __init__(self, index: int, params: SamplingParams, decode: Callable[[Sequence[int]], str]) -> None:
        """`index` is the choice's place in the answer, `params` those that it is sampled with."""
        self.index = index
        self.num_tokens = 0
        self._detokenizer, self._text = Detokenizer(decode), StopText(params.stop_strings)
        self._stop_tokens, self._min_tokens = frozenset(params.stop_tokens), params.min_new_tokens

    def add(self, outputs: Iterable[Output]) -> Delta:
        """Return what has become known by some outputs, the next ones of this choice."""
        outputs = tuple(outputs)
        tokens = tuple(token for output in outputs for token in output.tokens)
        # A string that is complete before the last token of the minimum does not count.
        num_early = max(0, self._min_tokens - 1 - self.num_tokens)
        self.num_tokens += len(tokens)
        reason = outputs[-1].finish_reason
        ends_by_token = reason == "stop" and bool(tokens) and tokens[-1] in self._stop_tokens
        shown = tokens[:-1] if ends_by_token else tokens
        text = self._text.push(self._detokenizer.push(shown[:num_early]), is_early=True)
        text += self._text.push(self._detokenizer.push(shown[num_early:]))
        if reason is not None:
            text += self._text.push(self._detokenizer.finish()) + self._text.finish()
        return Delta(
            index=self.index,
            text=text,
            tokens=tokens,
            logprobs=tuple(logprob for output in outputs for logprob in output.logprobs),
            sampled_logprobs=tuple(logprob for output in outputs for logprob in output.sampled_logprobs),
            versions=tuple(output.version for output in outputs for _ in output.tokens),
            finish_reason=None if reason is None else "length" if reason == "length" else "stop",
        )
