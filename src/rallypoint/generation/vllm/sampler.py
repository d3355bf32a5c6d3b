"""How the tokens of vLLM's batch are sampled. Runs inside of vLLM's processes, and in tests.

Owns: what is written into logits so that vLLM takes the token that we sampled and reports our logprobs. Must not know:
vLLM. Imported where only torch is certain.

vLLM is told to be greedy and to report the logits as they are. So they are overwritten:

- the sampled token gets its surprisal (minus its logprob in the whole distribution at the temperature), 0 or more;
- if the distribution is narrowed, the next token id gets the logprob in the narrowed distribution, 0 or less;
- all others get -inf.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict

import torch
from torch import Tensor

from rallypoint.generation.protocol import Request, SamplingParams
from rallypoint.generation.sampler import Sampler


class Encoded(TypedDict):
    """A request as vLLM passes it on."""

    params: dict[str, Any]
    prompt_index: int
    sample_index: int
    num_prompt_tokens: int
    """Tokens of the prompt; those after them in what vLLM takes for the prompt are the response so far."""


NOT_FINITE = 1e30
"""Reported as the surprisal of a token whose logits were not finite."""


def needs_companion(params: SamplingParams) -> bool:
    """Whether two numbers are reported for each token."""
    return params.narrows and params.temperature > 0


def encode(request: Request) -> Encoded:
    """Return a request as vLLM passes it on."""
    return {
        "params": dataclasses.asdict(request.params),
        "prompt_index": request.prompt_index,
        "sample_index": request.sample_index,
        "num_prompt_tokens": len(request.tokens),
    }


@dataclasses.dataclass(slots=True, eq=False)
class _Row:
    """A request that vLLM samples."""

    request: Request
    """Without its tokens."""
    num_prompt_tokens: int
    tokens: Callable[[int], Sequence[int]]
    """The first so many tokens of prompt and response together."""

    @classmethod
    def of(cls, asked: Encoded, tokens: Callable[[int], Sequence[int]]) -> _Row:
        params: dict[str, Any] = dict(asked["params"])
        params |= {name: tuple(value) for name, value in params.items() if isinstance(value, list)}
        request = Request(
            tokens=(),
            params=SamplingParams(**params),
            prompt_index=asked["prompt_index"],
            sample_index=asked["sample_index"],
        )
        return cls(request, asked["num_prompt_tokens"], tokens)

    def so_far(self, num_tokens: int) -> tuple[Request, Sequence[int]]:
        """Return the request and its response; only the number of their tokens if nothing needs them, as they are many.

        Args:
            num_tokens: of prompt and response together.
        """
        num_done = max(0, num_tokens - self.num_prompt_tokens)  # fewer while vLLM reads the prompt in parts
        if self.request.params.repetition_penalty == 1:
            return self.request, range(num_done)
        tokens = self.tokens(num_tokens)
        prompt = tuple(tokens[: self.num_prompt_tokens])
        return dataclasses.replace(self.request, tokens=prompt), tokens[self.num_prompt_tokens :]


class BatchSampler:
    """Samples for those rows of a batch that have our arguments."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sampler: Sampler | None = None
        self._rows: list[_Row] = []
        self._lengths: list[int] = []
        """Tokens of prompt and response of each row when `_sampler` samples next."""

    def draw(self, logits: Tensor, rows: Mapping[int, _Row], lengths: Sequence[int]) -> Tensor:
        """Sample a token for each of some rows.

        Args:
            logits: [B, V] float32, overwritten and returned.
            rows: by their places in the batch.
            lengths: tokens of prompt and response of each of them.
        """
        if not rows:
            return logits
        current, lengths = list(rows.values()), list(lengths)
        if self._sampler is None or current != self._rows or lengths != self._lengths:
            pairs = [row.so_far(length) for row, length in zip(current, lengths, strict=True)]
            self._sampler, self._rows = Sampler(pairs, self._device), current
        self._lengths = [length + 1 for length in lengths]
        everything = list(rows) == list(range(len(logits)))
        places = torch.tensor(list(rows), device=logits.device)
        draws = self._sampler.sample(logits if everything else logits.index_select(0, places))
        surprisals = draws.logprobs.neg().nan_to_num(nan=NOT_FINITE, posinf=NOT_FINITE)
        logits.index_fill_(0, places, float("-inf"))
        logits[places, draws.tokens] = surprisals
        narrowed = [at for at, row in enumerate(current) if needs_companion(row.request.params)]
        if narrowed:
            at = torch.tensor(narrowed, device=logits.device)
            beside = (draws.tokens[at] + 1) % logits.shape[1]
            # If both are 0, vLLM would take the first of them, so only one is written.
            sampled = draws.sampled_logprobs[at].where(surprisals[at] > 0, float("-inf"))
            logits[places[at], beside] = sampled.nan_to_num(nan=float("-inf"), neginf=float("-inf"))
        return logits


class MovingRows:
    """The rows of a batch of vLLM's first model runner, which tells when rows join, leave and move."""

    def __init__(self, device: torch.device) -> None:
        self._sampler = BatchSampler(device)
        self._rows: dict[int, tuple[_Row, Callable[[], int]]] = {}
        """By place; with a function that returns how many tokens prompt and response have."""

    def add(self, place: int, asked: Encoded | None, prompt: Sequence[int], response: Sequence[int]) -> None:
        """Put a request into a row of the batch; vLLM appends to its response."""
        self._rows.pop(place, None)
        if asked is not None:
            row = _Row.of(asked, lambda num_tokens: (*prompt, *response)[:num_tokens])
            self._rows[place] = row, lambda: len(prompt) + len(response)

    def remove(self, place: int) -> None:
        """Forget a row."""
        self._rows.pop(place, None)

    def move(self, start: int, end: int, *, swap: bool) -> None:
        """Move a row to another place; the row there is swapped with it, or forgotten."""
        moved, replaced = self._rows.pop(start, None), self._rows.pop(end, None)
        if moved is not None:
            self._rows[end] = moved
        if swap and replaced is not None:
            self._rows[start] = replaced

    def draw(self, logits: Tensor) -> Tensor:
        """Sample a token for each row: [B, V] float32, overwritten and returned."""
        rows = {place: row for place, (row, _) in self._rows.items()}
        return self._sampler.draw(logits, rows, [length() for _, length in self._rows.values()])


class Slots:
    """The requests of vLLM's second model runner, each in a slot of its own; a batch has them in any order."""

    def __init__(self, device: torch.device, tokens: Callable[[int, int], Sequence[int]]) -> None:
        """Take a function that returns the first so many tokens in a slot: (slot, number) -> tokens."""
        self._sampler, self._tokens = BatchSampler(device), tokens
        self._rows: dict[int, _Row] = {}

    def add(self, slot: int, asked: Encoded | None) -> bool:
        """Put a request into a slot, in place of what was there; return whether it has our arguments."""
        self._rows.pop(slot, None)
        if asked is not None:
            self._rows[slot] = _Row.of(asked, functools.partial(self._tokens, slot))
        return asked is not None

    def draw(self, logits: Tensor, slots: Sequence[int], lengths: Sequence[int]) -> Tensor:
        """Sample a token for each row.

        Args:
            logits: [B, V] float32, overwritten and returned.
            slots: of the rows.
            lengths: tokens of prompt and response of each row.
        """
        rows = {place: self._rows[slot] for place, slot in enumerate(slots) if slot in self._rows}
        return self._sampler.draw(logits, rows, [lengths[place] for place in rows])
