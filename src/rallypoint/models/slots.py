"""The padded layout in which attention is computed: rectangles of rows, head by head.

Owns: the order of folded states, and folding and unfolding with gradients. Must not know: how attention is computed.
Rows of similar length form a rectangle, padded to the longest of them and to a multiple of the vector length. Its order
is row, key/value head, slot (a padded position), and query of that head. Queries are cut into blocks of slots first, so
that each block is contiguous over all rows. One gather does all of it:

    stream [T, H, D]  ->  folded [for each rectangle, and block of slots, R * K * slots * share, D]   with H = K * share

Invariants: padding repeats the last token of its row, so that non-finite numbers stay in their own row, and has no
gradient. A token that several rows share has a slot in each of them: its output is that of the first, and the gradient
of its key and value is the sum over all, in a fixed order. Filler after the last row has no slot: its output and
gradient are zero. Where only the last tokens of rows ask, the slots that no row of a rectangle asks at have no query.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from rallypoint.models.prefix import SharedPrefixes
from rallypoint.parallel.transfer import sent

_ALIGNMENT = 32
"""Numbers in the longest vectors in bfloat16; on a CPU a softmax over 159 takes twice as long as one over 160."""


@dataclasses.dataclass(frozen=True, slots=True)
class PaddedRows:
    """Rows that are padded to one length."""

    num_rows: int
    longest: int
    """Number of slots of each row."""
    first: int = 0
    """First slot that has a query."""

    @property
    def num_slots(self) -> int:
        """Rows times length."""
        return self.num_rows * self.longest

    @property
    def num_queries(self) -> int:
        """Likewise, slots with a query."""
        return self.num_rows * (self.longest - self.first)


@dataclasses.dataclass(frozen=True, slots=True)
class Shared:
    """The M heads of tokens that have several slots."""

    places: Tensor
    """[M] their indices in the stream's [T * H]."""
    slots: Tensor
    """Their indices in folded states: all of the first, then all of the second, and so on."""
    starts: Tensor
    """[M] index in `slots` of the first of each."""


@dataclasses.dataclass(frozen=True, slots=True)
class Fold:
    """The folding of one kind of states: queries, or keys and values."""

    stream: Tensor
    """[slots * heads]: index in the stream's [T * H] for each place of folded states."""
    own: Tensor
    """[S * H]: the place of each of the S tokens of rows; the first one, of a token that rows share."""
    size: int
    """T * H of the stream, filler included."""
    shared: Shared | None


class Slots:
    """The slots of some packed rows."""

    def __init__(self, offsets: Tensor, classes: Sequence[Tensor], shared: SharedPrefixes, num_filler: int) -> None:
        """Lay rows out, on the CPU.

        Args:
            offsets: [B+1] of the rows.
            classes: the rows of each rectangle; every row with tokens is in one.
            shared: the tokens of the rows that are in the stream.
            num_filler: number of tokens after the last row.
        """
        lengths, before = offsets[1:] - offsets[:-1], torch.zeros(len(offsets) - 1, dtype=torch.int64)
        if shared.asked is not None:
            before = lengths - shared.num_kept(offsets)
        firsts = [int(before[rows].min()) // _ALIGNMENT * _ALIGNMENT for rows in classes]
        self.rectangles = [
            PaddedRows(len(rows), _aligned(int(lengths[rows].max())), first)
            for rows, first in zip(classes, firsts, strict=True)
        ]
        tokens = [
            offsets[rows].unsqueeze(1) + torch.arange(shape.longest).minimum(lengths[rows].unsqueeze(1) - 1)
            for rows, shape in zip(classes, self.rectangles, strict=True)
        ]
        token_of_slot = torch.cat([part.flatten() for part in tokens] or [torch.zeros(0, dtype=torch.int64)])
        # The first slot of a token is its own; those after it are padding.
        own = torch.ones_like(token_of_slot, dtype=torch.bool)
        own[1:] = token_of_slot[1:] != token_of_slot[:-1]
        slot_of_token = torch.nonzero(own).flatten()[token_of_slot[own].argsort()]
        self._copies: tuple[Tensor, Tensor] | None = None
        self._keys = self._queries = _Places(token_of_slot, slot_of_token)
        if len(shared.kept) < len(slot_of_token):
            order = shared.place.argsort(stable=True)
            self._copies = shared.place[order], slot_of_token[order]
            num_copies = torch.bincount(shared.place)
            firsts = slot_of_token[order[num_copies.cumsum(0) - num_copies]]
            self._keys = _Places(shared.place[token_of_slot], firsts)
            asked = shared.place if shared.asked is None else shared.asked
            self._queries = _Places(asked[token_of_slot], slot_of_token[shared.kept])
        self._queries = self._queries.behind(self.rectangles)
        self._num_filler = num_filler

    def folds(self, kv_heads: int, share: int, blocks: Sequence[int], device: torch.device) -> tuple[Fold, Fold]:
        """Return the foldings of queries, and of keys and values.

        Args:
            kv_heads: K.
            share: queries of a key/value head.
            blocks: slots in a block of queries, for each rectangle.
            device: of the states.
        """
        of_keys = self._fold(self._keys, self._key_places(kv_heads), device)
        of_queries = self._fold(self._queries, _folded(self.rectangles, kv_heads, share, blocks), device)
        return of_queries, dataclasses.replace(of_keys, shared=self._shared(kv_heads, device))

    def _fold(self, of: _Places, places: Tensor, device: torch.device) -> Fold:
        heads = torch.arange(places.shape[1])
        stream = torch.empty(places.numel(), dtype=torch.int64)
        stream[places] = of.token_of_slot.unsqueeze(1) * len(heads) + heads
        own = places[of.slot_of_token].flatten()
        return Fold(
            sent(stream, device), sent(own, device), (len(of.slot_of_token) + self._num_filler) * len(heads), None
        )

    def _shared(self, kv_heads: int, device: torch.device) -> Shared | None:
        if self._copies is None:
            return None
        token, slot = self._copies
        num_slots = torch.bincount(token, minlength=len(self._keys.slot_of_token))
        several = num_slots > 1
        token, slot = token[several[token]], slot[several[token]]
        heads = torch.arange(kv_heads)
        order = (token.unsqueeze(1) * kv_heads + heads).flatten().argsort(stable=True)
        num_slots = num_slots[several].repeat_interleave(kv_heads)
        places = torch.nonzero(several) * kv_heads + heads
        slots = self._key_places(kv_heads)[slot].flatten()[order]
        starts = num_slots.cumsum(0) - num_slots
        return Shared(sent(places.flatten(), device), sent(slots, device), sent(starts, device))

    def _key_places(self, kv_heads: int) -> Tensor:
        whole = [dataclasses.replace(shape, first=0) for shape in self.rectangles]
        return _folded(whole, kv_heads, 1, [shape.longest for shape in whole])


@dataclasses.dataclass(frozen=True, slots=True)
class _Places:
    """Where states of one kind are: which token of their stream each slot has, and which slot is that token's own."""

    token_of_slot: Tensor
    slot_of_token: Tensor

    def behind(self, rectangles: Sequence[PaddedRows]) -> _Places:
        """Return the same without slots before the first query of each rectangle."""
        if not any(shape.first for shape in rectangles):
            return self
        has_query = torch.cat([(torch.arange(s.longest) >= s.first).repeat(s.num_rows) for s in rectangles])
        return _Places(self.token_of_slot[has_query], (has_query.cumsum(0) - 1)[self.slot_of_token])


def _folded(rectangles: Sequence[PaddedRows], kv_heads: int, share: int, blocks: Sequence[int]) -> Tensor:
    """Return the place of each head of each slot with a query in folded states: [slots, heads]."""
    places: list[Tensor] = []
    start = 0
    for shape, block in zip(rectangles, blocks, strict=True):
        rows, heads = torch.arange(shape.num_rows).view(-1, 1, 1, 1), torch.arange(kv_heads).view(-1, 1)
        longest = shape.longest - shape.first
        slots = torch.arange(longest).view(-1, 1, 1)
        begins = slots // block * block  # first slot of the block
        size = (longest - begins).clamp(max=block)
        found = ((rows * kv_heads + heads) * size + slots - begins) * share + torch.arange(share)
        found += begins * (shape.num_rows * kv_heads * share)
        places.append((start + found).view(shape.num_queries, -1))
        start += places[-1].numel()
    return torch.cat(places or [torch.zeros(0, kv_heads * share, dtype=torch.int64)])


def _aligned(length: int) -> int:
    """Return the number of slots of a row: a multiple of the vector length, except for short rows.

    >>> _aligned(7), _aligned(32), _aligned(33), _aligned(128)
    (7, 32, 64, 128)
    """
    return length if length <= _ALIGNMENT else -(-length // _ALIGNMENT) * _ALIGNMENT


class Folded(torch.autograd.Function):
    """[T, H, D] -> [slots * heads, D]."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, fold: Fold) -> Tensor:  # noqa: D102 - torch's own name
        ctx.fold, ctx.shape = fold, states.shape
        return states.reshape(-1, states.shape[-1]).index_select(0, fold.stream)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # noqa: D102  # pyright: ignore[reportIncompatibleMethodOverride] - torch passes one gradient per output
        total, shared = _at_own(grad, ctx.fold), ctx.fold.shared
        if shared is not None:
            # `embedding_bag` is torch's fastest sum of rows, in float32 for half precision.
            total.index_copy_(0, shared.places, functional.embedding_bag(shared.slots, grad, shared.starts, mode="sum"))
        return total.view(ctx.shape), None


class Unfolded(torch.autograd.Function):
    """[slots * heads, D] -> [T * H, D]."""

    @staticmethod
    def forward(ctx: Any, slots: Tensor, fold: Fold) -> Tensor:  # noqa: D102 - torch's own name
        ctx.fold, ctx.shape = fold, slots.shape
        return _at_own(slots, fold)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # noqa: D102  # pyright: ignore[reportIncompatibleMethodOverride] - torch passes one gradient per output
        own = ctx.fold.own
        return grad.new_zeros(ctx.shape).index_copy_(0, own, grad[: len(own)]), None


def _at_own(slots: Tensor, fold: Fold) -> Tensor:
    """Return the values at the place of each head of the stream, and zero for filler: [T * H, D]."""
    if fold.size == len(fold.own):
        return slots.index_select(0, fold.own)
    found = slots.new_empty(fold.size, slots.shape[1])
    torch.index_select(slots, 0, fold.own, out=found[: len(fold.own)])
    found[len(fold.own) :].zero_()
    return found
