"""The forward pass over packed rows: what a policy and a critic say of the trained tokens."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn

from rallypoint.engine.stream import Stream
from rallypoint.errors import ModelError
from rallypoint.models import ModelShard, lm_head, value_head
from rallypoint.models.families import logit_softcap
from rallypoint.models.head import head_outputs
from rallypoint.models.vocab_parallel import VocabParallelLinear, vocab_parallel_outputs
from rallypoint.types import Sequences


@dataclasses.dataclass(frozen=True, slots=True)
class TokenOutputs:
    """What a policy says of the trained tokens of some rows; N is their number, in order."""

    logprobs: Tensor
    """[N] float32 (float64 of a float64 model), at the temperature of the rollouts."""
    entropy: Tensor
    """[N], likewise; in nats, of the distribution that the token was drawn from."""


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
    values = value_head(shard.model)(stream.states()).squeeze(-1)
    return stream.join(values.to(torch.promote_types(values.dtype, torch.float32)))
