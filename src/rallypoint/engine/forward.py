"""The forward pass over packed rows, and the one place where positions are shifted by one.

The hidden state at position t predicts token t + 1. Carriers speak of the token itself (`logprobs[t]`
is about token t), so what a pass computes at `source = target - 1` is stored at `target`.

    position          0     1     2     3
    tokens            5     6     7     8
    loss_mask         F     F     T     T       target = [2, 3]
    hidden state      h0    h1    h2    -       source = [1, 2]: h1 chose token 7, h2 chose token 8

Nobody asks for the state of a row's last token: nothing of the row comes after it.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn
from torch.nn import functional

from rallypoint.errors import ModelError
from rallypoint.models import ModelShard, PackedRows, SharedPrefixes, lm_head, value_head
from rallypoint.models.families import logit_softcap
from rallypoint.models.head import head_outputs
from rallypoint.models.prefix import pick
from rallypoint.models.ulysses import SequenceParallelRows, TokenSlice
from rallypoint.models.vocab_parallel import VocabParallelLinear, vocab_parallel_outputs
from rallypoint.types import Sequences


@dataclasses.dataclass(frozen=True, slots=True)
class TokenOutputs:
    """What a policy says of the trained tokens of some rows; N is their number, in order."""

    logprobs: Tensor
    """[N] float32 (float64 of a float64 model), at the temperature of the rollouts."""
    entropy: Tensor
    """[N], likewise; in nats, of the distribution that the token was drawn from."""


def trained_positions(batch: Sequences) -> Tensor:
    """Return the positions of the trained tokens in the stream: [N] int64.

    Raises:
        ValueError: the first token of a row is marked as trained; nothing precedes it.
    """
    firsts = batch.offsets[:-1][batch.lengths > 0]
    if bool(batch.loss_mask[firsts].any()):
        raise ValueError("loss_mask is True for the first token of a row, which no state has chosen")
    return torch.nonzero(batch.loss_mask).flatten()


def choosing_tokens(batch: Sequences, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the rows without their last tokens, as offsets and tokens, and where in these each position was chosen.

    >>> batch = Sequences(
    ...     offsets=torch.tensor([0, 3, 3, 5]), tokens=torch.tensor([5, 6, 7, 8, 9]),
    ...     loss_mask=torch.tensor([False, False, True, False, True]),
    ...     prompt_index=torch.zeros(3, dtype=torch.int64), sample_index=torch.arange(3),
    ... )
    >>> choosing_tokens(batch, torch.tensor([2, 4]))
    (tensor([0, 2, 2, 3]), tensor([5, 6, 8]), tensor([1, 2]))
    """
    has_tokens = batch.lengths > 0
    chooses = torch.ones(batch.num_tokens, dtype=torch.bool)
    chooses[batch.offsets[1:][has_tokens] - 1] = False
    num_last = functional.pad(has_tokens.cumsum(0), (1, 0))
    return batch.offsets - num_last, batch.tokens[chooses], positions - 1 - num_last[batch.row_of_token[positions]]


def hidden_states(shard: ModelShard, batch: Sequences, positions: Tensor) -> Tensor:
    """Run the backbone over a packed stream and return the states that chose some tokens: [N, E].

    What rows of a group begin with is computed once, and their last tokens, which choose nothing, not at all. Of the
    ranks along `sp`, which share the stream, each returns the states of its own slice of the positions; they do compute
    every token of every row.
    """
    model, sp = shard.model, shard.mesh.sp
    device = model.device
    if sp.size == 1:
        offsets, tokens, sources = choosing_tokens(batch, positions)
        offsets, tokens = TokenSlice.of(len(tokens), sources, sp).filled(offsets, tokens)
        filler = len(offsets) - len(batch.offsets)
        shared = SharedPrefixes.of(offsets, tokens, functional.pad(batch.prompt_index, (0, filler), value=-1))
        rows, tokens, sources = PackedRows(offsets, device, shared), tokens[shared.kept], shared.place[sources]
    else:
        part = TokenSlice.of(batch.num_tokens, positions - 1, sp)
        offsets, tokens = part.filled(batch.offsets, batch.tokens)
        sources = positions[part.positions] - 1
        rows = SequenceParallelRows(offsets, device, part)
        tokens, sources = tokens[part.tokens], sources - part.tokens.start
    output = model.base_model(
        input_ids=tokens.to(device).unsqueeze(0),
        position_ids=rows.position_ids,
        use_cache=False,
        rows=rows,
    )
    return pick(output.last_hidden_state.squeeze(0), sources)


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
    part = TokenSlice.of(batch.num_tokens, positions - 1, shard.mesh.sp)
    states = hidden_states(shard, batch, positions)
    targets = batch.tokens[positions[part.positions]].to(states.device)
    if isinstance(head, VocabParallelLinear):
        logprobs, entropy = vocab_parallel_outputs(states, head, targets, temperature, softcap=softcap)
    else:
        logprobs, entropy = head_outputs(states, head.weight, head.bias, targets, temperature, softcap=softcap)
    return TokenOutputs(part.join(logprobs), part.join(entropy))


def critic_values(shard: ModelShard, batch: Sequences, positions: Tensor) -> Tensor:
    """Return the value of the state in which each token was chosen: [N] float32 (float64 of a float64 model).

    The ranks along `sp` share the work, and each returns all numbers.
    """
    values = value_head(shard.model)(hidden_states(shard, batch, positions)).squeeze(-1)
    values = values.to(torch.promote_types(values.dtype, torch.float32))
    return TokenSlice.of(batch.num_tokens, positions - 1, shard.mesh.sp).join(values)
