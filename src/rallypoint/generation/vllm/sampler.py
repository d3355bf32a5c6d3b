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
from collections.abc import Sequence
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
    num_done: int
    """Tokens at the end of the prompt that are the response so far."""


NOT_FINITE = 1e30
"""Reported as the surprisal of a token whose logits were not finite."""


def needs_companion(params: SamplingParams) -> bool:
    """Whether two numbers are reported for each token."""
    return params.narrows and params.temperature > 0


def encode(request: Request, num_done: int) -> Encoded:
    """Return a request as vLLM passes it on; the last `num_done` tokens of its prompt are its response so far."""
    return {
        "params": dataclasses.asdict(request.params),
        "prompt_index": request.prompt_index,
        "sample_index": request.sample_index,
        "num_done": num_done,
    }


@dataclasses.dataclass(slots=True)
class _Row:
    request: Request
    done: tuple[int, ...]
    """The response when the request was sent."""
    response: Sequence[int]
    """The response since then; vLLM appends to it."""

    def so_far(self) -> Sequence[int]:
        """Return the response so far; of its tokens only their number where nothing asks for them: they are many."""
        if self.request.params.repetition_penalty == 1:
            return range(len(self.done) + len(self.response))
        return (*self.done, *self.response)


class BatchSampler:
    """Samples for the rows of a batch that have our arguments."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._rows: dict[int, _Row] = {}
        self._sampler: Sampler | None = None
        self._places: list[int] = []
        self._lengths: list[int] = []
        """Lengths of the responses when `_sampler` samples next."""

    def add(self, place: int, asked: Encoded | None, prompt: Sequence[int], response: Sequence[int]) -> None:
        """Put a request into a row of the batch."""
        self._sampler = None
        self._rows.pop(place, None)
        if asked is None:
            return
        split = len(prompt) - asked["num_done"]
        params: dict[str, Any] = dict(asked["params"])
        params |= {name: tuple(value) for name, value in params.items() if isinstance(value, list)}
        request = Request(
            tokens=tuple(prompt[:split]),
            params=SamplingParams(**params),
            prompt_index=asked["prompt_index"],
            sample_index=asked["sample_index"],
        )
        self._rows[place] = _Row(request, tuple(prompt[split:]), response)

    def remove(self, place: int) -> None:
        """Forget a row."""
        self._sampler = None
        self._rows.pop(place, None)

    def move(self, start: int, end: int, *, swap: bool) -> None:
        """Move a row to another place; the row there is swapped with it, or forgotten."""
        self._sampler = None
        moved, replaced = self._rows.pop(start, None), self._rows.pop(end, None)
        if moved is not None:
            self._rows[end] = moved
        if swap and replaced is not None:
            self._rows[start] = replaced

    def draw(self, logits: Tensor) -> Tensor:
        """Sample a token for each row: [B, V] float32, overwritten and returned."""
        if not self._rows:
            return logits
        lengths = [len(row.response) for row in self._rows.values()]
        if self._sampler is None or lengths != self._lengths:
            rows = [(row.request, row.so_far()) for row in self._rows.values()]
            self._sampler, self._places = Sampler(rows, self._device), list(self._rows)
        self._lengths = [length + 1 for length in lengths]
        everything = self._places == list(range(len(logits)))
        places = torch.tensor(self._places, device=logits.device)
        draws = self._sampler.sample(logits if everything else logits.index_select(0, places))
        surprisals = draws.logprobs.neg().nan_to_num(nan=NOT_FINITE, posinf=NOT_FINITE)
        logits.index_fill_(0, places, float("-inf"))
        logits[places, draws.tokens] = surprisals
        narrowed = [at for at, row in enumerate(self._rows.values()) if needs_companion(row.request.params)]
        if narrowed:
            at = torch.tensor(narrowed, device=logits.device)
            beside = (draws.tokens[at] + 1) % logits.shape[1]
            # If both are 0, vLLM would take the first of them, so only one is written.
            sampled = draws.sampled_logprobs[at].where(surprisals[at] > 0, float("-inf"))
            logits[places[at], beside] = sampled.nan_to_num(nan=float("-inf"), neginf=float("-inf"))
        return logits
