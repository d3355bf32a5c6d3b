"""Sampling without other requests beside it: a whole batch, or one stream."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch

from rallypoint.errors import GenerationError, RallyError, WeightsMismatchError
from rallypoint.generation.protocol import GenerationEngine, Output, Request, SamplingParams
from rallypoint.types import Prompts, RolloutBatch, offsets_from_lengths


def generate(
    engine: GenerationEngine,
    prompts: Prompts,
    params: SamplingParams,
    *,
    version: int,
    tick: Callable[[], None] = lambda: None,
    failures: list[GenerationError] | None = None,
) -> RolloutBatch:
    """Sample G rollouts of each prompt; those of a prompt are neighbours in the result.

    Args:
        engine: without other requests.
        prompts: token ids; may be of different lengths, none empty.
        params: see there.
        version: that must be loaded; stamped on every rollout.
        tick: called at every step, so that whoever waits knows that it gets on.
        failures: takes the errors of rollouts that failed because of their engine, which the result then lacks; None:
            the first one is raised.

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
        for sample in range(params.group_size):
            request = Request(
                tokens=tokens, params=params, prompt_index=int(prompts.prompt_index[prompt]), sample_index=sample
            )
            try:
                row_of_request[engine.submit(request)] = len(row_of_request)
            except RallyError:
                _withdraw(engine, row_of_request)
                raise
    return _assemble(prompts, params, version, _collect(engine, row_of_request, tick, failures))


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


def _collect(
    engine: GenerationEngine,
    row_of_request: Mapping[int, int],
    tick: Callable[[], None],
    failures: list[GenerationError] | None,
) -> list[list[Output]]:
    """Take steps until all requests have ended, and return the outputs of each row. None is left behind by an error."""
    outputs: list[list[Output]] = [[] for _ in row_of_request]
    still_open = set(row_of_request)
    try:
        while still_open:
            for output in engine.step():
                if failures is not None and isinstance(output.error, GenerationError):
                    failures.append(output.error)
                elif output.error is not None:
                    raise output.error
                outputs[row_of_request[output.request_id]].append(output)
                if output.finish_reason is not None:
                    still_open.remove(output.request_id)
            tick()
    finally:
        if still_open:
            _withdraw(engine, still_open)
    return outputs


def _withdraw(engine: GenerationEngine, request_ids: Iterable[int]) -> None:
    """Give requests up and have the engine forget them."""
    for request_id in request_ids:
        engine.cancel(request_id)
    engine.step()


def _assemble(
    prompts: Prompts, params: SamplingParams, version: int, outputs: Sequence[Sequence[Output]]
) -> RolloutBatch:
    """Join prompts with their responses into ragged rows, without those that failed; row b is of prompt b // G."""
    kept = torch.tensor([b for b, row in enumerate(outputs) if row[-1].finish_reason != "failed"], dtype=torch.int64)
    outputs = [outputs[b] for b in kept.tolist()]
    repeated = prompts.rows(kept // params.group_size)
    lengths = torch.tensor([sum(len(output.tokens) for output in row) for row in outputs], dtype=torch.int64)
    offsets = offsets_from_lengths(repeated.lengths + lengths)
    row_of_token = torch.repeat_interleave(torch.arange(len(outputs)), offsets[1:] - offsets[:-1])
    loss_mask = torch.arange(int(offsets[-1])) - offsets[row_of_token] >= repeated.lengths[row_of_token]
    tokens = torch.empty(int(offsets[-1]), dtype=torch.int64)
    tokens[~loss_mask] = repeated.tokens
    tokens[loss_mask] = torch.tensor([t for row in outputs for output in row for t in output.tokens], dtype=torch.int64)

    def aligned(logprobs: Iterable[float]) -> torch.Tensor:
        result = torch.zeros(int(offsets[-1]))
        result[loss_mask] = torch.tensor(list(logprobs))
        return result

    return RolloutBatch(
        offsets=offsets,
        tokens=tokens,
        loss_mask=loss_mask,
        rollout_logprobs=aligned(logprob for row in outputs for output in row for logprob in output.logprobs),
        sampled_logprobs=aligned(logprob for row in outputs for output in row for logprob in output.sampled_logprobs)
        if params.narrows
        else None,
        prompt_index=repeated.prompt_index,
        sample_index=kept % params.group_size,
        versions=torch.tensor([min((p.version for p in row), default=version) for row in outputs], dtype=torch.int64),
        truncated=torch.tensor([row[-1].finish_reason != "stop" for row in outputs], dtype=torch.bool),
    )
