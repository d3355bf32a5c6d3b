"""Our own generator, on the very modules that are trained.

Left out, compared with a serving engine: requests that join while others run, and memory in blocks.
A batch starts together; groups that are done leave.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rallypoint.errors import NotFiniteError, RequestError
from rallypoint.generation.cache import DecodeRows, PrefillRows
from rallypoint.generation.protocol import SamplingParams
from rallypoint.generation.randomness import rollout_keys, uniform
from rallypoint.generation.sampling import Rules, sample
from rallypoint.models import lm_head
from rallypoint.models.families import logit_softcap
from rallypoint.models.head import soft_capped
from rallypoint.types import Prompts, RolloutBatch, offsets_from_lengths


class NativeGenerator:
    """Samples groups of rollouts with a cache that the rollouts of a prompt share."""

    def __init__(self, model: PreTrainedModel, *, max_batch_rows: int, tick: Callable[[], None] = lambda: None) -> None:
        """Sample from a model; `tick` is called for every token, so that whoever waits knows that it gets on."""
        self.model = model
        self._max_batch_rows, self._tick = max_batch_rows, tick

    @torch.no_grad()
    def generate(self, prompts: Prompts, params: SamplingParams, *, version: int) -> RolloutBatch:
        """Sample G rollouts of each prompt; those of a prompt are neighbours in the result.

        Args:
            prompts: token ids; may be of different lengths, none empty.
            params: see there.
            version: of the weights, stamped on every rollout.

        Raises:
            RequestError: a prompt is empty.
            NotFiniteError: a logit is NaN or infinite; the rollout is named.
        """
        if len(prompts) and int(prompts.lengths.min()) == 0:
            raise RequestError(f"prompt {int(prompts.prompt_index[prompts.lengths.argmin()])} has no tokens")
        at_once = max(1, self._max_batch_rows // params.group_size)
        batches = [
            self._generate_together(prompts.rows(range(start, min(start + at_once, len(prompts)))), params, version)
            for start in range(0, len(prompts), at_once)
        ]
        return RolloutBatch.join(batches) if batches else _assemble(prompts, params, version, *_nothing())

    def stream(self, prompts: Prompts, params: SamplingParams) -> Iterator[int]:
        """Sample one rollout of one prompt and yield each token as it comes."""
        with torch.no_grad():
            for tokens, _ in self._steps(prompts, dataclasses.replace(params, group_size=1)):
                yield int(tokens[0])
                if int(tokens[0]) in params.stop_tokens:
                    return

    def _generate_together(self, prompts: Prompts, params: SamplingParams, version: int) -> RolloutBatch:
        num_rows = len(prompts) * params.group_size
        tokens = torch.zeros(num_rows, params.max_new_tokens, dtype=torch.int64)
        logprobs = torch.zeros(num_rows, params.max_new_tokens)
        lengths = torch.zeros(num_rows, dtype=torch.int64)
        stopped = torch.zeros(num_rows, dtype=torch.bool)
        stops = torch.tensor(params.stop_tokens, dtype=torch.int64)
        alive = torch.arange(len(prompts))
        steps = self._steps(prompts, params)
        outcome = next(steps)
        for position in range(params.max_new_tokens):
            rows = (alive.unsqueeze(1) * params.group_size + torch.arange(params.group_size)).flatten()
            new_tokens, new_logprobs = (part.cpu() for part in outcome)
            open_rows = ~stopped[rows]
            tokens[rows, position] = torch.where(open_rows, new_tokens, 0)
            logprobs[rows, position] = torch.where(open_rows, new_logprobs, 0.0)
            lengths[rows] += open_rows.long()
            stopped[rows] |= torch.isin(new_tokens, stops)
            unfinished = ~stopped.view(len(prompts), params.group_size).all(1)[alive]
            if position + 1 == params.max_new_tokens or not unfinished.any():
                break
            # Dropping groups copies the cache, so it must be worth it.
            drop = unfinished.float().mean() < 0.75
            kept = torch.nonzero(unfinished).flatten() if drop else None
            outcome = steps.send(kept)
            alive = alive if kept is None else alive[kept]
        steps.close()
        return _assemble(prompts, params, version, tokens, logprobs, lengths, stopped)

    def _steps(self, prompts: Prompts, params: SamplingParams):
        """Yield (tokens, logprobs) of all rows for one position after the other; send prompts to keep.

        Raises:
            NotFiniteError: a logit is NaN or infinite; the rollout is named.
        """
        device = self.model.device
        prefill = PrefillRows(prompts.offsets, device)
        states = self._backbone(prompts.tokens.to(device), prefill)
        last = states.index_select(0, (prompts.offsets[1:] - 1).to(device))
        logits = self._logits(last).repeat_interleave(params.group_size, dim=0)
        cache = DecodeRows(prefill, prompts.offsets, params.group_size, params.max_new_tokens)
        keys = rollout_keys(
            params.seed,
            prompts.prompt_index.repeat_interleave(params.group_size),
            torch.arange(params.group_size).repeat(len(prompts)),
        ).to(device)
        rollouts = torch.arange(len(keys))
        for position in range(params.max_new_tokens):
            draws = sample(logits, Rules.of([params] * len(keys), device), uniform(keys, position))
            tokens, logprobs = draws.tokens, draws.logprobs
            if bool(logprobs.isnan().any()):
                prompt, sample_index = divmod(int(rollouts[logprobs.cpu().isnan()][0]), params.group_size)
                raise NotFiniteError(
                    f"the logits are not finite for token {position} of the response of "
                    f"prompt {int(prompts.prompt_index[prompt])} sample {sample_index}"
                )
            self._tick()
            kept = yield tokens, logprobs
            if kept is not None:
                cache.keep(kept.to(device))
                rows = (kept.unsqueeze(1) * params.group_size + torch.arange(params.group_size)).flatten()
                rollouts = rollouts[rows]
                tokens, keys = tokens[rows.to(device)], keys[rows.to(device)]
            logits = self._logits(self._backbone(tokens, cache))
            cache.num_decoded += 1

    def _backbone(self, tokens: Tensor, rows: PrefillRows | DecodeRows) -> Tensor:
        """[T] -> [T, E]."""
        output = self.model.base_model(
            input_ids=tokens.unsqueeze(0), position_ids=rows.position_ids, use_cache=False, rows=rows
        )
        return output.last_hidden_state.squeeze(0)

    def _logits(self, states: Tensor) -> Tensor:
        return soft_capped(lm_head(self.model)(states), logit_softcap(self.model.config))


def _nothing() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    none = torch.zeros(0, dtype=torch.int64)
    return none.view(0, 0), torch.zeros(0, 0), none, none.bool()


def _assemble(
    prompts: Prompts,
    params: SamplingParams,
    version: int,
    tokens: Tensor,
    logprobs: Tensor,
    lengths: Tensor,
    stopped: Tensor,
) -> RolloutBatch:
    """Join prompts with their rectangular responses [B, L] into ragged rows."""
    group_size, num_rows = params.group_size, len(lengths)
    repeated = prompts.rows(torch.arange(len(prompts)).repeat_interleave(group_size))
    in_response = torch.arange(tokens.shape[1]) < lengths.unsqueeze(1)
    offsets = offsets_from_lengths(repeated.lengths + lengths)
    row_of_token = torch.repeat_interleave(torch.arange(num_rows), offsets[1:] - offsets[:-1])
    within = torch.arange(int(offsets[-1])) - offsets[row_of_token]
    loss_mask = within >= repeated.lengths[row_of_token]
    all_tokens = torch.empty(int(offsets[-1]), dtype=torch.int64)
    all_tokens[~loss_mask] = repeated.tokens
    all_tokens[loss_mask] = tokens[in_response]
    all_logprobs = torch.zeros(int(offsets[-1]))
    all_logprobs[loss_mask] = logprobs[in_response]
    return RolloutBatch(
        offsets=offsets,
        tokens=all_tokens,
        loss_mask=loss_mask,
        rollout_logprobs=all_logprobs,
        prompt_index=repeated.prompt_index,
        sample_index=torch.arange(group_size).repeat(len(prompts)),
        versions=torch.full((num_rows,), version),
        truncated=~stopped,
    )
