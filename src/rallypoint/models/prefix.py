"""Prefixes that rows of a group share, so that a pass computes them once.

The rollouts of a prompt begin with the same tokens, for which a causal model computes the same. The stream that passes
through the model has a shared prefix once: all rows read its keys and values, and its gradient is the sum over them.
Prefixes are found by comparing tokens, so nothing relies on where a prompt ends.

    rows              5 6 7 | 5 6 8 9 | 4 4        the first two of one group
    stream            5 6 7     8 9     4 4
    kept              0 1 2     5 6     7 8        index in the rows, for each token of the stream
    place             0 1 2   0 1 3 4   5 6        index in the stream, for each token of the rows
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from rallypoint.parallel.transfer import sent


@dataclasses.dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """The S of the T tokens of some rows that are computed."""

    kept: Tensor
    """[S] int64, ascending unless they were `ordered`: the computed tokens."""
    place: Tensor
    """[T] int64: index in the stream of the token computed in place of each."""
    asked: Tensor | None = None
    """[T] int64: index among `kept`, whose tokens are the queries; None if these are the stream, which has the keys."""

    @classmethod
    def of(cls, offsets: Tensor, tokens: Tensor, groups: Tensor, experts: Tensor | None = None) -> SharedPrefixes:
        """Compare every row with the first one of its group.

        >>> offsets, tokens = torch.tensor([0, 3, 7, 9]), torch.tensor([5, 6, 7, 5, 6, 8, 9, 4, 4])
        >>> shared = SharedPrefixes.of(offsets, tokens, groups=torch.tensor([1, 1, 0]))
        >>> shared.kept.tolist(), shared.place.tolist()
        ([0, 1, 2, 5, 6, 7, 8], [0, 1, 2, 0, 1, 3, 4, 5, 6])

        Args:
            offsets: [B+1] of the rows.
            tokens: [T] int64.
            groups: [B] int64: only rows with the same number are compared.
            experts: [T, bytes]: tokens that are to be sent to others are not the same.
        """
        lengths = offsets[1:] - offsets[:-1]
        _, group = torch.unique(groups, return_inverse=True)
        rows = torch.arange(len(lengths))
        first = torch.full_like(rows, len(rows)).scatter_reduce_(0, group, rows, "amin")[group]
        row = torch.repeat_interleave(rows, lengths)
        own = torch.arange(len(tokens))
        within = own - offsets[:-1][row]
        twin = torch.where(within < lengths[first[row]], offsets[:-1][first[row]] + within, own)
        # A token beyond the end of the first row has no twin but itself.
        differs = (tokens != tokens[twin]) | ((twin == own) & (first[row] != row))
        if experts is not None:
            differs |= (experts != experts[twin]).any(1)
        num_differing = torch.cat([torch.zeros(1, dtype=torch.int64), differs.cumsum(0)])
        alike = num_differing[1:] == num_differing[offsets[:-1]][row]
        computed = ~alike | (first[row] == row)
        place = (computed.cumsum(0) - 1)[torch.where(computed, own, twin)]
        return cls(torch.nonzero(computed).flatten(), place)

    @classmethod
    def none(cls, offsets: Tensor) -> SharedPrefixes:
        """Return all tokens of rows, of which none is shared."""
        every = torch.arange(int(offsets[-1]))
        return cls(every, every)

    @property
    def num_keys(self) -> int:
        """Tokens of the stream."""
        return int(self.place.max()) + 1 if len(self.place) else 0

    def num_kept(self, offsets: Tensor) -> Tensor:
        """Return how many tokens of each row are computed: [B]."""
        is_kept = torch.zeros(int(offsets[-1]) + 1, dtype=torch.int64)
        is_kept[self.kept + 1] = 1
        return is_kept.cumsum(0)[offsets].diff()

    def ordered(self, order: Tensor) -> SharedPrefixes:
        """Return the same for a stream in another order, [S] indices in this one."""
        return SharedPrefixes(self.kept[order], order.argsort()[self.place])


def pick(states: Tensor, places: Tensor, num_rows: int) -> Tensor:
    """Gather rows of a tensor, with zeros after them: [S, E] and [N] -> [num_rows, E].

    The gradient of a row is the sum over its copies in a fixed order. That of `index_select` is summed by atomics on
    accelerators, with other bits every time.

    Args:
        states: [S, E].
        places: [N] int64, on the CPU.
        num_rows: N or more.
    """
    picked = Copies.of(places, len(states), states.device).of_rows(states)
    return functional.pad(picked, (0, 0, 0, num_rows - len(places))) if num_rows > len(places) else picked


class Copies(NamedTuple):
    """Rows of a matrix that are read, some of them several times."""

    places: Tensor
    """[N] their indices."""
    order: Tensor
    """[N] indices in `places`: the copies of the first row, then those of the second, and so on."""
    starts: Tensor
    """[R] where those of each row begin."""

    @classmethod
    def of(cls, places: Tensor, num_rows: int, device: torch.device) -> Copies:
        """Take [N] indices, on the CPU, below `num_rows`."""
        counts = torch.bincount(places, minlength=num_rows)
        parts = places, places.argsort(stable=True), counts.cumsum(0) - counts
        return cls(*(sent(part, device) for part in parts))

    def of_rows(self, states: Tensor) -> Tensor:
        """[R, ...] -> [N, ...]; the gradient of a row is the sum over its copies, in a fixed order."""
        return _Copied.apply(states, self)


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, copies: Copies) -> Tensor:
        ctx.copies = copies
        return states.index_select(0, copies.places)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride] - torch passes one gradient per output
        if not len(grad):
            return grad.new_zeros(len(ctx.copies.starts), *grad.shape[1:]), None
        # A bag of embeddings is a sum of rows, in float32 for half precision.
        total = functional.embedding_bag(ctx.copies.order, grad.flatten(1).contiguous(), ctx.copies.starts, mode="sum")
        return total.view(len(ctx.copies.starts), *grad.shape[1:]), None
