"""What the newest tokens of rows look at, laid out for attention over blocks of keys and values.

Owns: which numbers each query looks at, and how that moves from step to step. They are bags, see
`bags`; accelerators are slow at short ones, see `rallypoint.generation.native.accelerator`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rallypoint.generation.native.block_manager import BlockPool
from rallypoint.generation.native.block_tables import Integers, Queries
from rallypoint.generation.native.cpu.bags import Bags, Moves, advance, attend
from rallypoint.models.attention import NO_LIMITS, Limits

_SLOTS_OF_A_CLASS = 64
"""Blocks of one head that may be computed for nothing; another class of lengths costs about as much."""


class QueryRows:
    """See `rallypoint.models.Rows`; T is the number of queries.

    Args of the constructor:
        pool: of the blocks.
        queries: what they look at; no two have a place in common that they are written to.
        heads: of a layer's queries.
        tile: fill up to so many queries with the last one.
        num_steps: for how many tokens of each row, the first included. They lie in the block of the first one and in
            the one behind it; for rows whose blocks end before, what is computed is of no use.
    """

    def __init__(self, pool: BlockPool, queries: Queries, heads: int, *, tile: int, num_steps: int = 1) -> None:
        self.num_queries = len(queries.tokens)
        """Without what fills up a tile."""
        if tile > self.num_queries:
            queries = queries.lines(np.minimum(np.arange(tile), self.num_queries - 1))
        self._pool, self._device = pool, pool.keys.device
        self._heads, self._share = heads, heads // pool.keys.shape[2]
        self._windows: dict[int, Tensor] = {}
        self._moving: list[tuple[Tensor, Tensor]] = []
        self.num_moves = 0
        """From step to step, that have been made."""
        slots, places = queries.ways(num_steps)
        lines = np.arange(len(queries.tokens))
        order = np.argsort(-queries.num_blocks, kind="stable")
        self._bags = Bags(
            # Copies, as they change.
            tokens=self._tensor(queries.tokens.copy()),
            position_ids=self._tensor(queries.positions.copy()).unsqueeze(0),
            keys=pool.keys,
            key_numbers=pool.key_numbers,
            values=pool.values,
            back=None if np.array_equal(order, lines) else self._tensor(np.argsort(order)),
            **self._write(queries, slots, places),
            **self._look(queries.lines(order), order, slots[:, order], places[:, order]),
        )
        places_that_move, distances = map(list, zip(*self._moving, strict=True))
        self.moves = Moves(places_that_move, distances, self._newest)
        """From step to step, all of them."""

    @property
    def bags(self) -> Bags:
        """What `attend` works with."""
        return self._bags

    @property
    def tokens(self) -> Tensor:
        """[B] int64."""
        return self._bags.tokens

    @property
    def position_ids(self) -> Tensor:
        """[1, B] int64."""
        return self._bags.position_ids

    @property
    def has_moves(self) -> bool:
        """Whether there is a step after this one."""
        return self.num_moves < len(self.moves.distances[0])

    def advance(self, tokens: Tensor) -> None:
        """Take the next token of every row: [B] int64."""
        missing = len(self.tokens) - len(tokens)
        filled_up = torch.cat([tokens, tokens[-1:].expand(missing)]) if missing else tokens
        advance(self._bags, self.moves, self.num_moves, filled_up)
        self.num_moves += 1
        self._windows.clear()

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, limits: Limits = NO_LIMITS
    ) -> Tensor:
        """See `Rows.attend`."""
        bags, bias = self._bags, self._bias_of(limits.window)
        return attend(bags, layer, query, key, value, scaling, limits.softcap, bias).view(query.shape)

    def _bias_of(self, window: int | None) -> Tensor:
        """Return what is added to the scores, [slots of all heads, tokens]: -inf where a query may not look, else 0."""
        if window is None:
            return self._bags.bias
        if window not in self._windows:
            asked = self._bags.asked[self._bags.scored]
            first = self.position_ids.view(-1)[asked // self._heads].unsqueeze(1) - window + 1
            places = self._first_positions + torch.arange(self._pool.block_tokens, device=self._device)
            self._windows[window] = self._bags.bias.masked_fill(places < first, float("-inf"))
        return self._windows[window]

    def _write(self, queries: Queries, slots: Integers, places: Integers) -> dict[str, Tensor]:
        """Say where keys and values go: fields of `Bags`."""
        kv_heads, dim, size = self._pool.keys.shape[2:]
        blocks = queries.blocks[np.arange(len(queries.tokens)), slots]
        head = self._tensor(blocks[0])[:, None] * kv_heads + torch.arange(kv_heads, device=self._device)
        number = head[:, :, None] * dim + torch.arange(dim, device=self._device)
        place = self._tensor(places[0])
        key_places = (number * size + place[:, None, None]).flatten()
        value_places = (head * size + place[:, None]).flatten()
        self._moving += [
            (key_places, self._distances(blocks * (kv_heads * dim * size) + places)),
            (value_places, self._distances(blocks * (kv_heads * size) + places)),
        ]
        return {"key_places": key_places, "value_places": value_places}

    def _look(self, queries: Queries, lines: Integers, slots: Integers, places: Integers) -> dict[str, Any]:
        """Lay out what is looked at, in the order (query, head, slot), the longest first, as fields of `Bags`.

        `lines` says which query each is.
        """
        kv_heads, dim, size = self._pool.keys.shape[2:]
        heads, head = self._heads, np.arange(self._heads)
        classes = list(_classes(queries.num_blocks, heads))
        widths = [int(queries.num_blocks[start:stop].max()) for start, stop in classes]
        slot = np.arange(max(widths))
        fills_up = slot >= queries.num_blocks[:, None]
        # What fills up must be finite too, so it is of the query itself.
        blocks = np.where(fills_up, queries.blocks[:, :1], queries.blocks[:, : len(slot)])
        first_positions = queries.first_positions[:, : len(slot)]
        seen = (queries.positions[:, None] + 1 - first_positions).clip(0, queries.sizes[:, : len(slot)])
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
        in_memory = tables.view(-1).argsort(stable=True)
        counts = np.repeat(widths, [(stop - start) * heads for start, stop in classes])
        ends = counts.cumsum()
        starts = ends - counts
        bias = self._pool.keys.new_zeros(len(tables), size)
        bias.masked_fill_(within[:size] >= of_slots(visible), float("-inf"))
        self._first_positions = of_slots(first_positions)
        self._newest = self._tensor((starts + np.repeat(slots[0], heads)) * size + np.repeat(places[0], heads))
        self._moving.append((self._newest, self._distances(slots * size + places)))
        return {
            "asked": self._tensor(np.repeat((lines[:, None] * heads + head).flatten(), counts))[in_memory],
            "key_rows": (tables[in_memory] * dim + within[:dim]).flatten(),
            "scored": in_memory.argsort(),
            "key_bags": torch.arange(0, tables.numel() * dim, dim, dtype=torch.int32, device=self._device),
            "value_rows": (tables * size + within[:size]).flatten(),
            "value_bags": self._tensor(starts * size).int(),
            "bias": bias,
            "classes": [
                (int(starts[first * heads]), int(ends[stop * heads - 1]), (stop - first) * heads)
                for first, stop in classes
            ],
        }

    def _distances(self, places: Integers) -> Tensor:
        """Return how far each query's place moves from step to step, [moves, B, 1], given the places: [steps, B]."""
        return self._tensor(np.diff(places, axis=0)).unsqueeze(2)

    def _tensor(self, values: Integers) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self._device)


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
