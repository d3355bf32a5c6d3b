"""Attention of single tokens over blocks of keys and values, in bags: two large operations for all of them.

A block holds its keys number by number: a row of that table is one number of all its tokens, and the scores of a block
are the sum of D such rows, weighted by the numbers of the query. An output is the sum of the values of all tokens,
weighted by their shares. Both are bags of rows, which torch sums up where they lie, in one call for all queries, heads
and blocks (`torch.embedding_bag`). Nothing is copied, and the bits of a bag do not depend on other bags. In between is
a softmax over rectangles: queries with about as many blocks form a class, whose shorter ones are padded.

    blocks of a     P0 P1 R4          scores     a: P0 P1 R4 --    b: P0 P1 R5 R6           bags of D, a block each
    blocks of b     P0 P1 R5 R6       outputs    a: P0 P1 R4 --    b: P0 P1 R5 R6           a bag for a query each

Here are also whole steps of a plain decoder that work on bags. What Python does between two steps of a small model
takes as long as half a step, and none of it changes the next token, unless sampling depends on earlier tokens. So all
of this runs as TorchScript, see `rallypoint.cpu.script`.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from rallypoint.generation.native.decoder import Linear, Network, after_attention, before_attention, enter, linear, norm
from rallypoint.generation.sampler import SamplingMetadata, sample_tokens
from rallypoint.models.head import soft_capped
from rallypoint.models.sinks import softmax_with_sinks


class Bags(NamedTuple):
    """What B tokens attend to, and where their own keys and values go."""

    tokens: Tensor
    """[B] int64."""
    position_ids: Tensor
    """[1, B] int64."""
    keys: Tensor
    """[layers, blocks, K, D, tokens]: those of the cache."""
    key_numbers: Tensor
    """The same memory, as int16 if a number has two bytes: CPUs write half precision slowly, and integers fast."""
    values: Tensor
    """[layers, blocks, K, tokens, D]: those of the cache."""
    key_places: Tensor
    """[B * K * D] int64: where numbers are written to, in a layer's keys."""
    value_places: Tensor
    """[B * K] int64: where rows of D numbers are written to, in a layer's values."""
    asked: Tensor
    """[slots] int64: for each slot, one block of one head of one query, that head among those of all queries. The slots
    are in the order in which their keys lie in memory, which is faster to read."""
    key_rows: Tensor
    """[slots * D] int32, of a layer's keys."""
    key_bags: Tensor
    """[slots] int32: where in `key_rows` each begins."""
    scored: Tensor
    """[slots] int64: where among those of `asked` is each slot in the order of the queries, as all below are."""
    value_rows: Tensor
    """[slots * tokens] int32, of a layer's values."""
    value_bags: Tensor
    """[B * H] int32: where in `value_rows` each begins."""
    bias: Tensor
    """[slots, tokens]: -inf where a query may not attend, else 0."""
    classes: list[tuple[int, int, int]]
    """First slot, end, and number of heads of queries that have as many slots."""
    back: Tensor | None
    """[B] int64: index of the output of each query; None if they are in order."""


class Moves(NamedTuple):
    """How bags that were laid out for several steps change from each of them to the next."""

    places: list[Tensor]
    """Places in `Bags` and below, [B * n] each, those of a token side by side."""
    distances: list[Tensor]
    """How far each of them moves, [moves, B, 1]."""
    newest: Tensor
    """Index of the newest token in the bias of `Bags`, for each head: it is attended to, too."""


def advance(bags: Bags, moves: Moves, number: int, tokens: Tensor) -> None:
    """Go on to the next token of every row, [B] int64, by the move of this number, counted from 0."""
    bags.tokens.copy_(tokens)
    bags.position_ids.add_(1)
    for places, distances in zip(moves.places, moves.distances):  # noqa: B905 - TorchScript knows no `strict`
        places.view(tokens.shape[0], -1).add_(distances[number])
    bags.bias.view(-1).index_fill_(0, moves.newest, 0.0)


def write(
    numbers: Tensor, values: Tensor, key_places: Tensor, value_places: Tensor, key: Tensor, value: Tensor
) -> None:
    """Store keys and values of T tokens, [T, K, D] both, in those of one layer; see `Bags`."""
    flat = key.reshape(-1)
    if key.dtype != numbers.dtype:
        flat = torch.view_copy(flat, dtype=torch.int16)
    numbers.view(-1).scatter_(0, key_places, flat)
    dim = value.shape[-1]
    values.view(-1, dim).index_copy_(0, value_places, value.reshape(-1, dim))


def attend(
    bags: Bags,
    layer: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float,
    softcap: float | None,
    bias: Tensor,
    sinks: Tensor | None,
) -> Tensor:
    """Store keys and values of a layer, and return the attention: [B, H, D], [B, K, D] twice -> [B, H * D]."""
    keys, values, dim = bags.keys[layer], bags.values[layer], query.shape[2]
    write(bags.key_numbers[layer], values, bags.key_places, bags.value_places, key, value)
    asked = query.reshape(-1, dim).index_select(0, bags.asked)
    scores = _sums(keys.view(-1, keys.shape[-1]), bags.key_rows, bags.key_bags, asked).index_select(0, bags.scored)
    if softcap is None:
        scores = torch.add(bias, scores, alpha=scaling)
    else:
        scores = soft_capped(scores.mul_(scaling), softcap).add_(bias)
    shares = torch.empty_like(scores)
    for start, stop, num in bags.classes:
        rows = scores[start:stop].view(num, -1)
        if sinks is None:
            torch.softmax(rows, -1, out=shares[start:stop].view(num, -1))
        else:
            of_rows = sinks.repeat(num // sinks.shape[0]).unsqueeze(1)
            shares[start:stop] = softmax_with_sinks(rows, of_rows).view(stop - start, -1)
    out = _sums(values.view(-1, dim), bags.value_rows, bags.value_bags, shares).view(query.shape[0], -1)
    back = bags.back
    return out if back is None else out.index_select(0, back)


def _sums(table: Tensor, rows: Tensor, bags: Tensor, weights: Tensor) -> Tensor:
    """Return weighted sums of rows of a table; `bags` says where the rows of each begin: [bags, numbers of a row]."""
    return torch.embedding_bag(table, rows, bags, False, 0, False, weights.view(-1))[0]


def decode(network: Network, bags: Bags) -> Tensor:
    """Send one token of each row through a network: its last hidden states, [B, E]."""
    states, cos, sin = enter(network, bags.tokens, bags.position_ids)
    for index, layer in enumerate(network.layers):
        turned, value = before_attention(network, layer, states, cos, sin)
        query, key = turned[:, : network.num_heads], turned[:, network.num_heads :]
        attended = attend(bags, index, query, key, value, network.scaling, None, bags.bias, None)
        states = after_attention(network, layer, states, attended)
    return norm(states, network.norm, network.eps)


def decode_steps(
    network: Network,
    head: Linear,
    bags: Bags,
    moves: Moves,
    num_moves: int,
    sampling: SamplingMetadata,
    numbers: Tensor,
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Sample some tokens of each row; return the fields of `SampledTokens`, for each step.

    Args:
        network: without its head.
        head: the layer after it.
        bags: what the rows attend to now, padded with the last row; they are advanced as long as there are moves.
        moves: of the bags, from step to step.
        num_moves: moves that have been made.
        sampling: of the rows.
        numbers: [steps, B] float64 in [0, 1).
    """
    tokens: list[Tensor] = []
    logprobs: list[Tensor] = []
    sampled_logprobs: list[Tensor] = []
    num_rows = numbers.shape[1]
    num_padding = bags.tokens.shape[0] - num_rows
    for step in range(numbers.shape[0]):
        logits = linear(head, decode(network, bags))[:num_rows]
        drawn, logprob, sampled_logprob = sample_tokens(logits, sampling, numbers[step], None)
        tokens.append(drawn)
        logprobs.append(logprob)
        sampled_logprobs.append(sampled_logprob)
        if num_moves + step < moves.distances[0].shape[0]:
            advance(bags, moves, num_moves + step, torch.cat([drawn, drawn[-1:].expand(num_padding)]))
    return tokens, logprobs, sampled_logprobs
