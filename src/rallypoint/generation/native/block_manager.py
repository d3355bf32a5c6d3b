"""Memory for keys and values, in blocks of a fixed number of tokens.

Owns: which block is free, who looks at it, and which prompts can be found again. Must not know: requests, models.

Two kinds lie in one pool. A private block holds a part of one response. A shared one holds a part of a prompt and is
looked at by every rollout of it, and by longer prompts that begin alike. A prompt's blocks stay when its last rollout
has gone, until their memory is needed: the oldest go first.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from rallypoint.cpu.pages import reserve
from rallypoint.errors import CacheError


class Block:
    """Some consecutive tokens of one row, or of several rows that begin alike."""

    __slots__ = ("index", "last_state", "num_rows", "parent", "tokens")

    def __init__(self, index: int, parent: Block | None = None, tokens: tuple[int, ...] = ()) -> None:
        self.index = index
        """Its place in the pool."""
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

        Raises:
            CacheError: there is not as much memory.
        """
        self.num_blocks, self.block_tokens = num_blocks, block_tokens
        num_bytes = 2 * num_layers * kv_heads * head_dim * num_blocks * block_tokens * like.element_size()
        with _counted(num_bytes, num_blocks * block_tokens, like.device):
            self.keys = reserve(num_layers, num_blocks, kv_heads, head_dim, block_tokens, like=like)
            """[layers, blocks, K, D, tokens]: one number of all tokens of a block side by side."""
            self.values = reserve(num_layers, num_blocks, kv_heads, block_tokens, head_dim, like=like)
            """[layers, blocks, K, tokens, D]."""
        self.key_numbers = self.keys.view(torch.int16) if like.dtype.itemsize == 2 else self.keys
        """See `Bags`."""
        self._shared: dict[tuple[Block | None, tuple[int, ...]], Block] = {}
        """Every shared block, by name; those that nobody looks at in the order in which they were left."""
        self._num_idle = 0
        self._free = list(reversed(range(num_blocks)))
        self._taken: list[int] = []
        """Places that were given out since `clean`."""

    @property
    def num_available(self) -> int:
        """Blocks that are free, or would be if prompts that nobody looks at were forgotten."""
        return len(self._free) + self._num_idle

    def private(self) -> Block | None:
        """Return a new private block, looked at by one row; None when there is no memory left."""
        if not self._make_room():
            return None
        block = Block(self._take())
        block.num_rows = 1
        return block

    def shared(self, parent: Block | None, tokens: tuple[int, ...]) -> Block | None:
        """Return a new shared block with tokens after those of its parent; None when there is no memory left."""
        if not self._make_room():
            return None
        block = self._shared[parent, tokens] = Block(self._take(), parent, tokens)
        self._num_idle += 1
        return block

    def clean(self) -> None:
        """Make blocks that are new hold finite numbers: what lies behind the end of a row is multiplied by 0."""
        if self._taken:
            places = torch.tensor(self._taken, device=self.keys.device)
            self.keys.index_fill_(1, places, 0.0)
            self.values.index_fill_(1, places, 0.0)
            self._taken = []

    def write(self, layer: int, blocks: Tensor, places: Tensor, key: Tensor, value: Tensor) -> None:
        """Store keys and values of a layer, [T, K, D] both.

        Args:
            layer: its index.
            blocks: [T] int64, of each token.
            places: [T] int64, in there.
            key: of T tokens.
            value: of the same.
        """
        self.keys[layer].permute(0, 3, 1, 2).index_put_((blocks, places), key)
        self.values[layer].transpose(1, 2).index_put_((blocks, places), value)

    def read(self, layer: int, places: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values of some blocks, end to end: [tokens, K, D] both."""
        keys, values = self.keys[layer].index_select(0, places), self.values[layer].index_select(0, places)
        return keys.permute(0, 3, 1, 2).flatten(0, 1), values.transpose(1, 2).flatten(0, 1)

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
                self._free.append(block.index)

    def forget(self) -> None:
        """Make all prompts unknown, as under new weights; rows that run keep theirs."""
        self._free += [block.index for block in self._shared.values() if not block.num_rows]
        self._shared.clear()
        self._num_idle = 0

    def _make_room(self) -> bool:
        """Have a free place, if need be that of the prompt nobody has looked at for longest, its end first."""
        if self._free:
            return True
        parents = {block.parent for block in self._shared.values()}
        for name, block in self._shared.items():
            if not block.num_rows and block not in parents:
                del self._shared[name]
                self._num_idle -= 1
                self._free.append(block.index)
                return True
        return False

    def _take(self) -> int:
        place = self._free.pop()
        self._taken.append(place)
        return place


@contextlib.contextmanager
def _counted(num_bytes: int, num_tokens: int, device: torch.device) -> Iterator[None]:
    """Say what was asked for, and what there is, when so many bytes cannot be reserved."""
    try:
        yield
    except (RuntimeError, OSError, OverflowError) as error:  # of torch; of the system; a size beyond any address
        if device.type != "cpu" and not isinstance(error, torch.OutOfMemoryError):
            raise  # a kernel of before failed
        if device.type == "cpu":
            there = f"this machine has {os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**20:,.0f} MiB"
        else:
            free, total = torch.accelerator.get_memory_info(device)
            there = f"{device} has {free / 2**20:,.0f} of its {total / 2**20:,.0f} MiB left"
        raise CacheError(
            f"the keys and values of {num_tokens:,} tokens take {num_bytes / 2**20:,.0f} MiB, but {there}; ask for "
            "fewer tokens with rollout.cache_tokens (rally serve: --cache-tokens), which may be much fewer than all "
            "rows have: those that find no memory wait"
        ) from error
