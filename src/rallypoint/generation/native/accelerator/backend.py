"""What the newest tokens of rows look at on an accelerator: a table of blocks, and how far each row has come.

Owns: what of that changes from step to step, all of it in memory of the device, so that a step can be followed by the
next without the host. Which tokens a query sees follows from its position; so nothing but tokens, positions and the
number of the step moves, and a step that was captured (see `graphs`) can be replayed on them.

Keys and values are read where they lie by a kernel, see `kernel`. Where there is none they are copied,
and all queries looked up in batched products of one class.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rallypoint.generation.native.accelerator.kernel import MANY_PROGRAMS, PageKernel
from rallypoint.generation.native.block_manager import BlockPool
from rallypoint.generation.native.block_tables import Integers, Queries
from rallypoint.generation.native.sequence import BLOCK_TOKENS
from rallypoint.models.attention import NO_LIMITS, Limits
from rallypoint.models.head import soft_capped


class Pages(NamedTuple):
    """What B tokens look at, S blocks each, and where their own keys and values go."""

    tokens: Tensor
    """[B] int64; moves."""
    position_ids: Tensor
    """[1, B] int64; moves. A query sees what stands at positions up to its own."""
    step: Tensor
    """[1] int64: how often all of this has moved; moves."""
    places: Tensor
    """[steps, B] int64: where the own keys and values go at every step, counted in tokens from the pool's beginning."""
    table: Tensor
    """[B, S] int32: the blocks of each row, in order; behind its last one, its first."""
    num_blocks: Tensor
    """[B] int32: how many of them there are."""
    first_positions: Tensor
    """[B, S] int32: of the first token of each block."""
    sizes: Tensor
    """[B, S] int32: how many tokens each is for; 0 behind a row's last block."""


class PagedRows:
    """See `rallypoint.models.Rows`; T is the number of queries.

    Args of the constructor:
        pool: of the blocks.
        queries: what they look at; no two have a place in common that they are written to.
        tile: fill up to so many queries with the last one.
        num_slots: fill up the table to so many blocks of each row.
        num_steps: for how many tokens of each row, the first included; at most as many as a block has. Rows whose
            blocks end before stay at their last place, and what is computed there is of no use.
        kernel: reads keys and values where they lie; without one they are copied.
    """

    bags = None

    def __init__(
        self,
        pool: BlockPool,
        queries: Queries,
        *,
        tile: int = 1,
        num_slots: int = 1,
        num_steps: int = 1,
        kernel: PageKernel | None = None,
    ) -> None:
        self.num_queries = len(queries.tokens)
        """Without what fills up a tile."""
        if tile > self.num_queries:
            queries = queries.lines(np.minimum(np.arange(tile), self.num_queries - 1))
        self._pool, self._kernel, self._device = pool, kernel, pool.keys.device
        self._num_steps, self.num_moves = num_steps, 0
        self._biases: dict[int | None, Tensor] = {}
        self._written: tuple[Tensor, Tensor] | None = None
        num_slots = max(num_slots, int(queries.num_blocks.max()))
        slot = np.arange(num_slots)
        is_there = slot < queries.num_blocks[:, None]
        within = np.minimum(slot, queries.blocks.shape[1] - 1)
        self.pages = Pages(
            tokens=self._tensor(queries.tokens.copy()),
            position_ids=self._tensor(queries.positions.copy()).unsqueeze(0),
            step=torch.zeros(1, dtype=torch.int64, device=self._device),
            places=self._tensor(_own_places(queries, num_steps, pool.block_tokens)),
            # What is behind the last block must be finite too, so it is of the row itself.
            table=self._tensor(np.where(is_there, queries.blocks[:, within], queries.blocks[:, :1])).int(),
            num_blocks=self._tensor(queries.num_blocks.copy()).int(),
            first_positions=self._tensor(np.where(is_there, queries.first_positions[:, within], 0)).int(),
            sizes=self._tensor(np.where(is_there, queries.sizes[:, within], 0)).int(),
        )
        """Of this step. Others of the same shapes may take their place, see `graphs`."""

    @property
    def tokens(self) -> Tensor:
        """[B] int64."""
        return self.pages.tokens

    @property
    def position_ids(self) -> Tensor:
        """[1, B] int64."""
        return self.pages.position_ids

    @property
    def pool(self) -> BlockPool:
        """Of the blocks."""
        return self._pool

    @property
    def has_moves(self) -> bool:
        """Whether there is a step after this one."""
        return self.num_moves < self._num_steps - 1

    def advance(self, tokens: Tensor) -> None:
        """Take the next token of every row: [B] int64."""
        missing = len(self.tokens) - len(tokens)
        self.move(torch.cat([tokens, tokens[-1:].expand(missing)]) if missing else tokens)
        self.num_moves += 1

    def move(self, tokens: Tensor) -> None:
        """Do the same on the device alone, for what fills up a tile too."""
        self.pages.tokens.copy_(tokens)
        self.pages.position_ids.add_(1)
        self.pages.step.add_(1)
        self.forget()

    def forget(self) -> None:
        """Forget what layers of one step have in common."""
        self._biases.clear()
        self._written = None

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, limits: Limits = NO_LIMITS
    ) -> Tensor:
        """See `Rows.attend`."""
        keys, values = self._pool.keys[layer], self._pool.values[layer]
        if self._kernel is not None:
            self._kernel.write(self.pages, keys, values, key, value)
            return self._kernel.attend(self.pages, keys, values, query, scaling, limits)
        self._pool.write(layer, *self._own_places(), key, value)
        return gathered(self.pages, keys, values, query, scaling, limits, self._bias_of(limits.window))

    def _own_places(self) -> tuple[Tensor, Tensor]:
        """Return the block of each query, and its place in there, at this step: [B] both."""
        if self._written is None:
            places = self.pages.places.index_select(0, self.pages.step).view(-1)
            size = self._pool.block_tokens
            self._written = places.div(size, rounding_mode="floor"), places % size
        return self._written

    def _bias_of(self, window: int | None) -> Tensor:
        """Return what is added to the scores, [B, S * tokens]: -inf where a query may not look, else 0."""
        if window not in self._biases:
            pages = self.pages
            within = torch.arange(self._pool.block_tokens, device=self._device)
            positions = pages.first_positions.unsqueeze(2) + within
            own = pages.position_ids.view(-1, 1, 1)
            seen = (within < pages.sizes.unsqueeze(2)) & (positions <= own)
            if window is not None:
                seen &= positions > own - window
            bias = self._pool.keys.new_zeros(seen.shape)
            self._biases[window] = bias.masked_fill_(~seen, float("-inf")).flatten(1)
        return self._biases[window]

    def _tensor(self, values: Integers) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self._device)


def gathered(
    pages: Pages, keys: Tensor, values: Tensor, query: Tensor, scaling: float, limits: Limits, bias: Tensor
) -> Tensor:
    """Return what queries find, from copies of what they look at: [B, H, D].

    Args:
        pages: of the queries.
        keys: [blocks, K, D, tokens], of one layer.
        values: [blocks, K, tokens, D], of the same.
        query: [B, H, D].
        scaling: of scores.
        limits: of which the window is in the bias.
        bias: [B, S * tokens].
    """
    num, num_slots = pages.table.shape
    kv_heads, dim, size = keys.shape[1:]
    table = pages.table.flatten()
    keys = keys.index_select(0, table).view(num, num_slots, kv_heads, dim, size).permute(0, 2, 3, 1, 4).flatten(3)
    values = values.index_select(0, table).view(num, num_slots, kv_heads, size, dim).transpose(1, 2).flatten(2, 3)
    scores = (query.reshape(num, kv_heads, -1, dim) @ keys).mul_(scaling)
    weights = soft_capped(scores, limits.softcap).add_(bias.view(num, 1, 1, -1)).softmax(-1)
    return (weights @ values).view(query.shape)


@torch.no_grad()
def is_right(kernel: PageKernel, heads: int, kv_heads: int, dim: int, like: Tensor) -> bool:
    """Say whether a kernel finds what is found without, for queries of such a shape on the device of a tensor.

    One row has more blocks than the other, and one of them is not full. The two are computed alone, where a kernel cuts
    rows into parts, and many times over, where it does not.
    """
    generator = torch.Generator().manual_seed(0)
    pool = BlockPool(12, BLOCK_TOKENS, 1, kv_heads, dim, like)
    for memory in (pool.keys, pool.values):
        memory.copy_(torch.randn(memory.shape, generator=generator))
    blocks = np.array([[7, 2, 9, 0, 0], [3, 11, 5, 4, 8]])
    sizes = np.array(
        [[5, BLOCK_TOKENS, BLOCK_TOKENS, 0, 0], [BLOCK_TOKENS, BLOCK_TOKENS, 1, BLOCK_TOKENS, BLOCK_TOKENS]]
    )
    queries = Queries(np.zeros(2, np.int64), np.array([40, 100]), blocks, sizes, np.array([3, 5]))
    states = torch.randn(3, 2, heads, dim, generator=generator).to(like)
    query, key, value = states[0], states[1, :, :kv_heads], states[2, :, :kv_heads]
    tolerance = 1e-4 if like.dtype == torch.float32 else 3e-2
    few, many = np.arange(2), np.arange(MANY_PROGRAMS // kv_heads + 1) % 2
    for limits, lines in itertools.product((NO_LIMITS, Limits(window=50, softcap=20.0)), (few, many)):
        found, expected = (
            PagedRows(pool, queries.lines(lines), kernel=way).attend(
                0, query[lines], key[lines], value[lines], dim**-0.5, limits
            )
            for way in (kernel, None)
        )
        if not float((found - expected).abs().max()) <= tolerance:
            return False
    return True


def _own_places(queries: Queries, num_steps: int, size: int) -> Integers:
    """Return where the own keys and values of queries go at each of a block's steps, in tokens of the pool: [steps, B].

    Behind the last step it is the place of the last one.
    """
    slots, places = queries.ways(min(num_steps, BLOCK_TOKENS))
    own = queries.blocks[np.arange(len(queries.tokens)), slots] * size + places
    return np.pad(own, ((0, BLOCK_TOKENS - len(own)), (0, 0)), mode="edge")
