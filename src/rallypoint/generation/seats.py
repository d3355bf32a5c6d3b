"""Which blocks of keys and values tokens look at, as arrays, so that a step that changes few rows costs little.

Owns: the arrays. Must not know: requests, models, or how attention is computed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from rallypoint.generation.blocks import Block

Integers = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True, slots=True)
class Queries:
    """Tokens that are sent through the model, a line for each; there is at least one."""

    tokens: Integers
    """[B]."""
    positions: Integers
    """[B]."""
    blocks: Integers
    """[B, S]: the places of the blocks that it looks at, in order; its own keys and values go into the last."""
    visible: Integers
    """[B, S]: how many tokens of each it may look at. Of the last, the last of them is itself."""
    num_blocks: Integers
    """[B]."""

    @classmethod
    def of(cls, queries: Sequence[tuple[int, int, Sequence[Block], int]], block_tokens: int) -> Queries:
        """Return them from (token, position, blocks, how many tokens of the last block it may look at) of each."""
        num_blocks = np.array([len(blocks) for _, _, blocks, _ in queries])
        blocks, visible = np.zeros((2, len(queries), num_blocks.max()), dtype=np.int64)
        for line, (_, _, seen, num_own) in enumerate(queries):
            blocks[line, : len(seen)] = [block.index for block in seen]
            visible[line, : len(seen)] = [len(block.tokens) or block_tokens for block in seen]
            visible[line, len(seen) - 1] = num_own
        tokens, positions = (np.array([query[place] for query in queries]) for place in (0, 1))
        return cls(tokens, positions, blocks, visible, num_blocks)

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
        self._visible = np.zeros((num_seats, 8), dtype=np.int64)
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
            self._blocks, self._visible = (
                np.hstack([old, np.zeros_like(old)]) for old in (self._blocks, self._visible)
            )
        self._blocks[seat, start:stop] = [block.index for block in blocks]
        self._visible[seat, start:stop] = [len(block.tokens) or self._block_tokens for block in blocks]

    def queries(self, seats: Integers, tokens: Integers, positions: Integers, num_own: Integers) -> Queries:
        """Return what some rows look at, given how many tokens of its last block each may see; all are [B]."""
        num_blocks = self._num_blocks[seats]
        longest = num_blocks.max()
        visible = self._visible[seats, :longest]
        visible[np.arange(len(seats)), num_blocks - 1] = num_own
        return Queries(tokens, positions, self._blocks[seats, :longest], visible, num_blocks)
