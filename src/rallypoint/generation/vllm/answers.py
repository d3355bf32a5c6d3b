"""What is sent to vLLM for a request, and what its answers say; whatever is no answer to the request is refused.

Owns: the JSON of `/inference/v1/generate`, vLLM's endpoint for token ids in both directions. Must not know: how it
travels.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from typing import Any, cast

from rallypoint.errors import GenerationError
from rallypoint.generation.protocol import FinishReason, Request
from rallypoint.generation.requests import not_finite
from rallypoint.generation.vllm.sampler import NOT_FINITE, encode, needs_companion

_SHOWN = 200
"""Characters of an answer that an error shows."""
_ROUNDING = 1e-3
"""How far below 0 a surprisal may be."""


@dataclasses.dataclass(frozen=True, slots=True)
class Drawn:
    """One token of a response."""

    token: int
    logprob: float
    sampled_logprob: float


@dataclasses.dataclass(frozen=True, slots=True)
class Said:
    """What one answer, or one event of a stream, says."""

    drawn: tuple[Drawn, ...]
    finish_reason: FinishReason | None
    versions: tuple[int, ...] | None
    """Of the weights that each token was sampled from; None in events that end nothing."""


def ask_for(request: Request, done: tuple[int, ...], limit: int, *, stream: bool, model: str | None) -> bytes:
    """Return the body of a request.

    Args:
        request: what is wanted.
        done: tokens of the response that are there already, after an interruption.
        limit: tokens that may still come.
        stream: whether they come one by one.
        model: that the server has under this name; None for the one that it began with.
    """
    return json.dumps(
        {
            **({} if model is None else {"model": model}),
            "token_ids": [*request.tokens, *done],
            "stream": stream,
            "sampling_params": {
                "temperature": 0,
                "max_tokens": limit,
                "stop_token_ids": list(request.params.stop_tokens),
                "ignore_eos": True,
                "detokenize": False,
                "logprobs": 2 if needs_companion(request.params) else 0,
                "extra_args": {"rallypoint": encode(request, len(done))},
            },
        }
    ).encode()


def read(data: bytes, request: Request, num_before: int, limit: int, num_ids: int, *, is_event: bool) -> Said:
    """Read an answer, or an event of a stream.

    Args:
        data: JSON.
        request: that it answers.
        num_before: tokens of the response that are there already.
        limit: tokens that may still come.
        num_ids: size of the model's vocabulary.
        is_event: whether more may follow.

    Raises:
        GenerationError: it is no answer to the request; what came is shown.
        NotFiniteError: the logits of a token were not finite.
    """
    try:
        choice = json.loads(data)["choices"][0]
        tokens, reason, spans = choice["token_ids"] or [], choice["finish_reason"], choice["weight_versions"]
        content = (choice["logprobs"] or {}).get("content") or []
        problem = next(_problems(tokens, reason, content, request, limit, num_ids, is_event=is_event), None)
        if problem is None:
            drawn = tuple(
                _drawn(token, entry, request, num_before + at)
                for at, (token, entry) in enumerate(zip(tokens, content, strict=True))
            )
            versions = None if is_event and reason is None else _versions(spans, None if is_event else len(tokens))
            return Said(drawn, cast("FinishReason | None", reason), versions)
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        problem = f"{type(error).__name__}: {error}"
    shown = data[:_SHOWN].decode(errors="replace") + ("..." if len(data) > _SHOWN else "")
    raise GenerationError(
        f"vllm answered nonsense to prompt {request.prompt_index} sample {request.sample_index}: {problem}; "
        f"its answer: {shown}"
    )


def _problems(
    tokens: list[Any], reason: object, content: list[Any], request: Request, limit: int, num_ids: int, *, is_event: bool
) -> Iterator[str]:
    """Yield what is wrong with an answer as a whole."""
    stops = request.params.stop_tokens
    if len(content) != len(tokens):
        yield f"{len(tokens)} tokens with {len(content)} logprobs"
    if len(tokens) > limit or not (tokens or is_event):
        yield f"{len(tokens)} tokens, expected 1 to {limit}"
    for token in tokens:
        if not isinstance(token, int) or not 0 <= token < num_ids:
            yield f"token {token!r}, but the model knows 0 to {num_ids - 1}"
    for token in tokens[:-1]:
        if token in stops and not request.params.min_new_tokens:
            yield f"it went on after the stop token {token}"
    if reason == "stop" and not (tokens and tokens[-1] in stops):
        yield f"it stopped without one of the stop tokens {list(stops)}"
    if reason == "length" and len(tokens) != limit and not is_event:
        yield f"it ended for its length after {len(tokens)} tokens, expected {limit}"
    if reason not in ("stop", "length", None) or (reason is None and not is_event):
        yield f"finish_reason {reason!r}, expected stop or length"


def _drawn(token: int, entry: dict[str, Any], request: Request, position: int) -> Drawn:
    surprisal = float(entry["logprob"])
    if entry["token_id"] != token:
        raise ValueError(f"the logprob of token {entry['token_id']} beside token {token}")
    if surprisal >= NOT_FINITE / 2:
        raise not_finite(request, position)
    if not surprisal >= -_ROUNDING or math.isinf(surprisal):
        raise ValueError(f"a logprob of {-surprisal}")
    params = request.params
    sampled = -surprisal
    if params.temperature == 0:
        sampled = 0.0
    elif needs_companion(params):
        # Not written where both are 0.
        beside = [float(other["logprob"]) for other in entry["top_logprobs"] if other["token_id"] != token]
        sampled = next((logprob for logprob in beside if logprob > -5000), 0.0)
    return Drawn(token, -surprisal, sampled)


def _versions(spans: list[dict[str, Any]] | None, num_tokens: int | None) -> tuple[int, ...]:
    """Return the version of each token; the end of a stream has those of all of its tokens."""
    versions = tuple(int(span["version"]) for span in spans or () for _ in range(span["end"] - span["start"]))
    if not versions or num_tokens not in (None, len(versions)):
        raise ValueError(f"weight_versions of {len(versions)} tokens")
    return versions
