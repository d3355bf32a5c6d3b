"""Sampling with an engine that has no other requests: a whole batch, or one stream; and how any response is a turn."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

from rallypoint.errors import GenerationError, RallyError, WeightsMismatchError
from rallypoint.generation.protocol import GenerationEngine, Output, Request, SamplingParams
from rallypoint.types import Limit, Prompts, RolloutBatch, Trajectory, Turn, assemble


def generate(
    engine: GenerationEngine,
    prompts: Prompts,
    params: SamplingParams,
    *,
    version: int,
    group_size: int = 1,
) -> RolloutBatch:
    """Sample G rollouts of each prompt; those of a prompt are neighbours in the result.

    Args:
        engine: without other requests.
        prompts: token ids; may be of different lengths, none empty.
        params: of every rollout; see `SamplingParams`.
        version: that must be loaded; stamped on every rollout.
        group_size: G, rollouts of each prompt.

    Raises:
        WeightsMismatchError: the engine holds other weights.
        GenerationError: the engine is asleep.
        RequestError: a prompt is empty, too long, or has ids that the model does not know; nothing is sampled.
        RallyError: whatever made a rollout fail, such as logits that are not finite.
    """
    _check_awake(engine)
    if version != engine.version:
        raise WeightsMismatchError(f"expected to sample from version {version}, but version {engine.version} is loaded")
    row_of_request: dict[int, int] = {}
    for prompt in range(len(prompts)):
        tokens = tuple(prompts.tokens[int(prompts.offsets[prompt]) : int(prompts.offsets[prompt + 1])].tolist())
        for sample in range(group_size):
            request = Request(
                tokens=tokens, params=params, prompt_index=int(prompts.prompt_index[prompt]), sample_index=sample
            )
            try:
                row_of_request[engine.submit(request)] = len(row_of_request)
            except RallyError:
                _withdraw(engine, row_of_request)
                raise
    outputs = _collect(engine, row_of_request)
    groups: list[RolloutBatch] = []
    for place in range(len(prompts)):
        tokens = tuple(prompts.rows([place]).tokens.tolist())
        group = outputs[place * group_size : (place + 1) * group_size]
        groups.append(
            assemble(
                [Trajectory(turns=(as_turn(tokens, one),)) for one in group],
                prompt_index=int(prompts.prompt_index[place]),
                sample_index=list(range(group_size)),
                is_narrowed=params.narrows,
            )
        )
    nothing = assemble([], prompt_index=0, sample_index=[], is_narrowed=params.narrows)
    return RolloutBatch.join([nothing, *groups])


def as_turn(
    prompt: tuple[int, ...],
    outputs: Sequence[Output],
    *,
    limit: Limit | None = None,
    said: tuple[tuple[str, str], ...] = (),
    state: str | None = None,
) -> Turn:
    """Return the turn that a request's outputs make up; the last output ends it.

    Args:
        prompt: tokens of the request.
        outputs: of the request, in their order.
        limit: see `Turn.limit`.
        said: see `Turn.said`.
        state: see `Turn.state`.
    """
    spans = _spans(outputs)
    return Turn(
        prompt=prompt,
        response=tuple(itertools.chain.from_iterable(output.tokens for output in outputs)),
        logprobs=tuple(itertools.chain.from_iterable(output.logprobs for output in outputs)),
        sampled_logprobs=tuple(itertools.chain.from_iterable(output.sampled_logprobs for output in outputs)),
        experts=b"".join(output.experts for output in outputs),
        prompt_experts=outputs[-1].prompt_experts,
        version=min(output.version for output in outputs),
        spans=spans if len(spans) > 1 else (),  # of several versions
        truncated=outputs[-1].finish_reason != "stop",
        limit=limit,
        said=said,
        state=state,
    )


def _spans(outputs: Sequence[Output]) -> tuple[tuple[int, int], ...]:
    """Return the versions of a response in turn, each with its number of tokens."""
    grouped = itertools.groupby(outputs, key=lambda output: output.version)
    return tuple((version, sum(len(output.tokens) for output in own)) for version, own in grouped)


def outputs_of(turn: Turn) -> list[Output]:
    """Return a turn as outputs, one for each version; the last one ends it."""
    spans = turn.spans or ((turn.version, len(turn.response)),)
    ends = [*itertools.accumulate(length for _, length in spans)]
    return [
        Output(
            request_id=0,
            tokens=turn.response[end - length : end],
            logprobs=turn.logprobs[end - length : end],
            sampled_logprobs=turn.sampled_logprobs[end - length : end],
            version=version,
            finish_reason=None if end < ends[-1] else "length" if turn.truncated else "stop",
        )
        for (version, length), end in zip(spans, ends, strict=True)
    ]


def stream(engine: GenerationEngine, request: Request) -> Iterator[Output]:
    """Sample one response and yield its outputs as they come; the engine has no other requests.

    Raises:
        GenerationError: the engine is asleep.
        RequestError: see `GenerationEngine.submit`.
        RallyError: whatever made it fail.
    """
    request_id = engine.submit(request)
    try:
        while True:
            _check_awake(engine)
            for output in engine.step():
                if output.error is not None:
                    raise output.error
                yield output
                if output.finish_reason is not None:
                    return
    finally:
        _withdraw(engine, [request_id])


def _check_awake(engine: GenerationEngine) -> None:
    """Refuse to wait for an engine that does nothing."""
    if engine.is_asleep:
        raise GenerationError("the engine is asleep and would sample nothing; call its `wake` first")


def _collect(engine: GenerationEngine, row_of_request: Mapping[int, int]) -> list[list[Output]]:
    """Take steps until all requests have ended, and return the outputs of each row. None is left behind by an error."""
    outputs: list[list[Output]] = [[] for _ in row_of_request]
    still_open = set(row_of_request)
    try:
        while still_open:
            for output in engine.step():
                if output.error is not None:
                    raise output.error
                outputs[row_of_request[output.request_id]].append(output)
                if output.finish_reason is not None:
                    still_open.remove(output.request_id)
    finally:
        if still_open:
            _withdraw(engine, still_open)
    return outputs


def _withdraw(engine: GenerationEngine, request_ids: Iterable[int]) -> None:
    """Give requests up and have the engine forget them."""
    for request_id in request_ids:
        engine.cancel(request_id)
    engine.step()
