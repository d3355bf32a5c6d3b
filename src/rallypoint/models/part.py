"""The rectangle of a weight that a rank holds: pure data, without a tensor.

Owns: the arithmetic of cuts, and a sum that depends on none. Must not know: who cuts (tensor parallelism, FSDP2), or
how a rectangle is read or sent.
Invariant: every rectangle is in the coordinates of the whole weight, however often it was cut.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Iterator, Sequence
from typing import Self

import numpy as np
import numpy.typing as npt

MODULUS, _BASE = 2**64, 0x9E3779B97F4A7C15
"""Modulus of sums over parts, and the base of their factors: an odd number near 2**64 over the golden ratio."""


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """A rectangle of a weight, in the coordinates of the whole.

    A [6, 4] matrix is cut by columns over two tensor-parallel ranks, and rank 1 holds the last two columns. FSDP2 then
    shards the rows of that part over four ranks, two rows each: the last rank gets none.

    >>> columns = Part.whole([6, 4]).cut(dim=1, index=1, count=2)
    >>> columns
    Part(shape=(6, 4), starts=(0, 2), sizes=(6, 2))
    >>> columns.rows(2, 4)
    Part(shape=(6, 4), starts=(2, 2), sizes=(2, 2))
    >>> columns.rows(6, 6).num_elements
    0
    """

    shape: tuple[int, ...]
    """Shape of the whole weight."""
    starts: tuple[int, ...]
    """First index of each dimension."""
    sizes: tuple[int, ...]
    """Number of indices of each dimension: the shape of the tensor that the rank holds."""

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Self:
        """Return all of a weight."""
        return cls(tuple(shape), (0,) * len(shape), tuple(shape))

    def cut(self, dim: int, index: int, count: int) -> Part:
        """Return one of `count` equal cuts of this part along a dimension.

        Raises:
            ValueError: the dimension does not divide by `count`.
        """
        if self.sizes[dim] % count:
            raise ValueError(f"dimension {dim} of {list(self.sizes)} does not divide into {count} equal parts")
        size = self.sizes[dim] // count
        return self.narrow(dim, index * size, size)

    def rows(self, start: int, stop: int) -> Part:
        """Return the rows from `start` up to `stop`, counted within this part; there may be none."""
        return self.narrow(0, start, stop - start)

    def narrow(self, dim: int, start: int, size: int) -> Part:
        """Return `size` indices of one dimension of this part, from `start` on, as `torch.narrow` does.

        Raises:
            ValueError: they are not all within this part.
        """
        if not (start >= 0 and size >= 0 and start + size <= self.sizes[dim]):
            raise ValueError(
                f"indices {start} to {start + size} of dimension {dim} are not within a part of {list(self.sizes)}"
            )
        starts, sizes = list(self.starts), list(self.sizes)
        starts[dim], sizes[dim] = starts[dim] + start, size
        return Part(self.shape, tuple(starts), tuple(sizes))

    def overlap(self, other: Part) -> Part | None:
        """Return the intersection of two parts of one weight; None if it is empty.

        >>> Part.whole([6, 4]).rows(0, 4).overlap(Part.whole([6, 4]).rows(3, 6))
        Part(shape=(6, 4), starts=(3, 0), sizes=(1, 4))
        """
        assert self.shape == other.shape, f"parts of two weights: {self.shape} and {other.shape}"
        starts = tuple(map(max, self.starts, other.starts))
        stops = map(min, self._stops, other._stops)
        sizes = tuple(max(0, stop - start) for start, stop in zip(starts, stops, strict=True))
        return Part(self.shape, starts, sizes) if math.prod(sizes) else None

    def within(self, outer: Part) -> tuple[slice, ...]:
        """Return the index of this part in the tensor of a larger one.

        >>> Part.whole([6, 4]).rows(3, 4).within(Part.whole([6, 4]).rows(2, 6))
        (slice(1, 2, None), slice(0, 4, None))
        """
        seen = self.seen_from(outer)
        return tuple(slice(start, start + size) for start, size in zip(seen.starts, seen.sizes, strict=True))

    def seen_from(self, outer: Part) -> Part:
        """Return this part in the coordinates of a larger one.

        >>> Part.whole([6, 4]).rows(3, 4).seen_from(Part.whole([6, 4]).rows(2, 6))
        Part(shape=(4, 4), starts=(1, 0), sizes=(1, 4))
        """
        starts = tuple(inner - start for inner, start in zip(self.starts, outer.starts, strict=True))
        return Part(outer.sizes, starts, self.sizes)

    def run_within(self, outer: Part) -> slice | None:
        """Return the slice of this part in the flattened tensor of a larger one; None if it is not contiguous there.

        >>> matrix = Part.whole([6, 4])
        >>> matrix.rows(3, 5).run_within(matrix.rows(2, 6)), matrix.cut(dim=1, index=0, count=2).run_within(matrix)
        (slice(4, 12, None), None)
        """
        seen = self.seen_from(outer)
        first = next((dim for dim, size in enumerate(seen.sizes) if size > 1), len(seen.sizes))
        if seen.sizes[first + 1 :] != seen.shape[first + 1 :]:
            return None
        offset = 0
        for start, extent in zip(seen.starts, seen.shape, strict=True):
            offset = offset * extent + start
        return slice(offset, offset + self.num_elements)

    def runs(self) -> Iterator[tuple[int, int]]:
        """Yield the contiguous runs of this part in the whole, in order: first element, and number of elements.

        >>> list(Part.whole([6, 4]).rows(3, 5).runs()), list(Part.whole([2, 4]).cut(dim=1, index=1, count=2).runs())
        ([(12, 8)], [(2, 2), (6, 2)])
        """
        if not self.num_elements:
            return
        cut = max((dim for dim, size in enumerate(self.sizes) if size < self.shape[dim]), default=0)
        strides = [math.prod(self.shape[dim + 1 :]) for dim in range(len(self.shape))]
        begin, count = sum(map(operator.mul, self.starts, strides)), math.prod(self.sizes[cut:])
        for index in itertools.product(*map(range, self.sizes[:cut])):
            yield begin + sum(map(operator.mul, index, strides)), count

    def evenly(self) -> Iterator[Part]:
        """Cut it so that the runs of each part are equally far apart; mostly they are, and it is one part.

        >>> [part.starts for part in Part((2, 4, 4), (0, 1, 0), (2, 2, 4)).evenly()]
        [(0, 1, 0)]
        >>> [part.starts for part in Part((2, 4, 4), (0, 1, 0), (2, 2, 2)).evenly()]
        [(0, 1, 0), (1, 1, 0)]
        """
        cut = max((dim for dim, size in enumerate(self.sizes) if size < self.shape[dim]), default=0)
        first = next((dim for dim, size in enumerate(self.sizes) if size > 1), cut)
        if self.sizes[first + 1 : cut] == self.shape[first + 1 : cut]:
            yield self
            return
        for index in range(self.sizes[first]):
            yield from self.narrow(first, index, 1).evenly()

    @property
    def num_elements(self) -> int:
        """Number of elements that the rank holds."""
        return math.prod(self.sizes)

    @property
    def is_whole(self) -> bool:
        """Whether it is the whole weight."""
        return self.sizes == self.shape

    @property
    def _stops(self) -> tuple[int, ...]:
        return tuple(start + size for start, size in zip(self.starts, self.sizes, strict=True))


def rectangles_of(part: Part, max_elements: int) -> Iterator[Part]:
    """Cut a part into rectangles of a limited size, along its first dimensions.

    >>> [(cut.starts, cut.sizes) for cut in rectangles_of(Part.whole([5, 3]), 6)]
    [((0, 0), (2, 3)), ((2, 0), (2, 3)), ((4, 0), (1, 3))]
    >>> [(cut.starts, cut.sizes) for cut in rectangles_of(Part.whole([1, 5]), 2)]
    [((0, 0), (1, 2)), ((0, 2), (1, 2)), ((0, 4), (1, 1))]
    """
    if part.num_elements <= max_elements:
        yield part
        return
    dim = next(dim for dim, size in enumerate(part.sizes) if size > 1)
    step = max(1, max_elements // (part.num_elements // part.sizes[dim]))
    for start in range(0, part.sizes[dim], step):
        yield from rectangles_of(part.narrow(dim, start, min(step, part.sizes[dim] - start)), max_elements)


def sum_of(data: memoryview | bytes, part: Part, size: int, key: int) -> int:
    """Return the sum of a part's elements, each times a power of a number for its place in the whole, modulo 2**64.

    The sums of any parts that are a whole add up to the same: those that ranks took while they wrote are the sum of the
    tensor, however it was cut. All factors are odd, so no changed element goes unnoticed; of larger changes, by chance,
    about one in 2**32 does at most.

    >>> matrix = Part.whole([2, 2])
    >>> left, right = (matrix.cut(dim=1, index=index, count=2) for index in range(2))
    >>> of_columns = sum_of(b"ac", left, 1, 0) + sum_of(b"bd", right, 1, 0)
    >>> of_columns % MODULUS == sum_of(b"abcd", matrix, 1, 0)
    True

    Args:
        data: bytes of the part's elements.
        part: runs of the same length, equally far apart.
        size: bytes of an element.
        key: of the tensor, so that tensors that change places change the sum.
    """
    (first, length), *others = itertools.islice(part.runs(), 2) if part.num_elements else [(0, 1)]
    values = np.frombuffer(data, f"u{size}").astype(np.uint64).reshape(-1, length)
    of_runs = _powers(pow(_BASE, others[0][0] - first if others else 1, MODULUS), len(values))
    of_places = _powers_of_base((length - 1).bit_length())[:length]
    return int((values @ of_places) @ of_runs) * pow(_BASE, first, MODULUS) * (key | 1) % MODULUS


def _powers(base: int, count: int) -> npt.NDArray[np.uint64]:
    """Return the first powers of a number modulo 2**64, from its power of 0."""
    powers, done = np.ones(count, np.uint64), 1
    while done < count:
        more = min(done, count - done)
        powers[done : done + more] = powers[:more] * np.uint64(pow(base, done, MODULUS))
        done += more
    return powers


@functools.cache
def _powers_of_base(bits: int) -> npt.NDArray[np.uint64]:
    """Return the first 2**bits of them: at most twice as many as a piece that is written has elements."""
    return _powers(_BASE, 2**bits)
