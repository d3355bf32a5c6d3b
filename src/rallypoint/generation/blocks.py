"""Memory for keys and values, in blocks of a fixed number of tokens.

Owns: which block is free, who looks at it, and which prompts can be found again. Must not know: requests, models.

Two kinds lie in one pool. Private blocks hold a part of one response; they fill the pool from the front. Shared
blocks hold a part of a prompt and are looked at by every rollout of it, and by longer prompts that begin alike; they
fill it from the back. So each kind is one range of memory, which a batched product takes as it is, without a copy;
holes in a range cost work, and are closed when they are too many.

A prompt's blocks stay when its last rollout has gone, until their memory is needed: the oldest go first.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


class Block:
    """Some consecutive tokens of one row, or of several rows that begin alike."""

    __slots__ = ("index", "last_state", "num_rows", "parent", "tokens")

    def __init__(self, index: int, parent: Block | None = None, tokens: tuple[int, ...] = ()) -> None:
        self.index = index
        """Its place in the pool; changes when holes are closed."""
        self.parent, self.tokens = parent, tokens
        """Of a shared block: what precedes it, and what it holds; together they are its name. () if it is private."""
        self.num_rows = 0
        """Running rows that look at it."""
        self.last_state: Tensor | None = None
        """[E]: the hidden state of its last token, where a prompt ends here."""


class BlockPool:
    """All blocks of an engine."""

    def __init__(
        self, num_blocks: int, block_tokens: int, num_layers: int, kv_heads: int, head_dim: int, like: Tensor
    ) -> None:
        """Reserve memory; on a CPU, pages that were never written to take none.

        Args:
            num_blocks: of the pool.
            block_tokens: tokens of a block.
            num_layers: that have keys and values.
            kv_heads: key/value heads of a layer.
            head_dim: their width.
            like: a tensor of the type and on the device of keys and values.
        """
        self.num_blocks, self.block_tokens = num_blocks, block_tokens
        self.states = like.new_empty(2, num_layers, num_blocks, kv_heads, block_tokens, head_dim)
        """[2 (keys, values), layers, blocks, K, tokens, D]."""
        self._at: list[Block | None] = [None] * num_blocks
        self._shared: dict[tuple[Block | None, tuple[int, ...]], Block] = {}
        """Every shared block, by name; those that nobody looks at in the order in which they were left."""
        self._num_used = self._num_idle = 0
        # Free places from the front and from the back, and some that are not free any more.
        self._front = list(range(num_blocks))
        self._back = [-place for place in reversed(range(num_blocks))]

    @property
    def num_available(self) -> int:
        """Blocks that are free, or would be if prompts that nobody looks at were forgotten."""
        return self.num_blocks - self._num_used + self._num_idle

    def private(self) -> Block | None:
        """Return a new private block, looked at by one row; None when there is no memory left."""
        if not self._make_room():
            return None
        block = self._place(Block(self._free(self._front)))
        block.num_rows = 1
        return block

    def shared(self, parent: Block | None, tokens: tuple[int, ...]) -> Block | None:
        """Return a new shared block with tokens after those of its parent; None when there is no memory left."""
        if not self._make_room():
            return None
        block = self._place(Block(-self._free(self._back), parent, tokens))
        self._shared[parent, tokens] = block
        self._num_idle += 1
        return block

    def find(self, tokens: Sequence[int]) -> list[Block]:
        """Return the shared blocks that hold the beginning of a prompt: whole ones, and the end if it is there too."""
        found: list[Block] = []
        parent: Block | None = None
        for start in range(0, len(tokens), self.block_tokens):
            block = self._shared.get((parent, tuple(tokens[start : start + self.block_tokens])))
            if block is None:
                break
            found.append(block)
            parent = block
        return found

    def hold(self, blocks: Iterable[Block]) -> None:
        """Note that one more row looks at shared blocks."""
        for block in blocks:
            self._num_idle -= block.num_rows == 0
            block.num_rows += 1

    def leave(self, blocks: Iterable[Block]) -> None:
        """Note that a row is gone: its private blocks become free, its shared ones stay until memory is needed."""
        for block in blocks:
            block.num_rows -= 1
            if block.num_rows:
                continue
            name = block.parent, block.tokens
            if self._shared.get(name) is block:
                self._shared[name] = self._shared.pop(name)  # the newest of those that may go
                self._num_idle += 1
            else:
                self._release(block)

    def forget(self) -> None:
        """Make all prompts unknown, as under new weights; rows that run keep theirs."""
        unused = [block for block in self._shared.values() if not block.num_rows]
        self._shared.clear()
        self._num_idle = 0
        for block in unused:
            self._release(block)

    def arrange(self, blocks: Sequence[Block], places: Sequence[int]) -> None:
        """Move blocks to places of the pool; what lies there moves where they came from."""
        moves = [(block.index, place) for block, place in zip(blocks, places, strict=True) if block.index != place]
        content = {index: self._at[index] for move in moves for index in move}
        source: dict[int, int] = {}
        for came_from, goes_to in moves:
            source[goes_to] = came_from
        displaced = [index for index in source if index not in {came_from for came_from, _ in moves}]
        vacated = [came_from for came_from, goes_to in moves if came_from not in source]
        source |= dict(zip(vacated, displaced, strict=True))
        for place, came_from in source.items():
            block = self._at[place] = content[came_from]
            if block is not None:
                block.index = place
            else:
                self._is_free(place)
        if source:
            to, origin = (torch.tensor(list(part), device=self.states.device) for part in (source, source.values()))
            self.states[:, :, to] = self.states.index_select(2, origin)

    def _make_room(self) -> bool:
        """Have a free place, if need be that of the prompt nobody has looked at for longest, its end first."""
        if self._num_used < self.num_blocks:
            return True
        parents = {block.parent for block in self._shared.values()}
        for name, block in self._shared.items():
            if not block.num_rows and block not in parents:
                del self._shared[name]
                self._num_idle -= 1
                self._release(block)
                return True
        return False

    def _free(self, places: list[int]) -> int:
        """Return the next place from one end that is free."""
        while self._at[abs(place := heapq.heappop(places))] is not None:
            pass
        return place

    def _place(self, block: Block) -> Block:
        self._at[block.index] = block
        self._num_used += 1
        # What lies behind the end of a row is multiplied by 0, so it must be finite.
        self.states[:, :, block.index] = 0
        return block

    def _release(self, block: Block) -> None:
        self._at[block.index] = None
        self._num_used -= 1
        self._is_free(block.index)

    def _is_free(self, place: int) -> None:
        heapq.heappush(self._front, place)
        heapq.heappush(self._back, -place)
