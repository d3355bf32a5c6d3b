"""Rows dealt out to the ranks of a role, balanced by cost; results come back in the caller's order.

Owns: which rank gets which rows. Invariant: only time depends on it, because results are put back in order, and a loss
is a sum over a global denominator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Concatenate, TypeVar

import torch
from torch import Tensor

from rallypoint.cluster import WorkerGroup
from rallypoint.data.packing import balance_groups, row_costs
from rallypoint.engine import TrainingEngine, likeliest_tokens, policy_outputs
from rallypoint.types import PerToken, PolicySequences, Sequences

WorkerT = TypeVar("WorkerT")
BatchT = TypeVar("BatchT", bound=Sequences)


def deal(batch: BatchT, num_parts: int, attention_cost: float) -> tuple[list[BatchT], Tensor]:
    """Cut a batch into parts of equal cost, with a row for each sequence; a part may be empty.

    Rows of a prompt stay together where that is cheaper: the prompt is computed once for all rows of a part.

    Args:
        batch: any rows.
        num_parts: of ranks that get different rows.
        attention_cost: see `row_costs`.

    Returns:
        The parts, and where each sequence of the batch stands when they are joined.
    """
    batch = batch.by_sequence()
    costs = row_costs(batch.lengths.tolist(), attention_cost)
    shared = batch.num_prompt_tokens.tolist()
    dealt = balance_groups(costs, batch.prompt_index.tolist(), shared, num_parts, whole=batch.rows_together > 1)
    order = torch.tensor([row for rows in dealt for row in rows], dtype=torch.int64)
    return [batch.rows(rows) for rows in dealt], order.argsort()


def logprobs_of(engine: TrainingEngine[Any], parts: list[Sequences], temperature: float) -> list[PerToken]:
    """Return the log-probability that a rank's model gives every trained token."""
    return [
        engine.evaluate(part, lambda rows, at: policy_outputs(engine.shard, rows, at, temperature).logprobs)
        for part in parts
    ]


def likeliest_of(engine: TrainingEngine[Any], parts: list[Sequences], temperature: float, num: int) -> list[PerToken]:
    """Return what a rank's model might have said in place of every trained token, see `likeliest_tokens`."""
    return [
        engine.evaluate(part, lambda rows, at: likeliest_tokens(engine.shard, rows, at, temperature, num), 1 + 2 * num)
        for part in parts
    ]


async def per_token(
    group: WorkerGroup[WorkerT],
    method: Callable[Concatenate[WorkerT, list[Sequences], ...], list[PerToken]],
    batch: Sequences,
    attention_cost: float,
    *args: object,
    replays: bool = False,
) -> Tensor:
    """Have the ranks of a group compute numbers for every token of a batch: [T, ...] float32, in the batch's own order.

    Args:
        group: whose ranks.
        method: a sharded one, that takes parts of a batch and returns as many.
        batch: any rows; only what a forward pass needs is sent.
        attention_cost: see `row_costs`.
        *args: further arguments of the method, the same for all ranks.
        replays: whether the group is the policy, which sends tokens to the experts that its sampler chose.
    """
    parts, place = deal(batch.widen(PolicySequences if replays else Sequences), group.mesh.num_parts, attention_cost)
    return PerToken.join(await group.retried(lambda: group.call(method, parts, *args))).rows(place).values
