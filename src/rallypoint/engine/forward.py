"""The forward pass over packed rows, and the one place where positions are shifted by one.

Owns: which tokens of some rows pass through a model, and what a policy and a critic say of trained tokens and a reward
model of rows. Must not know: losses, optimizers, the batch of a step.

The hidden state at position t predicts token t + 1. Carriers speak of the token itself (`logprobs[t]` is about token
t), so what a pass computes at `source = target - 1` is stored at `target`.

    position          0     1     2     3
    tokens            5     6     7     8
    loss_mask         F     F     T     T       target = [2, 3]
    hidden state      h0    h1    h2    -       source = [1, 2]: h1 chose token 7, h2 chose token 8

The last token of a row chooses nothing and stays out, unless a reward model asks for its state. What the rows of a
group begin with is computed once. Filler takes the place of tokens that stay out where that saves time (`cpu.onednn`).
Ranks along `cp` and `sp` share a stream (see `models.cut_rows`): each has some of its tokens, and answers for what
these choose. All of them call with the same stream and the same positions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from rallypoint.algorithms import TokenOutputs
from rallypoint.cpu.onednn import filled_up
from rallypoint.errors import ModelError
from rallypoint.models import CutRows, Dealt, ModelShard, PackedRows, SharedPrefixes, TokenSlice, lm_head, value_head
from rallypoint.models.head import head_outputs, likeliest, logit_softcap
from rallypoint.models.prefix import pick
from rallypoint.models.tensor_parallel import (
    VocabParallelLinear,
    vocab_parallel_likeliest,
    vocab_parallel_outputs,
)
from rallypoint.parallel.transfer import sent
from rallypoint.types import PolicySequences, Sequences


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


def whole_rows(batch: Sequences, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the rows to their last tokens, as `choosing_tokens` does, and the positions as they are."""
    return batch.offsets, batch.tokens, positions


class TokenStream:
    """The tokens of some rows that this rank sends through a model, and the positions whose states are wanted."""

    def __init__(
        self,
        shard: ModelShard,
        batch: Sequences,
        positions: Tensor,
        asked: Callable[[Sequences, Tensor], tuple[Tensor, Tensor, Tensor]] = choosing_tokens,
    ) -> None:
        """Lay the stream out.

        Args:
            shard: the model, on its device; ranks along `cp` and `sp` have the same rows and positions.
            batch: the rows.
            positions: [N] int64, rising: positions of the tokens in question.
            asked: which tokens pass through, and whose states are returned: by default those that chose the tokens in
                question; with `whole_rows` their own.
        """
        self._model, mesh = shard.model, shard.mesh
        self._most = batch.num_tokens
        offsets, tokens, sources = asked(batch, positions)
        experts = _experts_of(batch)
        shared = SharedPrefixes.of(offsets, tokens, batch.prompt_index, experts)
        dealt = Dealt.of(offsets, shared, self._size(len(shared.kept)), mesh)
        shared = dealt.shared
        tokens, sources = tokens[shared.kept], shared.place[sources]
        # What rows share stands in the first of them, so that a slice's share of the positions is not in one piece.
        self._order = sources.argsort(stable=True)
        self._from_order = sent(self._order.argsort(), self._model.device)
        sources = sources[self._order]
        self._part = TokenSlice.of(dealt.blocks, sources, mesh)
        num_filler = sum(dealt.blocks) - len(tokens)
        rows = PackedRows(offsets, self._model.device, shared, num_filler=num_filler)
        self._rows = rows if mesh.tokens.size == 1 else CutRows(rows, offsets, dealt, self._part)
        # What is not finite in the embedding of a token that is nowhere stays out of gradients.
        filler = tokens[-1:].expand(num_filler) if len(tokens) else tokens.new_zeros(num_filler)
        self._tokens = torch.cat([tokens, filler])[self._part.tokens]
        self._replay: dict[str, Tensor] = {}
        if experts is not None:
            experts = functional.pad(experts[shared.kept], (0, 0, 0, num_filler))[self._part.tokens]
            self._replay = {"experts": sent(experts, self._model.device)}
        self._sources = sources[self._part.positions] - self._part.tokens.start
        self._own = self._order[self._part.positions]
        self._targets = batch.tokens[positions[self._own]]

    def states(self) -> Tensor:
        """Run the backbone, and return the states of this rank's share of the tokens in question: [n, E].

        n may be more than its share; the rest is zero.
        """
        output = self._model.base_model(
            input_ids=sent(self._tokens, self._model.device).unsqueeze(0),
            position_ids=self._rows.position_ids,
            use_cache=False,
            rows=self._rows,
            **self._replay,
        )
        return pick(output.last_hidden_state.squeeze(0), self._sources, self._size(len(self._sources)))

    def targets(self, top_k_tokens: Tensor | None = None) -> Tensor:
        """Return the tokens that `states` chose: [n] int64, with the same filler; [n, 1 + M] with M others of each.

        Args:
            top_k_tokens: [N, M] int64, other tokens in place of those at the positions.
        """
        targets = self._targets
        if top_k_tokens is not None:
            targets = torch.cat([targets.unsqueeze(1), top_k_tokens[self._own]], 1)
        num_filler = self._size(len(targets)) - len(targets)
        return sent(torch.cat([targets, targets.new_zeros(num_filler, *targets.shape[1:])]), self._model.device)

    def join(self, outputs: Tensor) -> Tensor:
        """Return what all ranks computed, [N, ...] in the order of the positions, from [n, ...] of each.

        Every rank has all of it. Backward returns to each the gradient of its own.
        """
        outputs = self._part.join(outputs[: len(self._sources)])
        return outputs[self._from_order]

    def _size(self, num_tokens: int) -> int:
        return filled_up(num_tokens, self._model.dtype, self._model.device, at_most=self._most)


def _experts_of(batch: Sequences) -> Tensor | None:
    """Return the experts to use for all `choosing_tokens`: a token's are recorded at the token after it."""
    if not isinstance(batch, PolicySequences) or batch.experts is None:
        return None
    is_chosen = torch.ones(batch.num_tokens, dtype=torch.bool)
    is_chosen[batch.offsets[:-1][batch.lengths > 0]] = False
    return batch.experts[is_chosen]


def policy_outputs(
    shard: ModelShard, batch: Sequences, positions: Tensor, temperature: float, top_k_tokens: Tensor | None = None
) -> TokenOutputs:
    """Return logprobs and entropies of the tokens at some positions, at a sampling temperature.

    The ranks along `cp` and `sp` share the work, and each returns all numbers.

    Args:
        shard: the model.
        batch: any rows.
        positions: [N] int64, of the tokens.
        temperature: that logits are divided by.
        top_k_tokens: [N, M] int64: other tokens in place of each, whose logprobs are asked for, too.

    Raises:
        ModelError: the head is not one matrix product, and would be computed wrongly.
    """
    head, softcap = _plain_head(shard), logit_softcap(shard.model.config)
    stream = TokenStream(shard, batch, positions)
    states, targets = stream.states(), stream.targets(top_k_tokens)
    if isinstance(head, VocabParallelLinear):
        logprobs, entropy = vocab_parallel_outputs(states, head, targets, temperature, softcap=softcap)
    else:
        logprobs, entropy, _ = head_outputs(states, head.weight, head.bias, targets, temperature, softcap=softcap)
    logprobs, entropy = stream.join(logprobs), stream.join(entropy)
    if top_k_tokens is None:
        return TokenOutputs(logprobs, entropy)
    return TokenOutputs(logprobs[:, 0], entropy, logprobs[:, 1:])


def likeliest_tokens(shard: ModelShard, batch: Sequences, positions: Tensor, temperature: float, num: int) -> Tensor:
    """Return a policy's likeliest tokens at each position, without gradients: [N, 1 + 2 num] float32 at least.

    Of each token at a position: its logprob, the logprobs of the `num` likeliest tokens in its place, and their ids,
    which float32 holds exactly up to 2**24. If the vocabulary has fewer, -inf and 0 fill the rest.
    """
    head, softcap = _plain_head(shard), logit_softcap(shard.model.config)
    stream = TokenStream(shard, batch, positions)
    states, targets = stream.states(), stream.targets()
    if isinstance(head, VocabParallelLinear):
        found = vocab_parallel_likeliest(states, head, targets, temperature, num, softcap=softcap)
    else:
        found = likeliest(states, head.weight, head.bias, targets, temperature, num, softcap=softcap)
    own, most, ids, normaliser = found
    logprobs = torch.cat([own.unsqueeze(1), most], 1) - normaliser.unsqueeze(1)
    return stream.join(torch.cat([logprobs, ids.to(logprobs)], 1))


def _plain_head(shard: ModelShard) -> nn.Linear:
    """Return the head; a subclass of Linear may do more than multiply by its weight."""
    head = lm_head(shard.model)
    if type(head) is not nn.Linear and not isinstance(head, VocabParallelLinear):
        raise ModelError(
            f"{type(shard.model).__name__} has a {type(head).__name__} for its head; expected a plain nn.Linear"
        )
    return head


def critic_values(shard: ModelShard, batch: Sequences, positions: Tensor) -> Tensor:
    """Return the value of the state in which each token was chosen: [N] float32 (float64 of a float64 model).

    The ranks along `cp` and `sp` share the work, and each returns all numbers.
    """
    stream = TokenStream(shard, batch, positions)
    return stream.join(_one_number(shard, stream.states()))


def scored_tokens(batch: Sequences, padding: int | None) -> Sequences:
    """Return some rows with the one token of each marked as trained that a reward model scores it at.

    As in transformers, that is the last one that is not its padding: after a response there may be one that ends it,
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

    The ranks along `cp` and `sp` share the work, and each returns all numbers.
    """
    stream = TokenStream(shard, batch, positions, whole_rows)
    return stream.join(_one_number(shard, stream.states()))


def _one_number(shard: ModelShard, states: Tensor) -> Tensor:
    """Return what the head of a critic or reward model says of states, [N, E]: [N] float32 at least.

    In bfloat16 values and scores that differ by less than a percent would be equal.
    """
    head, exact = value_head(shard.model), torch.promote_types(states.dtype, torch.float32)
    if type(head) is not nn.Linear:  # a subclass may do more than multiply by its weight
        return head(states).to(exact).squeeze(-1)
    bias = None if head.bias is None else head.bias.to(exact)
    return functional.linear(states.to(exact), head.weight.to(exact), bias).squeeze(-1)
