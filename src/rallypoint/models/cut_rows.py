"""Packed rows whose tokens are cut over ranks: which rank has which tokens, and how these attend to those of others.

All but attention is computed token by token. Ranks along `sp` have parts of a block of tokens, and trade heads before
attention (Ulysses, arXiv 2309.14509), so that they are no more than heads. Ranks along `cp` have a block each; queries
stay where they are, and keys and values of the tokens that they see come to them (arXiv 2407.21783, section 3.3.2).

    before attention        tokens 0 1 2 | 3 4 5        every rank has some tokens, with all heads
    sp: all-to-all          heads  0 1   | 2 3          every rank has some heads, of all tokens
    cp: all-to-all          keys   0 1 2 | 0 1 2 3 4 5  every rank has the keys that its queries see, with all heads
    sp: exchange back       tokens 0 1 2 | 3 4 5

The later a token is in its row, the more keys it sees. So a block is not one range: each long row is cut into twice as
many chunks as there are blocks, of which each has an early and a late one, and so are the other rows, laid end to end.
Linear attention scans whole rows, of some heads on each rank of both axes.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from rallypoint.models.attention import PackedRows
from rallypoint.models.kinds.linear_attention import DeltaInputs, recall_over_ranks
from rallypoint.models.prefix import Copies, SharedPrefixes
from rallypoint.models.products import NO_LIMITS, Limits
from rallypoint.parallel import (
    Collective,
    DeviceMesh,
    exchange_for_columns,
    exchange_for_rows,
    exchange_rows,
    gather_rows,
)

_SHORT = 8
"""Part of a block up to which rows are short: longer ones leave blocks with unequal work, and those that are cut have
all their keys sent to all ranks."""


def block_of_tokens(lengths: Tensor, num_blocks: int) -> Tensor:
    """Deal the tokens of some rows to blocks of equal size that see about equally many keys: [S] int64, 0 to P - 1.

    >>> block_of_tokens(torch.tensor([8]), 2)  # the first four tokens see 10 keys, and so do 1, 2, 7 and 8
    tensor([0, 0, 1, 1, 1, 1, 0, 0])
    >>> block_of_tokens(torch.ones(16, dtype=torch.int64), 2)  # short rows are laid end to end
    tensor([0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0])

    Args:
        lengths: [B] computed tokens of each row.
        num_blocks: P.
    """
    total = int(lengths.sum())
    is_long = lengths * (_SHORT * num_blocks) > total
    part = torch.where(is_long, is_long.cumsum(0), 0)  # of the stream: all short rows, or a long one
    part_of_token = torch.repeat_interleave(part, lengths)
    ends = torch.bincount(part_of_token, minlength=1).cumsum(0).unsqueeze(1)
    blocks = torch.arange(num_blocks)
    sizes = (ends // num_blocks + (blocks < ends % num_blocks)).diff(dim=0, prepend=torch.zeros(1, num_blocks).long())
    early = (sizes + 1) // 2
    chunks = torch.cat([early, (sizes - early).flip(1)], 1)
    block_of_chunk = torch.cat([blocks, blocks.flip(0)]).expand_as(chunks)
    found = torch.empty(total, dtype=torch.int64)
    found[part_of_token.argsort(stable=True)] = torch.repeat_interleave(block_of_chunk.flatten(), chunks.flatten())
    return found


class Dealt(NamedTuple):
    """The order in which a stream lies on ranks."""

    shared: SharedPrefixes
    """Tokens of the rows that are in the stream, in that order."""
    blocks: tuple[int, ...]
    """Tokens of each rank of `cp`; filler after the last one's."""

    @classmethod
    def of(cls, offsets: Tensor, shared: SharedPrefixes, num_tokens: int, mesh: DeviceMesh) -> Dealt:
        """Deal the tokens of a stream.

        Every rank has a token, because transformers cannot compute none: a stream shorter than the number of ranks is
        filled up to it.

        Args:
            offsets: [B+1] of the rows.
            shared: the tokens of the rows that are in the stream.
            num_tokens: tokens of the stream, filler included.
            mesh: the ranks.
        """
        num_blocks, num_ranks, num = mesh.cp.size, mesh.tokens.size, len(shared.kept)
        if num_blocks == 1 or num < num_ranks:
            return cls(shared, _shares(max(num_tokens, num_ranks), num_blocks))
        block = block_of_tokens(shared.num_kept(offsets), num_blocks)
        *sizes, last = torch.bincount(block, minlength=num_blocks).tolist()
        return cls(shared.ordered(block.argsort(stable=True)), (*sizes, last + num_tokens - num))


@dataclasses.dataclass(frozen=True, slots=True)
class TokenSlice:
    """The tokens of a packed stream that one rank computes, and the positions that are predicted at these tokens.

    The hidden state of a token predicts the next one (see `engine.forward`): with two ranks and a stream of six
    tokens, positions 4 and 5 belong to the second rank, which has tokens 3 and 4.
    """

    mesh: DeviceMesh
    num_tokens: tuple[int, ...]
    """Tokens of every rank along `cp` and `sp`, filler included."""
    num_positions: tuple[int, ...]
    """Positions of every rank."""

    @classmethod
    def of(cls, blocks: Sequence[int], sources: Tensor, mesh: DeviceMesh) -> TokenSlice:
        """Return the slice of this rank.

        Args:
            blocks: tokens of the ranks along `sp` together, for each rank along `cp`, filler included.
            sources: [N] int64, ascending: for each position, the token at which it is predicted.
            mesh: of the ranks that share the stream.
        """
        sizes = tuple(size for block in blocks for size in _shares(block, mesh.sp.size))
        found = torch.searchsorted(sources, torch.tensor([0, *itertools.accumulate(sizes)])).tolist()
        return cls(mesh, sizes, tuple(stop - start for start, stop in itertools.pairwise(found)))

    @property
    def tokens(self) -> slice:
        """This rank's tokens in the stream."""
        return _part(self.num_tokens, self.mesh.tokens.rank)

    @property
    def positions(self) -> slice:
        """This rank's positions among all of them."""
        return _part(self.num_positions, self.mesh.tokens.rank)

    @property
    def of_block(self) -> tuple[int, ...]:
        """Tokens of every rank along `sp` of this rank's block."""
        start = self.mesh.cp.rank * self.mesh.sp.size
        return self.num_tokens[start : start + self.mesh.sp.size]

    def join(self, outputs: Tensor) -> Tensor:
        """Gather the outputs of all positions, [N, ...]; backward, each rank gets the gradient of its own."""
        return gather_rows(outputs, self.mesh.tokens, self.num_positions)


class CutRows:
    """Packed rows whose tokens are cut over ranks; see `AttentionRows`, whose T is the number of this rank's tokens."""

    def __init__(self, rows: PackedRows, offsets: Tensor, dealt: Dealt, part: TokenSlice) -> None:
        """Take the rows of the whole stream, their borders, [B+1], and this rank's slice of it."""
        self._rows, self._part, cp = rows, part, part.mesh.cp
        self.position_ids = rows.position_ids[:, part.tokens]
        self._block = _Block(offsets, rows.position_ids.device, dealt, cp) if cp.size > 1 else rows

    @property
    def token_weights(self) -> Tensor:
        """See `PackedRows.token_weights`, of this rank's tokens."""
        return self._rows.token_weights[self._part.tokens]

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, limits: Limits = NO_LIMITS
    ) -> Tensor:
        """See `AttentionRows.attend`.

        Raises:
            ValueError: the heads do not divide by the number of ranks along `sp`.
        """
        sp, sizes = self._part.mesh.sp, self._part.of_block
        if query.shape[1] % sp.size:
            raise ValueError(f"sp={sp.size} does not divide {query.shape[1]} attention heads")
        if sp.size == 1:
            return self._block.attend(layer, query, key, value, scaling, limits)
        # Key/value heads are repeated just enough to be divisible; each still serves whole query heads.
        repeats = math.lcm(key.shape[1], sp.size) // key.shape[1]
        if repeats > 1:
            key, value = (states.repeat_interleave(repeats, 1) for states in (key, value))
        shares = [states.unflatten(1, (sp.size, -1)) for states in (query, key, value)]
        num_heads = [share.shape[2] for share in shares]
        query, key, value = exchange_for_columns(torch.cat(shares, 2), sp, sizes).split(num_heads, 1)
        if limits.sinks is not None:  # their gradient is a sum over ranks, as that of all weights
            limits = dataclasses.replace(limits, sinks=limits.sinks.chunk(sp.size)[sp.rank])
        out = self._block.attend(layer, query, key, value, scaling, limits)
        return exchange_for_rows(out, sp, sizes).flatten(1, 2)

    def recall(self, layer: int, inputs: DeltaInputs) -> Tensor:
        """See `DeltaRows.recall`."""
        return recall_over_ranks(self._rows, layer, inputs, self._part.mesh.tokens, self._part.num_tokens)


class _Seen(NamedTuple):
    """The keys that queries of all blocks see, as one block needs them."""

    given: Copies
    """Tokens of this block whose keys go to each rank, those to the first rank first."""
    num_given: list[int]
    num_taken: list[int]
    """Tokens whose keys come from each rank."""
    rows: PackedRows
    """The rows of this block: its queries, with the keys that they see."""


class _Block:
    """The queries of one block of a stream, which see keys of all blocks."""

    def __init__(self, offsets: Tensor, device: torch.device, dealt: Dealt, cp: Collective) -> None:
        self._offsets, self._device, self._shared, self._cp = offsets, device, dealt.shared, cp
        # Filler is after the last token.
        ends = torch.tensor([0, *itertools.accumulate(dealt.blocks)]).clamp(max=len(dealt.shared.kept))
        self._borders = ends.tolist()
        self._num_tokens = self._borders[cp.rank + 1] - self._borders[cp.rank]
        self._row = torch.repeat_interleave(torch.arange(len(offsets) - 1), offsets.diff())
        self._seen: dict[int | None, _Seen] = {}

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, limits: Limits = NO_LIMITS
    ) -> Tensor:
        """See `AttentionRows.attend`, of the tokens of the block."""
        if limits.window not in self._seen:  # by the first layer of each kind
            self._seen[limits.window] = self._of_window(limits.window)
        seen, num_filler = self._seen[limits.window], len(query) - self._num_tokens
        key, value = exchange_rows(
            seen.given.of_rows(torch.cat([key, value], 1)[: self._num_tokens]),
            self._cp,
            seen.num_given,
            seen.num_taken,
        ).chunk(2, 1)
        if not self._num_tokens:  # takes part in the exchange, backward too
            return query + key.sum()
        out = seen.rows.attend(layer, query[: self._num_tokens], key, value, scaling, limits)
        return functional.pad(out, (0, 0, 0, 0, 0, num_filler)) if num_filler else out

    def _of_window(self, window: int | None) -> _Seen:
        views, rank = [self._view(block, window) for block in range(self._cp.size)], self._cp.rank
        start, stop = self._borders[rank : rank + 2]
        asked_for = [view.keys[(view.keys >= start) & (view.keys < stop)] - start for view in views]
        view = views[rank]
        taken = torch.searchsorted(view.keys, torch.tensor(self._borders)).diff()
        place = torch.searchsorted(view.keys, view.place)
        return _Seen(
            Copies.of(torch.cat(asked_for), self._num_tokens, self._device),
            [len(tokens) for tokens in asked_for],
            taken.tolist(),
            PackedRows(view.offsets, self._device, SharedPrefixes(view.kept, place, view.asked)),
        )

    def _view(self, block: int, window: int | None) -> _View:
        """Return what the queries of a block see."""
        token = self._shared.kept[self._borders[block] : self._borders[block + 1]]  # ascending within a block
        row = self._row[token]
        is_first = functional.pad((token.diff() != 1) | (row.diff() != 0), (1, 0), value=True)[: len(token)]
        first = token[is_first]
        num_asking = torch.bincount(is_first.cumsum(0) - 1, minlength=len(first))
        start = self._offsets[row[is_first]]
        if window is not None:
            start = start.maximum(first - window + 1)
        lengths = first + num_asking - start
        offsets = functional.pad(lengths.cumsum(0), (1, 0))
        token = torch.arange(int(offsets[-1])) + torch.repeat_interleave(start - offsets[:-1], lengths)
        asks = token >= torch.repeat_interleave(first, lengths)
        place = self._shared.place[token]
        is_seen = torch.zeros(self._borders[-1], dtype=torch.bool)
        is_seen[place] = True
        # What asks nothing has the first query of its row.
        asked = asks.cumsum(0) - asks.long()
        return _View(offsets, asks.nonzero().flatten(), place, asked, is_seen.nonzero().flatten())


class _View(NamedTuple):
    """What the N ranges of queries of a block see, as rows of W tokens in all."""

    offsets: Tensor
    """[N+1] int64."""
    kept: Tensor
    """Indices of the tokens that ask, ascending."""
    place: Tensor
    """[W] int64: places in the stream."""
    asked: Tensor
    """[W] int64, see `SharedPrefixes.asked`."""
    keys: Tensor
    """Tokens of the stream that are seen, ascending."""


def _shares(num: int, num_parts: int) -> tuple[int, ...]:
    """Return the sizes of equal parts, which differ by at most one."""
    return tuple(num // num_parts + (part < num % num_parts) for part in range(num_parts))


def _part(sizes: Sequence[int], rank: int) -> slice:
    start = sum(sizes[:rank])
    return slice(start, start + sizes[rank])
