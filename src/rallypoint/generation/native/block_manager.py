"""Which blocks of the KV cache are free, which sequences use the others, and which prompts can be found again.

Owns: blocks, block tables and the attention metadata made of them. Must not know: requests, models, or the tensors.

A block belongs to one sequence (private), or to a prompt (shared): then every rollout of that prompt uses it, and so do
longer prompts that begin alike. Shared blocks are the prefix cache: they stay when their last sequence has gone, until
their memory is needed. The least recently used go first.
"""

from __future__ import annotations

import dataclasses
from collections import abc

import numpy as np
import numpy.typing as npt
from torch import Tensor

from rallypoint.config.limits import BLOCK_TOKENS
from rallypoint.models.kinds.linear_attention import DeltaStates

Integers = npt.NDArray[np.int64]


class Block:
    """Some consecutive tokens of one sequence, or of several that begin alike."""

    __slots__ = ("experts", "index", "last_state", "num_users", "parent", "snapshot", "tokens")

    def __init__(self, index: int, parent: Block | None = None, tokens: tuple[int, ...] = ()) -> None:
        self.index = index
        """Index in the KV cache."""
        self.parent, self.tokens = parent, tokens
        """Name of a shared block: the block before it, and the tokens that it holds. () if it is of a response."""
        self.num_users = 0
        """Running sequences that use it."""
        self.last_state: Tensor | None = None
        """[E]: the hidden state of its last token, if a prompt ends here."""
        self.snapshot: DeltaStates | None = None
        """States of all layers of linear attention after its last token, [layers, ...] both; see `recurrent`."""
        self.experts: list[bytes] = []
        """Experts of each token of a prompt, if they are recorded."""


class BlockManager:
    """All blocks of a KV cache."""

    def __init__(self, num_blocks: int, block_tokens: int = BLOCK_TOKENS) -> None:
        self._block_tokens = block_tokens
        self._shared: dict[tuple[Block | None, tuple[int, ...]], Block] = {}
        """Every shared block, by name; unused ones in the order in which they were released."""
        self._num_unused = 0
        self._free = list(reversed(range(num_blocks)))
        self._new: list[int] = []
        """Indices that were allocated since `take_new`."""

    @property
    def num_available(self) -> int:
        """Blocks that are free, or would be if unused prompts were evicted."""
        return len(self._free) + self._num_unused

    def allocate(self, parent: Block | None = None, tokens: tuple[int, ...] = ()) -> Block | None:
        """Return a new private block, used by one sequence; None if there is no memory left.

        Args:
            parent: block of the prompt's previous tokens; None for the first block, and after the prompt.
            tokens: those of the prompt in this block.
        """
        if not self._has_free():
            return None
        block = Block(self._pop(), parent, tokens)
        block.num_users = 1
        return block

    def allocate_shared(self, parent: Block | None, tokens: tuple[int, ...]) -> Block | None:
        """Return a new shared block with the tokens after those of its parent; None if there is no memory left."""
        if not self._has_free():
            return None
        block = self._shared[parent, tokens] = Block(self._pop(), parent, tokens)
        self._num_unused += 1
        return block

    def take_new(self) -> list[int]:
        """Return the indices that were allocated since the last call."""
        new, self._new = self._new, []
        return new

    def find(self, tokens: abc.Sequence[int]) -> list[Block]:
        """Return the shared blocks that hold the beginning of a prompt: full ones, and its last one if it is there."""
        found: list[Block] = []
        parent: Block | None = None
        for start in range(0, len(tokens), self._block_tokens):
            block = self._shared.get((parent, tuple(tokens[start : start + self._block_tokens])))
            if block is None:
                break
            found.append(block)
            parent = block
        return found

    def acquire(self, blocks: abc.Iterable[Block]) -> None:
        """Note that one more sequence uses shared blocks."""
        for block in blocks:
            self._num_unused -= block.num_users == 0
            block.num_users += 1

    def release(self, blocks: abc.Iterable[Block]) -> None:
        """Note that a sequence is gone: its private blocks become free, shared ones stay until memory is needed."""
        for block in blocks:
            block.num_users -= 1
            if block.num_users:
                continue
            block.snapshot = None
            name = block.parent, block.tokens
            if self._shared.get(name) is block:
                self._shared[name] = self._shared.pop(name)  # the most recently used
                self._num_unused += 1
            else:
                self._free.append(block.index)

    def forget_prompts(self) -> None:
        """Empty the prefix cache, as under new weights; running sequences keep their blocks."""
        self._free += [block.index for block in self._shared.values() if not block.num_users]
        self._shared.clear()
        self._num_unused = 0

    def _has_free(self) -> bool:
        """Make sure that a block is free, if necessary by evicting the end of the least recently used prompt."""
        if self._free:
            return True
        parents = {block.parent for block in self._shared.values()}
        for name, block in self._shared.items():
            if not block.num_users and block not in parents:
                del self._shared[name]
                self._num_unused -= 1
                self._free.append(block.index)
                return True
        return False

    def _pop(self) -> int:
        index = self._free.pop()
        self._new.append(index)
        return index


@dataclasses.dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Where B tokens stand in their sequences, and which blocks they attend to; there is at least one."""

    tokens: Integers
    """[B]."""
    positions: Integers
    """[B]: a token's own keys and values go there, and it attends to everything up to there."""
    blocks: Integers
    """[B, S]: the block table, indices in order."""
    sizes: Integers
    """[B, S]: how many tokens each block is for."""
    num_blocks: Integers
    """[B]: blocks of each sequence; the last ones may be for tokens that come later."""
    table_lines: Integers
    """[B]: the line of each sequence in the block tables; -1 for none."""

    @classmethod
    def of(
        cls, queries: abc.Sequence[tuple[int, int, abc.Sequence[Block]]], block_tokens: int = BLOCK_TOKENS
    ) -> AttentionMetadata:
        """Return the metadata of (token, position, blocks) of each."""
        num_blocks = np.array([len(blocks) for _, _, blocks in queries])
        blocks, sizes = np.zeros((2, len(queries), num_blocks.max()), dtype=np.int64)
        for line, (_, _, seen) in enumerate(queries):
            blocks[line, : len(seen)] = [block.index for block in seen]
            sizes[line, : len(seen)] = [len(block.tokens) or block_tokens for block in seen]
        tokens, positions = (np.array([query[column] for query in queries]) for column in (0, 1))
        return cls(tokens, positions, blocks, sizes, num_blocks, np.full(len(queries), -1))

    @property
    def first_positions(self) -> Integers:
        """[B, S]: position of the first token of each block."""
        return self.sizes.cumsum(1) - self.sizes

    def write_slots(self, num_steps: int) -> tuple[Integers, Integers]:
        """Return where each sequence writes at every step: the column of its block, and the offset there, [steps, B].

        A sequence without a block for what comes stays at its last offset.
        """
        lines, first = np.arange(len(self.tokens)), self.first_positions
        is_there = np.arange(self.blocks.shape[1]) < self.num_blocks[:, None]
        own = ((first <= self.positions[:, None]) & is_there).sum(1) - 1
        last = (first + self.sizes)[lines, self.num_blocks - 1] - 1
        positions = np.minimum(self.positions + np.arange(num_steps)[:, None], last)
        columns = own + (positions >= (first + self.sizes)[lines, own])
        return columns, positions - first[lines, columns]

    def lines(self, lines: slice | Integers) -> AttentionMetadata:
        """Return the metadata of some of the tokens."""
        return AttentionMetadata(*(getattr(self, field.name)[lines] for field in dataclasses.fields(self)))

    def padded(self, num: int) -> AttentionMetadata:
        """Return metadata of at least so many tokens, filled up with copies of the last one."""
        missing = num - len(self.tokens)
        return self.lines(np.minimum(np.arange(num), len(self.tokens) - 1)) if missing > 0 else self


class BlockTables:
    """The block tables of all running sequences, as arrays; a sequence keeps its line as long as it runs."""

    def __init__(self, num_lines: int, block_tokens: int = BLOCK_TOKENS) -> None:
        self._block_tokens = block_tokens
        self._free = list(reversed(range(num_lines)))
        self._blocks = np.zeros((num_lines, 8), dtype=np.int64)
        self._sizes = np.zeros((num_lines, 8), dtype=np.int64)
        self._num_blocks = np.zeros(num_lines, dtype=np.int64)

    def take_line(self) -> int:
        """Return a free line, without blocks."""
        line = self._free.pop()
        self._num_blocks[line] = 0
        return line

    def free_line(self, line: int) -> None:
        """Make a line free."""
        self._free.append(line)

    def append(self, line: int, blocks: abc.Sequence[Block]) -> None:
        """Add blocks to a sequence, after those that it has."""
        start = int(self._num_blocks[line])
        stop = self._num_blocks[line] = start + len(blocks)
        while stop > self._blocks.shape[1]:
            self._blocks, self._sizes = (np.hstack([old, np.zeros_like(old)]) for old in (self._blocks, self._sizes))
        self._blocks[line, start:stop] = [block.index for block in blocks]
        self._sizes[line, start:stop] = [len(block.tokens) or self._block_tokens for block in blocks]

    def metadata(self, lines: Integers, tokens: Integers, positions: Integers) -> AttentionMetadata:
        """Return the attention metadata of one token of some sequences; all arguments are [B]."""
        num_blocks = self._num_blocks[lines]
        longest = num_blocks.max()
        return AttentionMetadata(
            tokens, positions, self._blocks[lines, :longest], self._sizes[lines, :longest], num_blocks, lines
        )
