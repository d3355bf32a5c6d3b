"""Causal attention as batched matrix products of blocks of queries with the keys that they see.

Owns: the blocks, and the products with their gradients. Must not know: rows, or which head a sequence belongs to. Keys
that no query of a block sees are not multiplied. The queries of a block are contiguous over all sequences of a batch,
so that products and softmaxes read and write them in one piece:

    keys and values     [N sequences, L tokens]
    queries             [N, first block]  [N, second block]  ...
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rallypoint.config.limits import QUERIES_PER_BLOCK, QUERIES_PER_BLOCK_IN_HALF
from rallypoint.models.sinks import softmax_with_sinks

_ALIGNMENT = 32


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """Limits of attention in some families: which tokens are seen, how large scores become, and what takes a share."""

    window: int | None = None
    """Number of tokens that each sees, itself included; None for all before it."""
    softcap: float | None = None
    """Bound of the scores s, which become softcap * tanh(s / softcap) (Gemma 2, arXiv 2408.00118)."""
    sinks: Tensor | None = None
    """[H] scores of one more key for each head, which all queries see, and whose value is zero; see
    `rallypoint.models.sinks`."""


NO_LIMITS = Limits()


@dataclasses.dataclass(frozen=True, slots=True)
class QueryBlock:
    """Queries that are multiplied together."""

    num_rows: int
    """Number of queries, per sequence."""
    keys: slice
    """Keys that at least one of the queries sees."""
    mask: Tensor
    """Mask added to the scores, [queries, keys]: -inf where a query does not see a key, else 0."""


@dataclasses.dataclass(frozen=True, slots=True)
class SequenceBatch:
    """N sequences of L tokens, and the blocks of their queries, which may begin after the first token."""

    size: int
    """N."""
    length: int
    """L."""
    blocks: Sequence[QueryBlock]


def tokens_per_block(length: int, itemsize: int) -> int:
    """Return the number of tokens in a block; the last block of a sequence may have fewer.

    >>> [tokens_per_block(length, itemsize=2) for length in (50, 128, 160, 500)]
    [64, 64, 96, 192]

    Args:
        length: tokens of the sequence.
        itemsize: bytes of a number.
    """
    if itemsize > 2:
        return QUERIES_PER_BLOCK
    half = -(-length // (2 * _ALIGNMENT)) * _ALIGNMENT
    return min(max(half, QUERIES_PER_BLOCK), QUERIES_PER_BLOCK_IN_HALF)


def cut_blocks(length: int, share: int, window: int | None, like: Tensor, first: int = 0) -> list[QueryBlock]:
    """Cut the queries of a sequence into blocks.

    >>> [(block.num_rows, block.keys) for block in cut_blocks(100, 2, None, torch.zeros(1))]
    [(128, slice(0, 64, None)), (72, slice(0, 100, None))]
    >>> [block.keys for block in cut_blocks(100, 1, 10, torch.zeros(1))]
    [slice(0, 64, None), slice(55, 100, None)]
    >>> [block.keys for block in cut_blocks(100, 1, None, torch.zeros(1), first=96)]
    [slice(0, 100, None)]

    Args:
        length: tokens of the sequence.
        share: queries per key/value head and token.
        window: see `Limits`.
        like: tensor with the type and device of the queries.
        first: token of the first query.
    """
    size = tokens_per_block(length, like.itemsize)
    blocks: list[QueryBlock] = []
    for start in range(first, length, size):
        stop = min(start + size, length)
        keys = slice(0 if window is None else max(0, start - window + 1), stop)
        hidden = like.new_full((stop - start, stop - keys.start), float("-inf"))
        mask = hidden.triu(start - keys.start + 1)
        if window is not None:
            mask += hidden.tril(start - keys.start - window)
        blocks.append(QueryBlock((stop - start) * share, keys, mask.repeat_interleave(share, 0)))
    return blocks


_Gradients: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor | None, None, None, None]


class CausalProducts(torch.autograd.Function):
    """Attention over batches of sequences that are concatenated.

    Keys and values are [sum of N * L, D]; queries, in block order, [sum of N * L * share, D] or fewer, and their sinks,
    if there are any, [as many, 1].
    """

    @staticmethod
    def forward(  # noqa: D102 - torch's own name
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        batches: Sequence[SequenceBatch],
        scaling: float,
        softcap: float | None,
    ) -> Tensor:
        out = torch.empty_like(query)
        shares: list[Tensor] = []
        sequences, cut = _sequences(batches, key, value), _blocks(batches, query, out, *_given(sinks))
        for batch, (k, v), blocks in zip(batches, sequences, cut, strict=True):
            for block, (q, o, *sink) in zip(batch.blocks, blocks, strict=True):
                keys = k[:, block.keys].transpose(1, 2)
                if softcap is None:
                    scores = torch.baddbmm(block.mask, q, keys, alpha=scaling)
                else:
                    capped = (q @ keys).mul_(scaling / softcap).tanh_()
                    scores = torch.add(block.mask, capped, alpha=softcap)
                shares.append(softmax_with_sinks(scores, sink[0] if sink else None))
                torch.bmm(shares[-1], v[:, block.keys], out=o)
        ctx.save_for_backward(query, key, value, *shares)
        ctx.batches, ctx.scaling, ctx.softcap, ctx.has_sinks = batches, scaling, softcap, sinks is not None
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> _Gradients:  # noqa: D102  # pyright: ignore[reportIncompatibleMethodOverride] - torch passes one gradient per output
        query, key, value, *shares = ctx.saved_tensors
        grad_query, grad_key, grad_value = (torch.empty_like(states) for states in (query, key, value))
        grad_sinks = query.new_empty(len(query), 1) if ctx.has_sinks else None
        sequences = _sequences(ctx.batches, key, value, grad_key, grad_value)
        cut = _blocks(ctx.batches, query, grad.contiguous(), grad_query, *_given(grad_sinks))
        # Last block first: it sees all keys of a sequence.
        for batch, (k, v, grad_k, grad_v), blocks in reversed(list(zip(ctx.batches, sequences, cut, strict=True))):
            sum_k, sum_v = (_Sum(total, len(blocks)) for total in (grad_k, grad_v))
            for block, (q, g, grad_q, *grad_sink) in reversed(list(zip(batch.blocks, blocks, strict=True))):
                keys, share = block.keys, shares.pop()
                # The scaling of the scores is applied here: all that follows is linear in it.
                grad_share = torch.baddbmm(block.mask, g, v[:, keys].transpose(1, 2), beta=0.0, alpha=ctx.scaling)
                for total in grad_sink:  # its share is what the others leave, and its value is zero
                    mean = (grad_share * share).sum(-1, keepdim=True)
                    total.copy_(mean * (share.sum(-1, keepdim=True) - 1) / ctx.scaling)
                grad_scores = torch.ops.aten._softmax_backward_data.out(
                    grad_share, share, -1, share.dtype, grad_input=grad_share
                )
                if ctx.softcap is not None:  # d tanh(x) / d x = 1 - tanh(x)^2; recomputed
                    capped = (q @ k[:, keys].transpose(1, 2)).mul_(ctx.scaling / ctx.softcap).tanh_()
                    grad_scores = torch.addcmul(grad_scores, grad_scores, capped.square_(), value=-1)
                torch.bmm(grad_scores, k[:, keys], out=grad_q)
                sum_k.add_product(keys, grad_scores.transpose(1, 2), q)
                sum_v.add_product(keys, share.transpose(1, 2), g)
            sum_k.finish()
            sum_v.finish()
        return grad_query, grad_key, grad_value, grad_sinks, None, None, None


def _given(states: Tensor | None) -> list[Tensor]:
    return [] if states is None else [states]


class _Sum:
    """The gradient of the keys or values of a batch, to which every block adds its part."""

    def __init__(self, total: Tensor, num_blocks: int) -> None:
        # A sum of up to two products loses nothing by half precision that its terms do not; a longer one does.
        dtype = torch.promote_types(total.dtype, torch.float32) if num_blocks > 2 else total.dtype
        self._total = total
        self._sum = total if dtype == total.dtype else torch.empty_like(total, dtype=dtype)
        self._is_begun = False

    def add_product(self, keys: slice, left: Tensor, right: Tensor) -> None:
        """Add products to the gradient of some keys: [N, keys, rows] @ [N, rows, D]."""
        if not self._is_begun and keys == slice(0, self._sum.shape[1]):
            if self._sum.dtype == left.dtype:
                torch.bmm(left, right, out=self._sum)
            else:
                self._sum.copy_(left @ right)
        else:
            self._sum = self._sum if self._is_begun else self._sum.zero_()
            self._sum[:, keys] += left @ right
        self._is_begun = True

    def finish(self) -> None:
        """Write the sum to the gradient."""
        if self._sum is not self._total:
            self._total.copy_(self._sum)


def _sequences(batches: Sequence[SequenceBatch], *states: Tensor) -> Iterator[list[Tensor]]:
    """Yield the keys or values of each batch: [N, L, D]."""
    sizes = [batch.size * batch.length for batch in batches]
    for batch, *parts in zip(batches, *(part.split(sizes) for part in states), strict=True):
        yield [part.view(batch.size, batch.length, part.shape[-1]) for part in parts]


def _blocks(batches: Sequence[SequenceBatch], *states: Tensor) -> Iterator[list[list[Tensor]]]:
    """Yield the blocks of queries of each batch, or of tensors of that shape: [N, rows, D]."""
    sizes = [batch.size * block.num_rows for batch in batches for block in batch.blocks]
    parts = zip(*(part.split(sizes) for part in states), strict=True)
    for batch in batches:
        yield [
            [part.view(batch.size, block.num_rows, part.shape[-1]) for part in next(parts)] for block in batch.blocks
        ]
