"""Attention of single tokens over blocks of keys and values, as few large operations for all of them.

Every token is a query with the blocks of its row, in order. A block together with the queries that look at it is one
matrix of a batched product, so that nothing is padded to the longest row, keys and values are read where they lie,
and a prompt's blocks once for all its rollouts. Scores of a block are [queries, tokens of a block]; collected query by
query they are one row for the softmax, from which the way goes back.

    blocks of a     P0 P1 R4             products   P0 x (a, b), P1 x (a, b), R4 x a, R5 x b, R6 x b
    blocks of b     P0 P1 R5 R6          softmax    a: P0 P1 R4 --    b: P0 P1 R5 R6
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rallypoint.generation.blocks import Block, BlockPool
from rallypoint.models.attention import NO_LIMITS, Limits
from rallypoint.models.head import soft_capped

Integers = npt.NDArray[np.int64]


@dataclasses.dataclass(slots=True)
class Query:
    """A token that is sent through the model."""

    token: int
    position: int
    blocks: Sequence[Block]
    """That it looks at, in order; its own keys and values go into the last."""
    num_own: int
    """Tokens of the last block that it may look at, itself included; of the others all."""


class QueryRows:
    """See `rallypoint.models.Rows`; T is the number of queries.

    Args of the constructor:
        pool: of the blocks.
        queries: at least one; each block that is not a prompt's is looked at by one of them, unless there is a tile.
        heads: of a layer's queries.
        tile: fill up to so many queries with the last one, and multiply one query with one block at a time, of a copy,
            so that nothing depends on how many there are, and who else looks at what.
    """

    def __init__(self, pool: BlockPool, queries: Sequence[Query], heads: int, *, tile: int | None) -> None:
        self.num_queries = len(queries)
        """Without what fills up a tile."""
        exact = tile is not None
        queries = [*queries, *[queries[-1]] * ((tile or 0) - len(queries))]
        self._exact, self._device = exact, pool.states.device
        self._kv_heads, self._block_tokens, self._head_dim = pool.states.shape[3:]
        self._share = heads // self._kv_heads
        self._width, self._num_slots = len(queries), max(len(query.blocks) for query in queries)
        counts = np.array([len(query.blocks) for query in queries], dtype=np.int64)
        own = np.array([query.num_own - 1 for query in queries], dtype=np.int64)
        query = np.repeat(np.arange(len(queries)), counts)
        slot = np.arange(len(query)) - np.repeat(counts.cumsum() - counts, counts)
        block = np.array([block.index for one in queries for block in one.blocks])
        self._copied = self._tensor(block) if exact else None
        bands = [Band(0, len(block), 1)] if exact else _bands(queries, pool.num_blocks)
        self._collect(query, slot, np.arange(len(block)) if exact else block, bands)
        self._bias, self._key_positions = self._hide(pool, queries, query, slot)
        self._windows: dict[int, Tensor] = {}
        self._last = self._tensor((counts - 1) * self._block_tokens + own)
        self._rows = torch.arange(len(queries), device=self._device)
        self.tokens = self._tensor([one.token for one in queries])
        """[B] int64."""
        self.position_ids = self._tensor([one.position for one in queries]).unsqueeze(0)
        """[1, B] int64."""
        ends = np.array([one.blocks[-1].index for one in queries])[:, None] * self._kv_heads + np.arange(self._kv_heads)
        self._slots = self._tensor((ends * self._block_tokens + own[:, None]).flatten())
        self._views = [_views(pool.states[:, layer], bands, exact) for layer in range(pool.states.shape[1])]
        self._scores = pool.states.new_zeros(self._num_products + 1, self._block_tokens)
        self._parts = pool.states.new_zeros(self._num_products + 1, self._head_dim)

    def advance(self, tokens: Tensor) -> None:
        """Take the next token of every row, where it fits into the row's last block: [B] int64."""
        missing = self._width - len(tokens)
        self.tokens = torch.cat([tokens, tokens[-1:].expand(missing)]) if missing else tokens
        self.position_ids += 1
        self._slots += 1
        self._last += 1
        self._bias[self._rows, 0, self._last] = 0.0
        self._windows.clear()

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, limits: Limits = NO_LIMITS
    ) -> Tensor:
        """See `Rows.attend`."""
        keys, values, bands = self._views[layer]
        keys.index_copy_(0, self._slots, key.reshape(-1, self._head_dim))
        values.index_copy_(0, self._slots, value.reshape(-1, self._head_dim))
        if self._copied is not None:
            bands = self._copy(keys, values)
        asked = query.reshape(-1, self._share * self._head_dim).index_select(0, self._asked).view(-1, self._head_dim)
        for (keys, _), (rows, shape) in zip(bands, self._products, strict=True):
            out = self._scores[rows].view(*shape, self._block_tokens)
            torch.baddbmm(out, asked[rows].view(*shape, self._head_dim), keys, beta=0, alpha=scaling, out=out)
        weights = self._scores.index_select(0, self._table).view(self._width, -1, self._bias.shape[2])
        weights = (
            soft_capped(weights, limits.softcap)
            .add_(self._bias_of(limits.window))
            .softmax(-1)
            .view(-1, self._block_tokens)
            .index_select(0, self._back)
        )
        for (_, values), (rows, shape) in zip(bands, self._products, strict=True):
            out = self._parts[rows].view(*shape, self._head_dim)
            torch.bmm(weights[rows].view(*shape, self._block_tokens), values, out=out)
        parts = self._parts.index_select(0, self._table).view(-1, self._num_slots, self._head_dim)
        return self._add(parts).view(query.shape)

    def _bias_of(self, window: int | None) -> Tensor:
        """Return what is added to the scores, [B, 1, slots * tokens]: -inf where a query may not look, else 0."""
        if window is None:
            return self._bias
        if window not in self._windows:
            first = self.position_ids.view(-1, 1, 1) - window + 1
            self._windows[window] = self._bias.masked_fill(self._key_positions < first, float("-inf"))
        return self._windows[window]

    def _add(self, parts: Tensor) -> Tensor:
        """[N, slots, D] -> [N, D]."""
        if not self._exact:
            return parts.sum(1)
        total = parts[:, 0].float()
        for slot in range(1, self._num_slots):  # in an order that does not depend on how many slots there are
            total = total + parts[:, slot]
        return total.to(parts.dtype)

    def _copy(self, keys: Tensor, values: Tensor) -> list[tuple[Tensor, Tensor]]:
        shape = (-1, self._kv_heads, self._block_tokens, self._head_dim)
        assert self._copied is not None
        both = [states.view(shape).index_select(0, self._copied).flatten(0, 1) for states in (keys, values)]
        return [(both[0].transpose(1, 2), both[1])]

    def _collect(self, query: Integers, slot: Integers, block: Integers, bands: Sequence[Band]) -> None:
        """Number the rows of scores, [block, kv head, place in the block, query head], and say where each belongs."""
        share, kv_heads = self._share, self._kv_heads
        order = np.argsort(block, kind="stable")
        ordered = block[order]
        place = np.empty_like(block)
        place[order] = np.arange(len(block)) - np.searchsorted(ordered, ordered)
        first = np.empty_like(block)
        width = np.empty_like(block)
        self._products: list[tuple[slice, tuple[int, int]]] = []
        num_rows = 0
        for band in bands:
            here = (block >= band.start) & (block < band.stop)
            width[here] = band.width
            first[here] = num_rows + (block[here] - band.start) * kv_heads * band.width * share
            size = (band.stop - band.start) * kv_heads
            self._products.append((slice(num_rows, num_rows + size * band.width * share), (size, band.width * share)))
            num_rows += size * band.width * share
        self._num_products = num_rows
        head, within = np.arange(kv_heads)[None, :, None], np.arange(share)[None, None, :]
        rows = (first + place * share)[:, None, None] + head * (width * share)[:, None, None] + within
        table = np.full((self._width, kv_heads, share, self._num_slots), num_rows)
        table[query, :, :, slot] = rows
        back = np.zeros(num_rows, dtype=np.int64)
        back[rows] = ((query[:, None, None] * kv_heads + head) * share + within) * self._num_slots + slot[:, None, None]
        asked = np.zeros(num_rows // share, dtype=np.int64)
        asked[rows[:, :, 0] // share] = query[:, None] * kv_heads + head[:, :, 0]
        self._table, self._back, self._asked = (self._tensor(part.flatten()) for part in (table, back, asked))

    def _hide(
        self, pool: BlockPool, queries: Sequence[Query], query: Integers, slot: Integers
    ) -> tuple[Tensor, Tensor]:
        """Return two of [B, 1, slots * tokens]: -inf for places without a token yet, else 0; and whose place it is."""
        size = self._block_tokens
        held = np.zeros((len(queries), self._num_slots), dtype=np.int64)
        held[query, slot] = [len(block.tokens) or size for one in queries for block in one.blocks]
        first = held.cumsum(1) - held
        held[np.arange(len(queries)), [len(one.blocks) - 1 for one in queries]] = [one.num_own for one in queries]
        place = np.arange(size)[None, None, :]
        bias = np.where(place >= held[:, :, None], -np.inf, 0.0).reshape(len(queries), 1, -1)
        positions = (first[:, :, None] + place).reshape(len(queries), 1, -1)
        return torch.from_numpy(bias).to(pool.states), self._tensor(positions)

    def _tensor(self, values: Sequence[int] | Integers) -> Tensor:
        return torch.as_tensor(np.asarray(values, dtype=np.int64)).to(self._device)


@dataclasses.dataclass(frozen=True, slots=True)
class Band:
    """Neighbouring blocks of the pool that are looked at by about as many queries each."""

    start: int
    stop: int
    width: int
    """Queries of a block; places that are not taken hold query 0, whose scores nobody reads."""


def tidy(pool: BlockPool, queries: Sequence[Query]) -> None:
    """Move blocks so that those of a kind lie together, where too much work would be done for nothing otherwise."""
    looked_at = _count(queries)
    private = [block for block in looked_at if not block.tokens]
    if private and max(block.index for block in private) + 1 > 1.15 * len(private) + 4:
        taken = {block.index for block in private if block.index < len(private)}
        holes = [place for place in range(len(private)) if place not in taken]
        pool.arrange([block for block in private if block.index >= len(private)], holes)
    shared = [block for block in looked_at if block.tokens]
    wanted = sorted(shared, key=lambda block: (-_class(looked_at[block]), -block.index))
    least = sum(_class_width(looked_at[block]) for block in shared)
    now = sum((band.stop - band.start) * band.width for band in _shared_bands(looked_at, pool.num_blocks))
    if now > 1.25 * least + 8:
        pool.arrange(wanted, range(pool.num_blocks - 1, pool.num_blocks - 1 - len(wanted), -1))


def _count(queries: Sequence[Query]) -> dict[Block, int]:
    """Return how many queries look at each block."""
    return Counter(block for query in queries for block in query.blocks)


def _class(num_queries: int) -> int:
    """Return the power of two that holds a number of queries; up to 8 are one class, for each band costs two calls."""
    return max(3, (num_queries - 1).bit_length())


def _class_width(num_queries: int) -> int:
    return 1 << _class(num_queries)


def _bands(queries: Sequence[Query], num_blocks: int) -> list[Band]:
    """Return the band of private blocks, from the front of the pool, and those of shared ones, from its back."""
    looked_at = _count(queries)
    stop = max((block.index + 1 for block in looked_at if not block.tokens), default=0)
    return [Band(0, stop, 1)] * bool(stop) + _shared_bands(looked_at, num_blocks)


def _shared_bands(looked_at: Mapping[Block, int], num_blocks: int) -> list[Band]:
    """Return bands of one class each, as wide as their widest block; unused blocks belong to what is before them."""
    bands: list[Band] = []
    stop, width, kind = num_blocks, 0, -1
    start = num_blocks
    for block in sorted((block for block in looked_at if block.tokens), key=lambda block: -block.index):
        if _class(looked_at[block]) != kind:
            if width:
                bands.append(Band(start, stop, width))
                stop = start
            else:
                stop = block.index + 1
            width, kind = 0, _class(looked_at[block])
        width, start = max(width, looked_at[block]), block.index
    return bands + [Band(start, stop, width)] * bool(width)


def _views(states: Tensor, bands: Sequence[Band], exact: bool) -> tuple[Tensor, Tensor, list[tuple[Tensor, Tensor]]]:
    """Return keys and values of a layer as rows, and of each band as matrices, [n, D, tokens] and [n, tokens, D]."""
    keys, values = states
    parts = (
        []
        if exact
        else [
            (keys[band.start : band.stop].flatten(0, 1).transpose(1, 2), values[band.start : band.stop].flatten(0, 1))
            for band in bands
        ]
    )
    return keys.view(-1, keys.shape[-1]), values.view(-1, values.shape[-1]), parts
