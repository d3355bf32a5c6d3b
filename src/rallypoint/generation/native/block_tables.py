"""Which blocks of keys and values tokens look at, as arrays, so that a step that changes few rows costs little.

Owns: the arrays. Must not know: requests, models, or how attention is computed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from rallypoint.generation.native.block_manager import Block

Integers = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True, slots=True)
class Queries:
    """Tokens that are sent through the model, a line for each; there is at least one."""

    tokens: Integers
    """[B]."""
    positions: Integers
    """[B]: where each stands in its row. Its own keys and values go there, and it looks at everything up to there."""
    blocks: Integers
    """[B, S]: the places of its row's blocks, in order."""
    sizes: Integers
    """[B, S]: how many tokens each of them is for."""
    num_blocks: Integers
    """[B]. The last ones may be for tokens that come later."""

    @classmethod
    def of(cls, queries: Sequence[tuple[int, int, Sequence[Block]]], block_tokens: int) -> Queries:
        """Return them from (token, position, blocks) of each."""
        num_blocks = np.array([len(blocks) for _, _, blocks in queries])
        blocks, sizes = np.zeros((2, len(queries), num_blocks.max()), dtype=np.int64)
        for line, (_, _, seen) in enumerate(queries):
            blocks[line, : len(seen)] = [block.index for block in seen]
            sizes[line, : len(seen)] = [len(block.tokens) or block_tokens for block in seen]
        tokens, positions = (np.array([query[place] for query in queries]) for place in (0, 1))
        return cls(tokens, positions, blocks, sizes, num_blocks)

    @property
    def first_positions(self) -> Integers:
        """[B, S]: of the first token of each block."""
        return self.sizes.cumsum(1) - self.sizes

    @property
    def own_slots(self) -> Integers:
        """[B]: the number among its row's blocks of the one that it is in."""
        has_begun = (self.first_positions <= self.positions[:, None]) & self._is_there
        return has_begun.sum(1) - 1

    def ways(self, num_steps: int) -> tuple[Integers, Integers]:
        """Return in which slot each row is at every step, and at which place in there: [steps, B] both.

        A row without a block for what comes stays at its last place.
        """
        lines, first, own = np.arange(len(self.tokens)), self.first_positions, self.own_slots
        last = (first + self.sizes)[lines, self.num_blocks - 1] - 1
        positions = np.minimum(self.positions + np.arange(num_steps)[:, None], last)
        is_behind = positions >= (first + self.sizes)[lines, own]
        slots = own + is_behind
        return slots, positions - first[lines, slots]

    @property
    def _is_there(self) -> npt.NDArray[np.bool_]:
        return np.arange(self.blocks.shape[1]) < self.num_blocks[:, None]

    def lines(self, lines: slice | Integers) -> Queries:
        """Return some of them."""
        return Queries(*(getattr(self, field.name)[lines] for field in dataclasses.fields(self)))

    def parts(self, size: int) -> list[Queries]:
        """Return them in parts of at most so many."""
        return [self.lines(slice(start, start + size)) for start in range(0, len(self.tokens), size)]


class Seats:
    """A line for each row that may run; a row keeps its line as long as it does."""

    def __init__(self, num_seats: int, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._free = list(reversed(range(num_seats)))
        self._blocks = np.zeros((num_seats, 8), dtype=np.int64)
        self._sizes = np.zeros((num_seats, 8), dtype=np.int64)
        self._num_blocks = np.zeros(num_seats, dtype=np.int64)

    def take(self) -> int:
        """Return a free line, without blocks."""
        seat = self._free.pop()
        self._num_blocks[seat] = 0
        return seat

    def leave(self, seat: int) -> None:
        """Make a line free."""
        self._free.append(seat)

    def add(self, seat: int, blocks: Sequence[Block]) -> None:
        """Have a row look at more blocks, behind those that it has."""
        start = int(self._num_blocks[seat])
        stop = self._num_blocks[seat] = start + len(blocks)
        while stop > self._blocks.shape[1]:
            self._blocks, self._sizes = (np.hstack([old, np.zeros_like(old)]) for old in (self._blocks, self._sizes))
        self._blocks[seat, start:stop] = [block.index for block in blocks]
        self._sizes[seat, start:stop] = [len(block.tokens) or self._block_tokens for block in blocks]

    def queries(self, seats: Integers, tokens: Integers, positions: Integers) -> Queries:
        """Return what some rows look at; all are [B]."""
        num_blocks = self._num_blocks[seats]
        longest = num_blocks.max()
        return Queries(tokens, positions, self._blocks[seats, :longest], self._sizes[seats, :longest], num_blocks)
