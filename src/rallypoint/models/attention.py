"""Attention over rows that lie end to end in one stream, hooked into transformers by its registry.

A model built with `attn_implementation=ATTENTION` receives its rows as the keyword argument `rows` of
the forward pass and asks it at every layer. During training that is `PackedRows`; the generator brings
its own, which reads and writes a cache. No model code is changed, and no padding leaves this file.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn import functional
from transformers import AttentionInterface

from rallypoint.models.prefix import SharedPrefixes

ATTENTION = "rallypoint_rows"

# What layers of some families pass along, by the names that transformers has for it.
_UNSUPPORTED = ("s_aux", "position_bias")

# Measured on CPUs: up to this length batched matrix products beat the fused kernel, forward and backward.
_LONGEST_FOR_PRODUCTS = 512

# Larger blocks multiply more that the mask throws away, smaller ones keep the cores less busy.
_QUERIES_PER_BLOCK = 64


class _Context(FunctionCtx):
    """What a forward pass leaves for the backward one."""

    saved_tensors: tuple[Tensor, ...]
    scaling: float
    limits: Limits


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """What layers of some families do to the scores besides scaling them."""

    window: int | None = None
    """A token sees the last `window` ones, itself among them; None: all before it."""
    softcap: float | None = None
    """Scores s become softcap * tanh(s / softcap) (Gemma 2, arXiv 2408.00118)."""


NO_LIMITS = Limits()


class Rows(Protocol):
    """What a forward pass knows about the rows in its stream."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, limits: Limits = NO_LIMITS
    ) -> Tensor:
        """Return the attention output of one layer.

        Args:
            layer: index of the layer, for those who keep a cache.
            query: [T, H, D].
            key: [T, K, D] with K key/value heads, H a multiple of K.
            value: [T, K, D].
            scaling: factor of the scores.
            limits: what else is done to them.

        Returns:
            [T, H, D].
        """
        ...


def attend_rows(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    *,
    rows: Rows,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Adapt transformers' calling convention ([1, H, T, D] in, [1, T, H, D] out) to `Rows`.

    Raises:
        ValueError: the layer asks for what would change the result and is not supported yet.
    """
    if attention_mask is not None or dropout:
        raise ValueError("packed attention takes neither a mask nor dropout: the rows say who sees whom")
    asked = [name for name in _UNSUPPORTED if options.get(name) is not None]
    if asked:
        raise ValueError(f"packed attention does not support {', '.join(asked)} yet")
    query, key, value = (states.transpose(1, 2).squeeze(0) for states in (query, key, value))
    limits = Limits(sliding_window, softcap)
    out = rows.attend(int(module.layer_idx), query, key, value, scaling, limits)  # pyright: ignore[reportArgumentType]
    return out.unsqueeze(0), None


AttentionInterface.register(ATTENTION, attend_rows)


class PackedRows:
    """Causal attention within each row of a packed stream; rows do not see each other.

    Rows are computed in classes of similar length (the same power of two), padded to the longest of their class
    inside this file only: one rectangle of slots after the other, row by row. The padding repeats the last token of
    its row, behind it, where causality hides it from every real query and NaN stays in its own row.

        rows          a0 a1 | b0 b1 b2 b3 | c0
        slots         c0 | a0 a1 | b0 b1 b2 b3          three classes, or with rows of 4 and 3 in one:
        rows          a0 a1 a2 | b0 b1 b2 b3
        slots         a0 a1 a2 a2 | b0 b1 b2 b3

    Tokens that rows share are in the stream once and have a slot in every such row: each row needs their keys and
    values, and the first row's output is theirs.
    """

    def __init__(self, offsets: Tensor, device: torch.device, shared: SharedPrefixes | None = None) -> None:
        """Lay rows out.

        Args:
            offsets: [B+1] of the rows.
            device: of the stream.
            shared: what of the rows is in the stream; None for all of it.
        """
        lengths = offsets[1:] - offsets[:-1]
        position_ids = torch.arange(int(offsets[-1])) - torch.repeat_interleave(offsets[:-1], lengths)
        classes = _length_classes(lengths)
        self._rectangles = [_Rectangle(len(rows), int(lengths[rows].max())) for rows in classes]
        tokens = [
            offsets[rows].unsqueeze(1) + torch.arange(shape.longest).minimum(lengths[rows].unsqueeze(1) - 1)
            for rows, shape in zip(classes, self._rectangles, strict=True)
        ]
        token_of_slot = torch.cat([part.flatten() for part in tokens] or [torch.zeros(0, dtype=torch.int64)])
        # The first slot of a token is its own; those behind it are padding.
        own = torch.ones_like(token_of_slot, dtype=torch.bool)
        own[1:] = token_of_slot[1:] != token_of_slot[:-1]
        slot_of_token = torch.nonzero(own).flatten()[token_of_slot[own].argsort()]
        self._in_place = torch.equal(token_of_slot, torch.arange(len(token_of_slot)))
        self._copies: tuple[Tensor, Tensor] | None = None
        if shared is not None and len(shared.kept) < len(position_ids):
            self._in_place = False
            num_copies = torch.bincount(shared.place, minlength=len(shared.kept))
            copies = slot_of_token[shared.place.argsort(stable=True)]
            self._copies = copies.to(device), (num_copies.cumsum(0) - num_copies).to(device)
            position_ids, slot_of_token = position_ids[shared.kept], slot_of_token[shared.kept]
            token_of_slot = shared.place[token_of_slot]
        self.position_ids = position_ids.to(device).unsqueeze(0)
        self._token_of_slot, self._slot_of_token = token_of_slot.to(device), slot_of_token.to(device)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, limits: Limits = NO_LIMITS
    ) -> Tensor:
        """See `Rows.attend`."""
        del layer
        sizes = [shape.num_rows * shape.longest for shape in self._rectangles]
        own = (self._slot_of_token, None)
        copies = self._copies or own
        parts = [
            self._pad(states, *slots).split(sizes) for states, slots in ((query, own), (key, copies), (value, copies))
        ]
        outs = [shape.attend(*part, scaling, limits) for shape, *part in zip(self._rectangles, *parts, strict=True)]
        return self._unpad(torch.cat(outs) if len(outs) > 1 else outs[0])

    def _pad(self, states: Tensor, slots: Tensor, starts: Tensor | None) -> Tensor:
        """[T, H, D] -> [slots, H, D]; see `_Pad`."""
        return states if self._in_place else _Pad.apply(states, self._token_of_slot, slots, starts)

    def _unpad(self, slots: Tensor) -> Tensor:
        """[slots, H, D] -> [T, H, D]."""
        return slots if self._in_place else slots.index_select(0, self._slot_of_token)


def _length_classes(lengths: Tensor) -> list[Tensor]:
    """Return row indices grouped by the power of two that holds their length.

    >>> [rows.tolist() for rows in _length_classes(torch.tensor([3, 100, 4, 90, 0]))]
    [[0, 2], [1, 3]]
    """
    nearest = torch.tensor([math.ceil(math.log2(n)) if n > 1 else 0 for n in lengths.tolist()])
    full = lengths > 0
    return [torch.nonzero((nearest == power) & full).flatten() for power in torch.unique(nearest[full]).tolist()]


class _Pad(torch.autograd.Function):
    """Copies tokens to slots; padding has no gradient to give.

    `slots` are those whose gradient a token gets: its own, or all of its copies, of which those of token t begin at
    `starts[t]`.
    """

    @staticmethod
    def forward(ctx: _Context, states: Tensor, token_of_slot: Tensor, slots: Tensor, starts: Tensor | None) -> Tensor:
        ctx.save_for_backward(slots, starts)  # pyright: ignore[reportArgumentType] - None may be saved
        return states.index_select(0, token_of_slot)

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride] - torch passes one gradient per output
        slots, starts = cast("tuple[Tensor, Tensor | None]", ctx.saved_tensors)
        if starts is None:
            return grad.index_select(0, slots), None, None, None
        # A bag of embeddings is a sum of rows: the fastest that torch has, in float32 for half precision.
        summed = functional.embedding_bag(slots, grad.flatten(1), starts, mode="sum")
        return summed.view(-1, *grad.shape[1:]), None, None, None


@dataclasses.dataclass(frozen=True, slots=True)
class _Rectangle:
    """Rows of one length, padding included."""

    num_rows: int
    longest: int

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scaling: float, limits: Limits) -> Tensor:
        """[R * L, H, D] with [R * L, K, D] twice -> [R * L, H, D]."""
        heads, kv_heads = query.shape[1], key.shape[1]
        if limits.window is not None and limits.window >= self.longest:
            limits = dataclasses.replace(limits, window=None)
        reach = limits.window or self.longest
        if limits.softcap is None and (query.device.type != "cpu" or reach > _LONGEST_FOR_PRODUCTS):
            q, k, v = (x.view(self.num_rows, self.longest, *x.shape[1:]).transpose(1, 2) for x in (query, key, value))
            seen = None if limits.window is None else _seen_in_window(self.longest, limits.window, query.device)
            out = functional.scaled_dot_product_attention(
                q, k, v, attn_mask=seen, is_causal=seen is None, scale=scaling, enable_gqa=heads != kv_heads
            )
            return out.transpose(1, 2).reshape(query.shape)
        # The queries of one key/value head are rows of one product, token by token, so that keys need no repeating.
        folded = (self.num_rows, self.longest, kv_heads, -1, query.shape[-1])
        q, k, v = (x.view(folded).transpose(1, 2).flatten(2, 3).flatten(0, 1) for x in (query, key, value))
        out = _CausalProducts.apply(q, k, v, scaling, limits)
        return out.view(self.num_rows, kv_heads, self.longest, -1, query.shape[-1]).transpose(1, 2).reshape(query.shape)


class _CausalProducts(torch.autograd.Function):
    """Causal attention as batched products of blocks of queries with the keys that they may see.

    Queries are [N, L * share, D], keys and values [N, L, D]. Keys that no query of a block sees are never multiplied.
    """

    @staticmethod
    def forward(ctx: _Context, query: Tensor, key: Tensor, value: Tensor, scaling: float, limits: Limits) -> Tensor:
        outs: list[Tensor] = []
        shares: list[Tensor] = []
        for block in _query_blocks(query, key, limits.window):
            keys = key[:, block.keys].transpose(1, 2)
            if limits.softcap is None:
                scores = torch.baddbmm(block.mask(query), query[:, block.rows], keys, alpha=scaling)
            else:
                capped = (query[:, block.rows] @ keys).mul_(scaling / limits.softcap).tanh_()
                scores = torch.add(block.mask(query), capped, alpha=limits.softcap)
            shares.append(scores.softmax(-1))
            outs.append(shares[-1] @ value[:, block.keys])
        ctx.save_for_backward(query, key, value, *shares)
        ctx.scaling, ctx.limits = scaling, limits
        return _join(outs)

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride] - torch passes one gradient per output
        query, key, value, *shares = ctx.saved_tensors
        # Of keys and values every block has a part, which is not rounded to half precision before it is added.
        dtype = torch.promote_types(key.dtype, torch.float32) if len(shares) > 1 else key.dtype
        grad_queries: list[Tensor] = []
        grad_key = grad_value = None
        softcap = ctx.limits.softcap
        for block, share in zip(_query_blocks(query, key, ctx.limits.window)[::-1], shares[::-1], strict=True):
            rows, keys = block.rows, block.keys
            grad_share = grad[:, rows] @ value[:, keys].transpose(1, 2)
            grad_scores = torch.ops.aten._softmax_backward_data(grad_share, share, -1, share.dtype)
            if softcap is not None:  # d tanh(x) / d x = 1 - tanh(x)^2; computed again rather than kept
                capped = (query[:, rows] @ key[:, keys].transpose(1, 2)).mul_(ctx.scaling / softcap).tanh_()
                grad_scores = torch.addcmul(grad_scores, grad_scores, capped.square_(), value=-1)
            grad_queries.append(grad_scores @ key[:, keys])
            key_part, value_part = grad_scores.transpose(1, 2) @ query[:, rows], share.transpose(1, 2) @ grad[:, rows]
            if grad_key is None or grad_value is None:
                if keys.start == 0:  # the last block comes first, and without a window it sees all
                    grad_key, grad_value = key_part.to(dtype), value_part.to(dtype)
                    continue
                grad_key, grad_value = torch.zeros_like(key, dtype=dtype), torch.zeros_like(value, dtype=dtype)
            grad_key[:, keys] += key_part
            grad_value[:, keys] += value_part
        assert grad_key is not None, "a rectangle has rows"
        assert grad_value is not None, "a rectangle has rows"
        grad_query = _join(grad_queries[::-1]).mul_(ctx.scaling)
        return grad_query, grad_key.mul_(ctx.scaling).to(key.dtype), grad_value.to(key.dtype), None, None


@dataclasses.dataclass(frozen=True, slots=True)
class _Block:
    """Tokens whose queries are multiplied together, and the keys that at least one of them sees."""

    tokens: range
    keys: slice
    share: int
    """Queries of a token."""
    window: int | None

    @property
    def rows(self) -> slice:
        """Where its queries are."""
        return slice(self.tokens.start * self.share, self.tokens.stop * self.share)

    def mask(self, like: Tensor) -> Tensor:
        """Return what is added to the scores, [queries, keys]: -inf where they may not look, else 0."""
        hidden = like.new_full((len(self.tokens), self.keys.stop - self.keys.start), float("-inf"))
        diagonal = self.tokens.start - self.keys.start
        mask = hidden.triu(diagonal + 1)
        if self.window is not None:
            mask += hidden.tril(diagonal - self.window)
        return mask if self.share == 1 else mask.repeat_interleave(self.share, 0)


def _query_blocks(query: Tensor, key: Tensor, window: int | None) -> list[_Block]:
    """Return the blocks of all queries.

    >>> [(block.rows, block.keys) for block in _query_blocks(torch.zeros(1, 2 * 100, 8), torch.zeros(1, 100, 8), None)]
    [(slice(0, 128, None), slice(0, 64, None)), (slice(128, 200, None), slice(0, 100, None))]
    >>> [block.keys for block in _query_blocks(torch.zeros(1, 100, 8), torch.zeros(1, 100, 8), 10)]
    [slice(0, 64, None), slice(55, 100, None)]
    """
    longest = key.shape[1]
    starts = range(0, longest, _QUERIES_PER_BLOCK)
    return [
        _Block(
            range(start, min(start + _QUERIES_PER_BLOCK, longest)),
            slice(0 if window is None else max(0, start - window + 1), min(start + _QUERIES_PER_BLOCK, longest)),
            query.shape[1] // longest,
            window,
        )
        for start in starts
    ]


def _seen_in_window(length: int, window: int, device: torch.device) -> Tensor:
    """Return which keys each query sees: [length, length].

    >>> _seen_in_window(4, 2, torch.device("cpu")).int().tolist()
    [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
    """
    return torch.ones(length, length, dtype=torch.bool, device=device).tril().triu(1 - window)


def _join(blocks: list[Tensor]) -> Tensor:
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks, 1)
