"""Causal attention as batched matrix products of blocks of queries with the keys that they may see.

Owns: the blocks, and the products with their gradients. Must not know: rows, or where a head came from. Keys that no
query of a block sees are never multiplied.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

# Larger blocks multiply more that the mask throws away, smaller ones keep the cores less busy and copy more: products
# take a part of a sequence out of it first. In half precision a copy weighs more beside its product.
_QUERIES_PER_BLOCK = 64
_QUERIES_PER_BLOCK_IN_HALF = 192


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """What layers of some families do to the scores besides scaling them."""

    window: int | None = None
    """A token sees the last `window` ones, itself among them; None: all before it."""
    softcap: float | None = None
    """Scores s become softcap * tanh(s / softcap) (Gemma 2, arXiv 2408.00118)."""


NO_LIMITS = Limits()


@dataclasses.dataclass(frozen=True, slots=True)
class Block:
    """Tokens whose queries are multiplied together."""

    rows: slice
    """Where their queries are."""
    keys: slice
    """Those that at least one of the queries sees."""
    mask: Tensor
    """What is added to the scores, [queries, keys]: -inf where they may not look, else 0."""


@dataclasses.dataclass(frozen=True, slots=True)
class Batch:
    """N sequences of L tokens, and how they are cut."""

    size: int
    """N."""
    length: int
    """L."""
    blocks: Sequence[Block]


def cut_blocks(length: int, share: int, window: int | None, like: Tensor) -> list[Block]:
    """Cut the queries of a sequence into blocks.

    >>> [(block.rows, block.keys) for block in cut_blocks(100, 2, None, torch.zeros(1))]
    [(slice(0, 128, None), slice(0, 64, None)), (slice(128, 200, None), slice(0, 100, None))]
    >>> [block.keys for block in cut_blocks(100, 1, 10, torch.zeros(1))]
    [slice(0, 64, None), slice(55, 100, None)]

    Args:
        length: tokens of the sequence.
        share: queries of a token.
        window: see `Limits`.
        like: of the type and on the device of the queries.
    """
    size = _QUERIES_PER_BLOCK_IN_HALF if like.itemsize == 2 else _QUERIES_PER_BLOCK
    blocks: list[Block] = []
    for start in range(0, length, size):
        stop = min(start + size, length)
        keys = slice(0 if window is None else max(0, start - window + 1), stop)
        hidden = like.new_full((stop - start, stop - keys.start), float("-inf"))
        mask = hidden.triu(start - keys.start + 1)
        if window is not None:
            mask += hidden.tril(start - keys.start - window)
        blocks.append(Block(slice(start * share, stop * share), keys, mask.repeat_interleave(share, 0)))
    return blocks


class _Context(FunctionCtx):
    """What a forward pass leaves for the backward one."""

    saved_tensors: tuple[Tensor, ...]
    batches: Sequence[Batch]
    scaling: float
    softcap: float | None


_Gradients: TypeAlias = tuple[Tensor, Tensor, Tensor, None, None, None]


class CausalProducts(torch.autograd.Function):
    """Attention of batches of sequences that lie behind one another, N of L tokens each.

    Queries are [sum of N * L * share, D], keys and values [sum of N * L, D].
    """

    @staticmethod
    def forward(  # noqa: D102 - torch's own name
        ctx: _Context,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        batches: Sequence[Batch],
        scaling: float,
        softcap: float | None,
    ) -> Tensor:
        out = torch.empty_like(query)
        shares: list[Tensor] = []
        for batch, (q, k, v, o) in zip(batches, _parts(batches, query, key, value, out), strict=True):
            for block in batch.blocks:
                keys = k[:, block.keys].transpose(1, 2)
                if softcap is None:
                    scores = torch.baddbmm(block.mask, q[:, block.rows], keys, alpha=scaling)
                else:
                    capped = (q[:, block.rows] @ keys).mul_(scaling / softcap).tanh_()
                    scores = torch.add(block.mask, capped, alpha=softcap)
                shares.append(scores.softmax(-1))
                _multiply(shares[-1], v[:, block.keys], out=o[:, block.rows])
        ctx.save_for_backward(query, key, value, *shares)
        ctx.batches, ctx.scaling, ctx.softcap = batches, scaling, softcap
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, grad: Tensor) -> _Gradients:  # noqa: D102  # pyright: ignore[reportIncompatibleMethodOverride] - torch passes one gradient per output
        query, key, value, *shares = ctx.saved_tensors
        grads = [torch.empty_like(states) for states in (query, key, value)]
        parts = _parts(ctx.batches, query, key, value, grad.contiguous(), *grads)
        shares.reverse()  # from here on the last is the next
        for batch, (q, k, v, g, grad_q, grad_k, grad_v) in zip(ctx.batches, parts, strict=True):
            # Of keys and values every block has a part, which is not rounded to half precision before it is added.
            dtype = torch.promote_types(k.dtype, torch.float32) if len(batch.blocks) > 1 else k.dtype
            total_k, total_v = (
                (total if dtype == total.dtype else torch.empty_like(total, dtype=dtype)) for total in (grad_k, grad_v)
            )
            seen = 0
            for block in batch.blocks:
                rows, keys, share = block.rows, block.keys, shares.pop()
                # The scaling is that of the scores: all that comes of them is linear in it.
                grad_share = torch.baddbmm(
                    block.mask, g[:, rows], v[:, keys].transpose(1, 2), beta=0.0, alpha=ctx.scaling
                )
                grad_scores = torch.ops.aten._softmax_backward_data.out(
                    grad_share, share, -1, share.dtype, grad_input=grad_share
                )
                if ctx.softcap is not None:  # d tanh(x) / d x = 1 - tanh(x)^2; computed again rather than kept
                    capped = (q[:, rows] @ k[:, keys].transpose(1, 2)).mul_(ctx.scaling / ctx.softcap).tanh_()
                    grad_scores = torch.addcmul(grad_scores, grad_scores, capped.square_(), value=-1)
                _multiply(grad_scores, k[:, keys], out=grad_q[:, rows])
                if len(batch.blocks) == 1:
                    _multiply(grad_scores.transpose(1, 2), q, out=grad_k)
                    _multiply(share.transpose(1, 2), g, out=grad_v)
                    continue
                for total, part in (
                    (total_k, grad_scores.transpose(1, 2) @ q[:, rows]),
                    (total_v, share.transpose(1, 2) @ g[:, rows]),
                ):
                    # What the blocks before this one have seen is added to, and the rest is new.
                    num_old = max(0, seen - keys.start)
                    total[:, keys.start : keys.start + num_old] += part[:, :num_old]
                    total[:, keys.start + num_old : keys.stop] = part[:, num_old:]
                seen = keys.stop
            if dtype != k.dtype:
                grad_k.copy_(total_k)
                grad_v.copy_(total_v)
        return grads[0], grads[1], grads[2], None, None, None


def _multiply(left: Tensor, right: Tensor, out: Tensor) -> None:
    """Write a batch of products to where it belongs; a part of a sequence is not in one piece."""
    if out.is_contiguous():
        torch.bmm(left, right, out=out)
    else:
        out.copy_(left @ right)


def _parts(batches: Sequence[Batch], *states: Tensor) -> Iterator[list[Tensor]]:
    """Yield the states of each batch: [N, L * share, D]."""
    num_slots = sum(batch.size * batch.length for batch in batches)
    sizes = [batch.size * batch.length for batch in batches]
    of_each = [part.split([size * (len(part) // max(1, num_slots)) for size in sizes]) for part in states]
    for batch, *parts in zip(batches, *of_each, strict=True):
        yield [part.view(batch.size, -1, part.shape[-1]) for part in parts]
