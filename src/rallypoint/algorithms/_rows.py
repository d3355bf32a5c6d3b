"""Arithmetic over trained tokens: picked out of ragged rows, summed along them, normalised in groups, put back.

Owns: how to do this without padding and without a loop over rows. Invariants: all arithmetic is float64;
numbers outside the mask are never read, so that a NaN there cannot leak; `sums_to_row_end` gives a row the
same bits whichever other rows are in the batch.
"""

from __future__ import annotations

import dataclasses
from typing import cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

NO_SIGNAL = 1e-6
"""Numbers that differ by no more than this share of the largest of them are equal: rounding is no signal."""


def trained_tokens(
    loss_mask: Bool[Tensor, " T"], offsets: Int[Tensor, " B1"]
) -> tuple[Int[Tensor, " N"], Int[Tensor, " N"]]:
    """Return the positions of the N trained tokens, and the row of each.

    >>> mask = torch.tensor([False, True, True, False, True, True])
    >>> [part.tolist() for part in trained_tokens(mask, torch.tensor([0, 3, 3, 6]))]
    [[1, 2, 4, 5], [0, 0, 2, 2]]
    """
    positions = loss_mask.nonzero().squeeze(-1)
    rows = torch.searchsorted(offsets, positions, right=True) - 1
    return positions, rows


@dataclasses.dataclass(frozen=True, eq=False)
class Turns:
    """The turns of rows: runs of neighbouring trained tokens."""

    positions: Int[Tensor, " N"]
    """Where the N trained tokens are."""
    of_token: Int[Tensor, " N"]
    """Number of the turn of each, from 0."""
    rows: Int[Tensor, " K"]
    """The row of each of the K turns."""
    firsts: Int[Tensor, " K"]
    """Index, among the N tokens, of the first one of each turn."""

    @classmethod
    def of(cls, loss_mask: Bool[Tensor, " T"], offsets: Int[Tensor, " B1"]) -> Turns:
        """Return the turns of rows.

        >>> mask = torch.tensor([False, True, True, False, True, True])
        >>> turns = Turns.of(mask, torch.tensor([0, 5, 6]))
        >>> turns.of_token.tolist(), turns.rows.tolist(), turns.places.tolist()
        ([0, 0, 1, 2], [0, 0, 1], [0, 1, 0])
        """
        positions, rows = trained_tokens(loss_mask, offsets)
        is_first = torch.ones(len(positions), dtype=torch.bool)
        is_first[1:] = (positions[1:] != positions[:-1] + 1) | (rows[1:] != rows[:-1])
        return cls(positions, is_first.long().cumsum(0) - 1, rows[is_first], is_first.nonzero().squeeze(-1))

    @property
    def places(self) -> Int[Tensor, " K"]:
        """Number of each turn in its row, from 0."""
        return torch.arange(len(self.rows)) - torch.searchsorted(self.rows, self.rows)

    def sums(self, x: Float[Tensor, " T"]) -> Float[Tensor, " K"]:
        """Return the sum of each turn, in float64."""
        return row_sums(x[self.positions], self.of_token, len(self.rows))

    def spread(self, by_turn: Float[Tensor, " K"], like: Float[Tensor, " T"]) -> Float[Tensor, " T"]:
        """Give every trained token the number of its turn, and all others 0."""
        return put_back(by_turn[self.of_token], self.positions, like)


def put_back(x: Float[Tensor, " N"], positions: Int[Tensor, " N"], like: Float[Tensor, " T"]) -> Float[Tensor, " T"]:
    """Return zeros of the shape and type of `like`, with x at the positions."""
    return torch.zeros_like(like).index_copy_(0, positions, x.to(like.dtype))


def sums_to_row_end(
    x: Float[Tensor, " N"], rows: Int[Tensor, " N"], *, decay: float | Float[Tensor, " N"]
) -> Float[Tensor, " N"]:
    """Return y[n] = x[n] + decay * y[n+1], where y is 0 after the last token of each row.

    A decay for each token must be the same at all tokens of a row.

    Two rows of two and four tokens; after the first pass each sum covers two tokens, after the second
    four, and so on, so that rows of n tokens need log2(n) passes.

    >>> x = torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0, 8.0])
    >>> sums_to_row_end(x, torch.tensor([0, 0, 1, 1, 1, 1]), decay=0.5).tolist()
    [1.5, 1.0, 2.0, 2.0, 4.0, 8.0]
    """
    sums, stride = x.to(torch.float64), 1
    while bool((same_row := rows[stride:] == rows[:-stride]).any()):
        beyond = torch.where(same_row, sums[stride:], 0.0)
        factor = decay[:-stride] ** stride if isinstance(decay, Tensor) else decay**stride
        sums = torch.cat([sums[:-stride] + factor * beyond, sums[-stride:]])
        stride *= 2
    return sums


def numbered(groups: Int[Tensor, " N"]) -> tuple[Int[Tensor, " N"], int]:
    """Return the same groups, numbered 0, 1, 2 in the order of their names, and how many there are.

    >>> group, num_groups = numbered(torch.tensor([5, 2, 5, 9]))
    >>> group.tolist(), num_groups
    ([1, 0, 1, 2], 3)
    """
    unique = torch.unique(groups, return_inverse=True)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    names, group = cast("tuple[Tensor, Tensor]", unique)
    return group, len(names)


def row_sums(x: Float[Tensor, " T"], rows: Int[Tensor, " T"], num_rows: int) -> Float[Tensor, " B"]:
    """Return the sum of each row, in float64; a row without tokens has 0.

    >>> row_sums(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0, 0, 2]), 3).tolist()
    [3.0, 0.0, 4.0]
    """
    return torch.zeros(num_rows, dtype=torch.float64, device=x.device).index_add(0, rows, x.to(torch.float64))


def group_sums(x: Float[Tensor, " N"], groups: Int[Tensor, " N"]) -> Float[Tensor, " N"]:
    """Return for each member the sum over its group, in float64.

    >>> group_sums(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([7, 3, 7])).tolist()
    [5.0, 2.0, 5.0]
    """
    group, num_groups = numbered(groups)
    return row_sums(x, group, num_groups)[group]


def differing(
    x: Float[Tensor, " N"], groups: Int[Tensor, " N"], sizes: Float[Tensor, " N"] | None = None
) -> Bool[Tensor, " N"]:
    """Return which members are in a group whose numbers differ by more than rounding: where there is a signal.

    This is the only rule for that: of advantages, dynamic sampling and masks of rows. It is relative (`NO_SIGNAL`), so
    that it means the same for rewards of any unit.

    >>> x = torch.tensor([1.0, 0.1, 3.0, 0.1, 0.1, 7.0])
    >>> differing(x, torch.tensor([5, 2, 5, 2, 2, 9])).tolist()
    [True, False, True, False, False, False]

    Args:
        x: [N] the numbers.
        groups: [N] the group of each.
        sizes: [N] of what each is a sum, without signs, because rounding is relative to that; None: |x|.
    """
    group, num_groups = numbered(groups)
    x, zeros = x.to(torch.float64), torch.zeros(num_groups, dtype=torch.float64, device=x.device)
    smallest = zeros.scatter_reduce(0, group, x, "amin", include_self=False)
    largest = zeros.scatter_reduce(0, group, x, "amax", include_self=False)
    sizes = x.abs() if sizes is None else sizes.to(torch.float64)
    size = zeros.scatter_reduce(0, group, sizes, "amax", include_self=False)
    return ~(largest - smallest <= NO_SIGNAL * size)[group]  # NaN differs, and so stays visible


def normalized_in_groups(
    x: Float[Tensor, " N"],
    groups: Int[Tensor, " N"],
    *,
    normalize_std: bool,
    sizes: Float[Tensor, " N"] | None = None,
) -> Float[Tensor, " N"]:
    """Return x minus its group's mean, and if asked divided by its group's (population) std, in float64.

        advantages[b] = (scores[b] - mean of the group) / std of the group

    With `normalize_std` this is GRPO (DeepSeekMath, arXiv 2402.03300); without the division it is Dr. GRPO (arXiv
    2503.20783). A group with a single member gets exactly 0.

    Groups without a signal, see `differing`, give exactly 0: the mean of three times 0.1 is not 0.1 in floating point,
    and dividing by the std would blow the difference up.

    >>> x = torch.tensor([1.0, 0.1, 3.0, 0.1, 0.1, 7.0])
    >>> normalized_in_groups(x, torch.tensor([5, 2, 5, 2, 2, 9]), normalize_std=True).tolist()
    [-1.0, 0.0, 1.0, 0.0, 0.0, 0.0]

    Args:
        x: [N] such as one number per rollout that exists; a failed rollout has no row.
        groups: [N] int64 which prompt; need be neither sorted nor adjacent nor of equal size.
        normalize_std: divide by the group's standard deviation.
        sizes: [N] of what each x is a sum, without signs; None: |x|.
    """
    group, num_groups = numbered(groups)
    x, zeros = x.to(torch.float64), torch.zeros(num_groups, dtype=torch.float64, device=x.device)
    count = zeros.index_add(0, group, torch.ones_like(x))
    centered = x - (zeros.index_add(0, group, x) / count)[group]
    if normalize_std:
        centered = centered / (zeros.index_add(0, group, centered.square()) / count).sqrt()[group]
    return torch.where(differing(x, groups, sizes), centered, 0.0)


def chance_of_none(num: Float[Tensor, " B"], num_wrong: Float[Tensor, " B"], k: int) -> Float[Tensor, " B"]:
    """Return C(num_wrong, k) / C(num, k): the chance that k of `num` are all wrong."""
    chance = torch.ones_like(num)
    for drawn in range(k):
        chance = chance * ((num_wrong - drawn) / (num - drawn).clamp_min(1.0)).clamp_min(0.0)
    return chance
