"""The layout of published weights: the parts that the ranks of the actor hold, cut into rectangles and buckets.

Owns: the cut, and the layout of a bucket. Must not know: processes, or how a bucket gets from one to another. Sender
and receiver have the same manifest, so that a bucket carries no names.

A bucket is flat memory: a header (version and index of the bucket, 8 bytes each, and a checksum of 16 bytes for each
rectangle) and, from `HEADER_BYTES` on, the rectangles, each at a multiple of 64 bytes. A process needs memory for a few
buckets, whatever the size of a tensor. What several ranks hold is sent once, and a tensor that is cut over ranks is put
together only at its destination.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from rallypoint.errors import WeightsMismatchError
from rallypoint.models.part import Part, rectangles_of

HEADER_BYTES = 4096
"""Size of a bucket's header."""
CHECKSUMS_START, CHECKSUM_BYTES = 16, 16
"""First checksum in a header, and the size of one."""
BUCKET_BYTES = 2**20 + HEADER_BYTES
"""Default size of a bucket; the transports have sizes of their own."""

RELAY = -1
"""Stands for the sender where one process passes the buckets of all senders on."""

Checksum: TypeAlias = Literal["xxh3", "sums"]
"""`xxh3_128` of bytes, the fastest on a host, or `checksums.sums`, which accelerators can compute."""

_ALIGNMENT = 64
_MAX_RECTANGLES = (HEADER_BYTES - CHECKSUMS_START) // CHECKSUM_BYTES


@dataclasses.dataclass(frozen=True, slots=True)
class Held:
    """The part of a tensor that a rank holds."""

    dtype: torch.dtype
    """Type in which the part is sent."""
    part: Part


@dataclasses.dataclass(frozen=True, slots=True)
class Position:
    """Position of a rectangle in a tensor."""

    index: tuple[slice, ...]
    run: slice | None
    """Its bytes in the contiguous tensor; None if they do not lie end to end."""

    @classmethod
    def of(cls, part: Part, outer: Part, dtype: torch.dtype) -> Position:
        """Find a part in the tensor of a larger one.

        >>> Position.of(Part.whole([6, 4]).rows(3, 5), Part.whole([6, 4]), torch.float32)
        Position(index=(slice(3, 5, None), slice(0, 4, None)), run=slice(48, 80, None))
        """
        run = part.run_within(outer)
        in_bytes = None if run is None else slice(run.start * dtype.itemsize, run.stop * dtype.itemsize)
        return cls(part.within(outer), in_bytes)


@dataclasses.dataclass(frozen=True, slots=True)
class Rectangle:
    """A part of a tensor in a bucket."""

    name: str
    dtype: torch.dtype
    part: Part
    """Its coordinates in the whole tensor."""
    start: int
    """First byte in the bucket."""
    stop: int
    """The byte after its last one."""
    source: Position
    """Its position in the part that the sender holds."""
    target: Position
    """Its position in the whole tensor."""

    def view(self, memory: Tensor) -> Tensor:
        """Return its elements in the memory of a bucket."""
        return self.shaped(memory[self.start : self.stop])

    def shaped(self, run: Tensor) -> Tensor:
        """Return its elements, given its bytes."""
        return run.view(self.dtype).view(self.part.sizes)


@dataclasses.dataclass(frozen=True, slots=True)
class Bucket:
    """Rectangles that travel together."""

    sender: int
    """Rank of the actor that sends it, or `RELAY`."""
    rectangles: tuple[Rectangle, ...]

    @property
    def num_bytes(self) -> int:
        """Size of the header and all rectangles, rounded up."""
        return _aligned(self.rectangles[-1].stop)


@dataclasses.dataclass(frozen=True, slots=True)
class Manifest:
    """The buckets of every publish, in order; the same in all members."""

    shapes: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
    """Types and shapes of the whole tensors."""
    buckets: tuple[Bucket, ...]
    bucket_bytes: int
    """Bound on the size of a bucket."""
    checksum: Checksum
    """Kind of the rectangles' checksums; all members have one kind of device."""
    ranks: tuple[Mapping[str, Held], ...]
    """What each rank of the actor holds, by names of tensors; all else follows from it."""

    @property
    def num_bytes(self) -> int:
        """Size of all tensors."""
        return sum(math.prod(shape) * dtype.itemsize for dtype, shape in self.shapes.values())

    @classmethod
    def of(
        cls, ranks: Sequence[Mapping[str, Held]], *, bucket_bytes: int = BUCKET_BYTES, checksum: Checksum = "xxh3"
    ) -> Manifest:
        """Cut what ranks hold into buckets; a part that several of them hold is sent by the first one.

        Two ranks with two rows each of `w`, and both with the same `b`:

        >>> rows = [Part.whole([4, 2]).rows(0, 2), Part.whole([4, 2]).rows(2, 4)]
        >>> b = Held(torch.float32, Part.whole([2]))
        >>> manifest = Manifest.of([{"w": Held(torch.float32, part), "b": b} for part in rows])
        >>> [(bucket.sender, [(r.name, r.part.starts) for r in bucket.rectangles]) for bucket in manifest.buckets]
        [(0, [('w', (0, 0)), ('b', (0,))]), (1, [('w', (2, 0))])]

        Args:
            ranks: for each rank of the actor, name of a tensor -> the part it holds.
            bucket_bytes: bound on the size of a bucket.
            checksum: "sums" for weights on accelerators.
        """
        sent: set[tuple[str, Part]] = set()
        streams: list[list[Bucket]] = []
        for rank, held in enumerate(ranks):
            mine = {name: one for name, one in held.items() if one.part.num_elements and (name, one.part) not in sent}
            sent |= {(name, one.part) for name, one in mine.items()}
            streams.append([Bucket(rank, rectangles) for rectangles in _packed(mine, bucket_bytes)])
        shapes = {name: (held.dtype, held.part.shape) for parts in ranks for name, held in parts.items()}
        num_sent = sum(part.num_elements for _, part in sent)
        num_elements = sum(math.prod(shape) for _, shape in shapes.values())
        assert num_sent == num_elements, "parts overlap, or leave something out"
        # Senders take turns, so that all of them are busy.
        turns = itertools.zip_longest(*streams)
        buckets = tuple(bucket for turn in turns for bucket in turn if bucket is not None)
        return cls(shapes, buckets, bucket_bytes, checksum, tuple(ranks))

    def relayed(self) -> Manifest:
        """Return the same buckets, which one process passes on."""
        return dataclasses.replace(self, buckets=tuple(Bucket(RELAY, bucket.rectangles) for bucket in self.buckets))

    def check(self, into: Mapping[str, Tensor]) -> None:
        """Refuse a model that has other weights.

        Raises:
            WeightsMismatchError: names, shapes or types differ.
        """
        found = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in into.items()}
        wrong = sorted(self.shapes.keys() ^ found.keys()) or [
            f"{name}: {dtype} {list(shape)} instead of {found[name][0]} {list(found[name][1])}"
            for name, (dtype, shape) in self.shapes.items()
            if found[name] != (dtype, shape)
        ]
        if wrong:
            raise WeightsMismatchError(f"the actor publishes weights of another model: {', '.join(wrong[:5])}")


def _packed(held: Mapping[str, Held], bucket_bytes: int) -> Iterator[tuple[Rectangle, ...]]:
    """Fill buckets with rectangles in the order of the tensors."""
    rectangles: list[Rectangle] = []
    end = HEADER_BYTES
    for name, one in held.items():
        for part in rectangles_of(one.part, (bucket_bytes - HEADER_BYTES) // one.dtype.itemsize):
            num_bytes = part.num_elements * one.dtype.itemsize
            if rectangles and (end + num_bytes > bucket_bytes or len(rectangles) == _MAX_RECTANGLES):
                yield tuple(rectangles)
                rectangles, end = [], HEADER_BYTES
            places = [Position.of(part, outer, one.dtype) for outer in (one.part, Part.whole(part.shape))]
            rectangles.append(Rectangle(name, one.dtype, part, end, end + num_bytes, *places))
            end = _aligned(end + num_bytes)
    if rectangles:
        yield tuple(rectangles)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
