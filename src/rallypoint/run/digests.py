"""Digests of what a step trained on: runs that are compared part where the first of them differs."""

from __future__ import annotations

import torch
import xxhash
from torch import Tensor

from rallypoint.run.rollouts import StepRollouts
from rallypoint.types import ActorBatch, Sequences


def digests_of(rollouts: StepRollouts | None, learned: Sequences | None) -> dict[str, str]:
    """Return a digest of each part of a step's batch, in the order in which the parts come to be.

    Args:
        rollouts: what was sampled; None in a step that trains on files.
        learned: what the actor learned from.
    """
    parts: dict[str, tuple[Tensor, ...]] = {}
    rows = learned if rollouts is None else rollouts.rows
    if rows is not None:
        place = torch.arange(rows.num_tokens) - rows.offsets[:-1][rows.row_of_token]
        is_prompt = place < rows.num_prompt_tokens[rows.row_of_token]
        parts["prompts"] = (rows.prompt_index, rows.tokens[is_prompt])
        parts["tokens"] = (rows.tokens, rows.loss_mask)
    if rollouts is not None:
        parts["logprobs"] = (rollouts.rows.rollout_logprobs,)
        parts["scores"] = (rollouts.scored.batch.token_rewards,)
    if isinstance(learned, ActorBatch):
        parts["advantages"] = (learned.advantages,)
    return {name: _digest(tensors) for name, tensors in parts.items()}


def _digest(tensors: tuple[Tensor, ...]) -> str:
    found = xxhash.xxh3_64()
    for tensor in tensors:
        found.update(tensor.contiguous().view(torch.uint8).numpy().data)
    return found.hexdigest()
