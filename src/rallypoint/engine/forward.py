"""The forward pass over packed rows: what a policy and a critic say of trained tokens, and a reward model of rows."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn
from torch.nn import functional

from rallypoint.algorithms import TokenOutputs
from rallypoint.engine.token_stream import Stream, whole_rows
from rallypoint.errors import ModelError
from rallypoint.models import ModelShard, lm_head, value_head
from rallypoint.models.head import head_outputs, logit_softcap
from rallypoint.models.tensor_parallel import VocabParallelLinear, vocab_parallel_outputs
from rallypoint.types import Sequences


def policy_outputs(shard: ModelShard, batch: Sequences, positions: Tensor, temperature: float) -> TokenOutputs:
    """Return logprobs and entropies of the tokens at some positions, at a sampling temperature.

    The ranks along `sp` share the work, and each returns all numbers.

    Raises:
        ModelError: the head is not one matrix product, and would be computed wrongly.
    """
    model = shard.model
    head, softcap = lm_head(model), logit_softcap(model.config)
    # A subclass may do more than multiply by its weight.
    if type(head) is not nn.Linear and not isinstance(head, VocabParallelLinear):
        raise ModelError(f"{type(model).__name__} has a {type(head).__name__} for its head; expected a plain nn.Linear")
    stream = Stream(shard, batch, positions)
    states, targets = stream.states(), stream.targets()
    if isinstance(head, VocabParallelLinear):
        logprobs, entropy = vocab_parallel_outputs(states, head, targets, temperature, softcap=softcap)
    else:
        logprobs, entropy = head_outputs(states, head.weight, head.bias, targets, temperature, softcap=softcap)
    return TokenOutputs(stream.join(logprobs), stream.join(entropy))


def critic_values(shard: ModelShard, batch: Sequences, positions: Tensor) -> Tensor:
    """Return the value of the state in which each token was chosen: [N] float32 (float64 of a float64 model).

    The ranks along `sp` share the work, and each returns all numbers.
    """
    stream = Stream(shard, batch, positions)
    return stream.join(_one_number(shard, stream.states()))


def scored_tokens(batch: Sequences, padding: int | None) -> Sequences:
    """Return some rows with the one token of each marked as trained that a reward model scores it at.

    As in transformers, that is the last one that is not its padding: behind a response there may be one that ends it,
    and it is padding to many models. A row of nothing else keeps its last token.

    >>> batch = Sequences(
    ...     offsets=torch.tensor([0, 3, 6]), tokens=torch.tensor([5, 6, 0, 5, 0, 7]),
    ...     loss_mask=torch.ones(6, dtype=torch.bool),
    ...     prompt_index=torch.zeros(2, dtype=torch.int64), sample_index=torch.arange(2),
    ... )
    >>> scored_tokens(batch, padding=0).loss_mask.nonzero().flatten()
    tensor([1, 5])

    Args:
        batch: rows of two tokens or more.
        padding: id that the model's config has for it, if it has one.
    """
    rows = batch.row_of_token
    within = torch.arange(batch.num_tokens) - batch.offsets[:-1][rows]
    counts = (within > 0) & (batch.tokens != (-1 if padding is None else padding))
    last = batch.offsets[:-1].scatter_reduce(0, rows[counts], counts.nonzero().flatten(), "amax")
    last = torch.where(last > batch.offsets[:-1], last, batch.offsets[1:] - 1)
    mask = torch.zeros(batch.num_tokens, dtype=torch.bool)
    mask[last[batch.lengths > 0]] = True
    return dataclasses.replace(batch, loss_mask=mask)


def reward_scores(shard: ModelShard, batch: Sequences, positions: Tensor) -> Tensor:
    """Return a reward model's score of rows up to and with the token at each position: [N], as `critic_values`.

    The ranks along `sp` share the work, and each returns all numbers.
    """
    stream = Stream(shard, batch, positions, whole_rows)
    return stream.join(_one_number(shard, stream.states()))


def _one_number(shard: ModelShard, states: Tensor) -> Tensor:
    """Return what the head of a critic or reward model says of states, [N, E]: [N] float32 at least.

    In bfloat16 values and scores that are less than a percent apart would be the same one.
    """
    head, exact = value_head(shard.model), torch.promote_types(states.dtype, torch.float32)
    if type(head) is not nn.Linear:  # a subclass may do more than multiply by its weight
        return head(states).to(exact).squeeze(-1)
    bias = None if head.bias is None else head.bias.to(exact)
    return functional.linear(states.to(exact), head.weight.to(exact), bias).squeeze(-1)
