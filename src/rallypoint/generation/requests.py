"""What all engines require of a request, a model and its weights, and where a response ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rallypoint.config.limits import CHUNK_BYTES
from rallypoint.errors import NotFiniteError, RequestError, WeightsMismatchError
from rallypoint.generation.protocol import PromptLogprobs, Request, SamplingParams
from rallypoint.models import named_weights
from rallypoint.models.tensor_parallel import VocabParallelLinear

Decode: TypeAlias = Callable[[Sequence[int]], str]
"""Turns token ids into text."""

_CONTEXT = 8
"""Characters before a stop string that are decoded, too: some decoders treat the first token of a text differently."""


def max_positions(model: PreTrainedModel) -> int:
    """Return the longest row that a model declares to support, in tokens."""
    return int(getattr(model.config, "max_position_embeddings", 2**20))


def vocabulary_size(model: PreTrainedModel) -> int:
    """Return how many token ids a model knows, all ranks together if it is cut over some."""
    head = model.get_output_embeddings()
    if isinstance(head, VocabParallelLinear):
        return head.num_tokens
    return cast("nn.Embedding", model.get_input_embeddings()).num_embeddings


def check_request(request: Request, num_ids: int, max_tokens: int, has_decoder: bool) -> None:
    """Refuse a request that cannot be answered.

    Args:
        request: to be checked.
        num_ids: size of the model's vocabulary.
        max_tokens: most tokens of prompt and response together.
        has_decoder: whether the engine can decode, and so find stop strings.

    Raises:
        RequestError: the prompt is no tuple, empty, or leaves no room for a token; it, or a stop token, is not of the
            model's ids.
    """
    name, prompt = f"prompt {request.prompt_index}", request.tokens
    if type(prompt) is not tuple:
        raise RequestError(f"{name} is a {type(prompt).__name__}; expected a tuple of token ids")
    if not prompt:
        raise RequestError(f"{name} has no tokens; expected at least one")
    if len(prompt) >= max_tokens:
        raise RequestError(
            f"{name} has {len(prompt)} tokens, but prompt and response together may have {max_tokens}; shorten it"
        )
    unknown = _first_unknown(prompt, num_ids)
    if unknown is not None:
        raise RequestError(
            f"{name}: token {unknown} has the id {prompt[unknown]!r}, but the model knows 0 to {num_ids - 1}; "
            "encode it with the model's own tokenizer"
        )
    stops = request.params.stop_tokens
    unknown = _first_unknown(stops, num_ids)
    if unknown is not None:
        raise RequestError(
            f"{name}: the stop token {stops[unknown]!r} is none of the model, which knows 0 to {num_ids - 1}; "
            "leave it out"
        )
    if request.params.stop_strings and not has_decoder:
        raise RequestError(f"{name}: stop strings were asked of an engine without a tokenizer; give it `decode`")


def _first_unknown(tokens: Sequence[int], num_ids: int) -> int | None:
    """Return the index of the first token that is not an id of the model; None if all are."""
    # Without a loop in Python: prompts are long, and mostly valid.
    if not tokens or (set(map(type, tokens)) == {int} and min(tokens) >= 0 and max(tokens) < num_ids):
        return None
    return next(at for at, token in enumerate(tokens) if type(token) is not int or not 0 <= token < num_ids)


def not_finite(request: Request, position: int) -> NotFiniteError:
    """Return the error for logits that are NaN or infinite."""
    return NotFiniteError(
        f"the logits are not finite for token {position} of the response of "
        f"prompt {request.prompt_index} sample {request.sample_index}"
    )


def prompt_logprobs(
    states: Tensor, tokens: Sequence[int], logits: Callable[[Tensor], Tensor], num: int, *, num_ids: int
) -> PromptLogprobs:
    """Return the logprobs of a prompt's tokens, from the second on; see `PromptLogprobs`.

    >>> shares = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.7, 0.2], [1.0, 0.0, 0.0]])
    >>> said = prompt_logprobs(shares.log(), (0, 0, 2), lambda states: states, num=1, num_ids=3)
    >>> [{token: round(2.71828**logprob, 2) for token, logprob in place.items()} for place in said]
    [{0: 0.5}, {1: 0.7, 2: 0.2}]

    Args:
        states: [T, E] the last hidden states of all tokens.
        tokens: T ids.
        logits: turns some states into logits, [n, E] -> [n, V].
        num: of the likeliest tokens; all of a smaller vocabulary.
        num_ids: V.
    """
    next_tokens = torch.tensor(tokens[1:], device=states.device).unsqueeze(1)
    num_rows = max(1, CHUNK_BYTES // (4 * num_ids))
    places: list[dict[int, float]] = []
    for some, own in zip(states[:-1].split(num_rows), next_tokens.split(num_rows), strict=True):
        scores = logits(some).float()
        ids = torch.cat([scores.topk(min(num, num_ids), dim=-1).indices, own], 1)
        found = scores.gather(1, ids) - scores.logsumexp(-1, keepdim=True)
        places += [dict(zip(*place, strict=True)) for place in zip(ids.tolist(), found.tolist(), strict=True)]
    return tuple(places)


@torch.no_grad()
def take_over(model: PreTrainedModel, version: int, weights: Mapping[str, Tensor] | None) -> None:
    """Copy weights into a model, all or none of them; None means that they are in place already.

    Raises:
        WeightsMismatchError: names, shapes or types are not the model's.
    """
    if weights is None:
        return
    into = named_weights(model)
    wrong = sorted(weights.keys() ^ into.keys()) or [
        f"{name}: {tensor.dtype} {list(tensor.shape)} instead of {into[name].dtype} {list(into[name].shape)}"
        for name, tensor in weights.items()
        if (tensor.dtype, tensor.shape) != (into[name].dtype, into[name].shape)
    ]
    if wrong:
        raise WeightsMismatchError(f"version {version} is of another model: {', '.join(wrong[:5])}")
    for name, tensor in weights.items():
        into[name].copy_(tensor)


class StopChecker:
    """Finds the end of one response: a stop token, or a stop string.

    >>> params = SamplingParams(max_new_tokens=9, stop_tokens=(0,), stop_strings=("cd",), min_new_tokens=3)
    >>> stops = StopChecker(params, lambda tokens: "".join("?abcd"[token] for token in tokens))
    >>> [stops.ends(tokens) for tokens in ([1, 3], [1, 3, 4], [0], [1, 1, 0])]
    [False, True, False, True]

    A string that was complete before the minimum length does not count:

    >>> stops.ends([3, 4]), stops.ends([3, 4, 1]), stops.ends([3, 4, 1, 3, 4])
    (False, False, True)
    """

    def __init__(self, params: SamplingParams, decode: Callable[[Sequence[int]], str] | None) -> None:
        self._tokens, self._strings = frozenset(params.stop_tokens), params.stop_strings
        self._min_new_tokens, self._decode = params.min_new_tokens, decode
        # Text before the last token, in which a string that this token completes may begin.
        self._num_characters = max(map(len, params.stop_strings), default=0) + _CONTEXT

    def ends(self, tokens: Sequence[int]) -> bool:
        """Return whether a response ends with its last token, given that it had not ended before."""
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
