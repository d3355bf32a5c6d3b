"""Attention of single tokens over blocks of keys and values, as two large operations for all of them.

A block holds its keys number by number: a row of that table is one number of all its tokens, and the scores of a block
are the sum of D such rows, weighted by the numbers of the query. An output is the sum of the values of all tokens,
weighted by their shares. Both are bags of rows, which torch sums up where they lie, in one call for all queries, heads
and blocks; nothing is copied, and a bag is the same bits whatever stands beside it. In between lies a softmax over
rectangles: queries with about as many blocks form a class, whose shorter ones are filled up.

    blocks of a     P0 P1 R4          scores     a: P0 P1 R4 --    b: P0 P1 R5 R6           bags of D, a block each
    blocks of b     P0 P1 R5 R6       outputs    a: P0 P1 R4 --    b: P0 P1 R5 R6           a bag for a query each

Accelerators are slow at short bags; for them keys and values are gathered, for batched products in one class.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from rallypoint.generation.blocks import BlockPool
from rallypoint.generation.seats import Integers, Queries
from rallypoint.models.attention import NO_LIMITS, Limits
from rallypoint.models.head import soft_capped

_SLOTS_OF_A_CLASS = 64
"""Blocks of one head that may be computed for nothing; another class of lengths costs about as much."""


class QueryRows:
    """See `rallypoint.models.Rows`; T is the number of queries.

    Args of the constructor:
        pool: of the blocks.
        queries: what they look at; no two have a place in common that they are written to.
        heads: of a layer's queries.
        tile: fill up to so many queries with the last one; None for as many as there are.
        in_bags: sum in bags, so that no bit of a query depends on its company, rather than in batched products.
        num_steps: for how many tokens of each row, the first included. They lie in the block of the first one and in
            the one behind it; for rows whose blocks end before, what is computed is of no use.
    """

    def __init__(
        self, pool: BlockPool, queries: Queries, heads: int, *, tile: int | None, in_bags: bool, num_steps: int = 1
    ) -> None:
        self.num_queries = len(queries.tokens)
        """Without what fills up a tile."""
        if tile is not None:
            queries = queries.lines(np.minimum(np.arange(tile), self.num_queries - 1))
        self._pool, self._device, self._in_bags = pool, pool.keys.device, in_bags
        self._heads, self._share = heads, heads // pool.keys.shape[2]
        self.tokens = self._tensor(queries.tokens)
        """[B] int64."""
        self.position_ids = self._tensor(queries.positions).unsqueeze(0)
        """[1, B] int64."""
        self._windows: dict[int, Tensor] = {}
        slots, places = _ways(queries, num_steps)
        self._write(queries, slots, places)
        lines = np.arange(len(queries.tokens))
        order = np.argsort(-queries.num_blocks, kind="stable") if in_bags else lines
        self._back = None if np.array_equal(order, lines) else self._tensor(np.argsort(order))
        self._look(queries.lines(order), order, slots[:, order], places[:, order])

    def advance(self, tokens: Tensor) -> None:
        """Take the next token of every row: [B] int64."""
        missing = len(self.tokens) - len(tokens)
        self.tokens = torch.cat([tokens, tokens[-1:].expand(missing)]) if missing else tokens
        self.position_ids = self.position_ids + 1  # what it was made from is not ours
        for places, moves in self._moving:
            places.view(len(self.tokens), -1).add_(next(moves))
        self._bias.view(-1).index_fill_(0, self._newest, 0.0)
        self._windows.clear()

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, limits: Limits = NO_LIMITS
    ) -> Tensor:
        """See `Rows.attend`."""
        self._pool.write(layer, self._key_places, self._value_places, key, value)
        keys, values = self._pool.keys[layer], self._pool.values[layer]
        bias = self._bias_of(limits.window)
        if not self._in_bags:
            return self._gathered(query, keys, values, scaling, limits, bias)
        asked = query.reshape(-1, query.shape[-1]).index_select(0, self._asked)
        scores = _sums(keys.view(-1, keys.shape[-1]), self._key_rows, self._key_bags, asked)
        if limits.softcap is None:
            scores = torch.add(bias, scores, alpha=scaling)
        else:
            scores = soft_capped(scores.mul_(scaling), limits.softcap).add_(bias)
        shares = torch.empty_like(scores)
        for rows, shape in self._classes:
            torch.softmax(scores[rows].view(shape), -1, out=shares[rows].view(shape))
        out = _sums(values.view(-1, values.shape[-1]), self._value_rows, self._value_bags, shares)
        out = out.view(len(query), -1)
        return (out if self._back is None else out.index_select(0, self._back)).view(query.shape)

    def _gathered(
        self, query: Tensor, keys: Tensor, values: Tensor, scaling: float, limits: Limits, bias: Tensor
    ) -> Tensor:
        """Return the same from copies of keys, [B, K, D, tokens], and of values, [B, K, tokens, D]."""
        kv_heads, dim, size = keys.shape[1:]
        shape = (len(query), self._num_slots, kv_heads)
        keys = keys.index_select(0, self._table).view(*shape, dim, size).permute(0, 2, 3, 1, 4).flatten(3)
        values = values.index_select(0, self._table).view(*shape, size, dim).transpose(1, 2).flatten(2, 3)
        scores = (query.view(len(query), kv_heads, self._share, dim) @ keys).mul_(scaling)
        weights = soft_capped(scores, limits.softcap).add_(bias.view(scores.shape)).softmax(-1)
        return (weights @ values).view(query.shape)

    def _bias_of(self, window: int | None) -> Tensor:
        """Return what is added to the scores, [slots of all heads, tokens]: -inf where a query may not look, else 0."""
        if window is None:
            return self._bias
        if window not in self._windows:
            first = self.position_ids.view(-1)[self._asked // self._heads].unsqueeze(1) - window + 1
            places = torch.arange(self._bias.shape[1], device=self._device)
            self._windows[window] = self._bias.masked_fill(self._first_positions + places < first, float("-inf"))
        return self._windows[window]

    def _write(self, queries: Queries, slots: Integers, places: Integers) -> None:
        """Say where keys and values go."""
        kv_heads, dim, size = self._pool.keys.shape[2:]
        blocks = queries.blocks[np.arange(len(queries.tokens)), slots]
        head = self._tensor(blocks[0])[:, None] * kv_heads + torch.arange(kv_heads, device=self._device)
        number = head[:, :, None] * dim + torch.arange(dim, device=self._device)
        place = self._tensor(places[0])
        self._key_places = (number * size + place[:, None, None]).flatten()
        self._value_places = (head * size + place[:, None]).flatten()
        self._moving = [
            (self._key_places, self._moves(blocks * (kv_heads * dim * size) + places)),
            (self._value_places, self._moves(blocks * (kv_heads * size) + places)),
        ]

    def _look(self, queries: Queries, lines: Integers, slots: Integers, places: Integers) -> None:
        """Lay out what is looked at, in the order (query, head, slot); for bags the longest queries come first.

        `lines` says which query each is.
        """
        kv_heads, dim, size = self._pool.keys.shape[2:]
        heads, head = self._heads, np.arange(self._heads)
        classes = list(_classes(queries.num_blocks, heads)) if self._in_bags else [(0, len(lines))]
        widths = [int(queries.num_blocks[start:stop].max()) for start, stop in classes]
        self._num_slots = max(widths)
        slot = np.arange(self._num_slots)
        fills_up = slot >= queries.num_blocks[:, None]
        # What fills up must be finite too, so it is of the query itself.
        blocks = np.where(fills_up, queries.blocks[:, :1], queries.blocks[:, : self._num_slots])
        first_positions = queries.first_positions[:, : self._num_slots]
        seen = (queries.positions[:, None] + 1 - first_positions).clip(0, queries.sizes[:, : self._num_slots])
        visible = np.where(fills_up, 0, seen)

        def of_slots(numbers: Integers) -> Tensor:
            """[B, slots] or [B, H, slots] -> [slots of all heads, 1] int32, without those that a class has not."""
            numbers = np.broadcast_to(
                numbers[:, None] if numbers.ndim == 2 else numbers, (len(lines), heads, len(slot))
            )
            parts = [numbers[a:b, :, :width].ravel() for (a, b), width in zip(classes, widths, strict=True)]
            return self._tensor(np.concatenate(parts)).int().unsqueeze(1)

        within = torch.arange(max(dim, size), dtype=torch.int32, device=self._device)
        tables = of_slots(blocks[:, None] * kv_heads + head[:, None] // self._share)
        self._key_rows = (tables * dim + within[:dim]).flatten()
        self._value_rows = (tables * size + within[:size]).flatten()
        self._table = self._tensor(blocks.flatten())
        counts = np.repeat(widths, [(stop - start) * heads for start, stop in classes])
        starts = counts.cumsum() - counts
        self._key_bags = torch.arange(0, self._key_rows.numel(), dim, dtype=torch.int32, device=self._device)
        self._value_bags = self._tensor(starts * size).int()
        self._asked = self._tensor(np.repeat((lines[:, None] * heads + head).flatten(), counts))
        self._bias = self._pool.keys.new_zeros(len(tables), size)
        self._bias.masked_fill_(within[:size] >= of_slots(visible), float("-inf"))
        self._first_positions = of_slots(first_positions)
        self._newest = self._tensor((starts + np.repeat(slots[0], heads)) * size + np.repeat(places[0], heads))
        self._moving.append((self._newest, self._moves(slots * size + places)))
        ends = starts + counts
        self._classes = [
            (slice(int(starts[first * heads]), int(ends[stop * heads - 1])), ((stop - first) * heads, -1))
            for first, stop in classes
        ]

    def _moves(self, places: Integers) -> Iterator[Tensor]:
        """Return how far each query's place moves from step to step, [B, 1] each, given the places: [steps, B]."""
        return iter(self._tensor(np.diff(places, axis=0)).unsqueeze(2))

    def _tensor(self, values: Integers) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self._device)


def _ways(queries: Queries, num_steps: int) -> tuple[Integers, Integers]:
    """Return in which slot each query's row is at every step, and at which place in there: [steps, B] both.

    A row without a block for what comes stays at its last place.
    """
    lines, first, own = np.arange(len(queries.tokens)), queries.first_positions, queries.own_slots
    last = (first + queries.sizes)[lines, queries.num_blocks - 1] - 1
    positions = np.minimum(queries.positions + np.arange(num_steps)[:, None], last)
    is_behind = positions >= (first + queries.sizes)[lines, own]
    slots = own + is_behind
    return slots, positions - first[lines, slots]


def _classes(num_blocks: Integers, heads: int) -> Iterator[tuple[int, int]]:
    """Return where classes begin and end, of queries by falling number of blocks.

    >>> list(_classes(np.array([20, 19, 19, 4, 4, 3]), heads=8))
    [(0, 3), (3, 6)]
    """
    start, num_wasted = 0, 0
    for line, number in enumerate(num_blocks.tolist()):
        num_wasted += (int(num_blocks[start]) - number) * heads
        if num_wasted > _SLOTS_OF_A_CLASS:
            yield start, line
            start, num_wasted = line, 0
    yield start, len(num_blocks)


def _sums(table: Tensor, rows: Tensor, bags: Tensor, weights: Tensor) -> Tensor:
    """Return weighted sums of rows of a table; `bags` says where the rows of each begin: [bags, numbers of a row]."""
    return torch.embedding_bag(table, rows, bags, False, 0, False, weights.view(-1))[0]
