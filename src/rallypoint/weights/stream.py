"""Weights as a stream of buckets: what every rank of the actor has of them, cut into rectangles and checked one by one.

Owns: the cut, the layout of a bucket, and the checksums. Must not know: how a bucket gets from one process to another,
or who they are. Sender and receiver cut alike, because both have the manifest; a bucket carries no names.

A bucket is flat memory: a header of 64-bit numbers (version, place in the stream, a checksum for each rectangle) and,
from `HEADER_BYTES` on, the rectangles, each at a multiple of 64 bytes. No process needs more memory for it than a few
buckets, whatever the size of a tensor. Ranks that hold the same send it once, and a tensor that several ranks hold in
parts is never put together anywhere but in its destination.

A load is all or nothing in what it says, not in what it does: rectangles are copied into the model as they come, each
after its checksum was found right, so that no second model is needed. From the first to the last one the model is of no
version; see `Sink`.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch import Tensor

from rallypoint.errors import WeightsMismatchError
from rallypoint.models import Part, rectangles_of

HEADER_BYTES = 4096
"""Of a bucket, before its rectangles."""
BUCKET_BYTES = 2**20 + HEADER_BYTES
"""By default; what a way takes stands with the ways."""

Runs: TypeAlias = Sequence[npt.NDArray[np.uint8]]
"""The bytes of each rectangle of a bucket, in their order."""

_ALIGNMENT = 64
_NUM_BEFORE_CHECKSUMS = 2
_MAX_RECTANGLES = HEADER_BYTES // 8 - _NUM_BEFORE_CHECKSUMS


@dataclasses.dataclass(frozen=True, slots=True)
class Held:
    """What one rank has of a tensor."""

    dtype: torch.dtype
    """In which it travels."""
    part: Part


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """Where a rectangle lies in a tensor."""

    index: tuple[slice, ...]
    run: slice | None
    """Its bytes, counted from the first one of a contiguous tensor; None where it is not one run of them."""

    @classmethod
    def of(cls, part: Part, outer: Part, dtype: torch.dtype) -> Place:
        """Find a part in the tensor of a larger one.

        >>> Place.of(Part.whole([6, 4]).rows(3, 5), Part.whole([6, 4]), torch.float32)
        Place(index=(slice(3, 5, None), slice(0, 4, None)), run=slice(48, 80, None))
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
    """In the coordinates of the whole tensor."""
    start: int
    """First byte in the bucket."""
    stop: int
    """The byte after its last one."""
    source: Place
    """Where it lies in what the sender has of the tensor."""
    target: Place
    """Where it lies in the whole tensor."""

    def view(self, memory: Tensor) -> Tensor:
        """Return its elements in the memory of a bucket."""
        return self.shaped(memory[self.start : self.stop])

    def shaped(self, run: Tensor) -> Tensor:
        """Return its elements, given its bytes."""
        return run.view(self.dtype).view(self.part.sizes)


@dataclasses.dataclass(frozen=True, slots=True)
class Bucket:
    """Rectangles that travel together."""

    root: int
    """The rank that sends it."""
    rectangles: tuple[Rectangle, ...]

    @property
    def num_bytes(self) -> int:
        """Of the header and all rectangles, rounded up."""
        return _aligned(self.rectangles[-1].stop)


@dataclasses.dataclass(frozen=True, slots=True)
class Manifest:
    """What travels at every publish, in order; the same for all who take part."""

    shapes: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
    """Of the whole tensors."""
    buckets: tuple[Bucket, ...]
    bucket_bytes: int
    """What a bucket can have."""

    @property
    def num_bytes(self) -> int:
        """Of all tensors, each once."""
        return sum(math.prod(shape) * dtype.itemsize for dtype, shape in self.shapes.values())

    @classmethod
    def of(cls, ranks: Sequence[Mapping[str, Held]], *, bucket_bytes: int = BUCKET_BYTES) -> Manifest:
        """Cut what ranks hold into buckets; what several of them hold is sent by the first one.

        Two ranks with two rows each of `w`, and both with the same `b`:

        >>> rows = [Part.whole([4, 2]).rows(0, 2), Part.whole([4, 2]).rows(2, 4)]
        >>> b = Held(torch.float32, Part.whole([2]))
        >>> manifest = Manifest.of([{"w": Held(torch.float32, part), "b": b} for part in rows])
        >>> [(bucket.root, [(r.name, r.part.starts) for r in bucket.rectangles]) for bucket in manifest.buckets]
        [(0, [('w', (0, 0)), ('b', (0,))]), (1, [('w', (2, 0))])]

        Args:
            ranks: of the actor; name of a tensor -> what the rank has of it.
            bucket_bytes: of a bucket.
        """
        sent: set[tuple[str, Part]] = set()
        streams: list[list[Bucket]] = []
        for root, held in enumerate(ranks):
            mine = {name: one for name, one in held.items() if one.part.num_elements and (name, one.part) not in sent}
            sent |= {(name, one.part) for name, one in mine.items()}
            streams.append([Bucket(root, rectangles) for rectangles in _packed(mine, bucket_bytes)])
        shapes = {name: (held.dtype, held.part.shape) for rank in ranks for name, held in rank.items()}
        num_sent = sum(part.num_elements for _, part in sent)
        num_elements = sum(math.prod(shape) for _, shape in shapes.values())
        assert num_sent == num_elements, "parts overlap, or leave something out"
        # In turns, so that all of them can be at work.
        turns = itertools.zip_longest(*streams)
        return cls(shapes, tuple(bucket for turn in turns for bucket in turn if bucket is not None), bucket_bytes)

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


class Source:
    """The weights of one rank, to be sent."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        """Send what the rank holds, as it said for the manifest; another type is converted, rectangle by rectangle."""
        self._tensors, self._bytes = tensors, _Bytes(tensors)

    def pack(self, bucket: Bucket, index: int, version: int, memory: Tensor) -> None:
        """Fill a bucket's memory."""
        data = memory.numpy() if memory.device.type == "cpu" else None
        for rectangle in bucket.rectangles:
            run = self._bytes.run(rectangle, rectangle.source)
            if data is None or run is None:
                rectangle.view(memory).copy_(self._tensors[rectangle.name].detach()[rectangle.source.index])
            else:
                data[rectangle.start : rectangle.stop] = run
        host = memory[: bucket.num_bytes].cpu()
        seal(host, index, version, _runs(bucket, host))
        if data is None:
            memory[:HEADER_BYTES].copy_(host[:HEADER_BYTES])

    def lie_at(self, addresses: Mapping[str, int]) -> bool:
        """Say whether the first bytes of tensors are still where they were."""
        return all(self._tensors[name].data_ptr() == address for name, address in addresses.items())


class Sink:
    """A model that takes over the weights of one version, bucket by bucket.

    What is wrong with a bucket is kept until `finish`, so that a rank goes on to take what the others send to it.
    """

    def __init__(self, manifest: Manifest, into: Mapping[str, Tensor], version: int) -> None:
        """Begin: from now on, and until `finish` has returned, the model is of no version.

        Args:
            manifest: which has been checked against `into`.
            into: the model's weights, all of those that are published.
            version: that is expected.
        """
        self._manifest, self._into, self._bytes, self._version = manifest, into, _Bytes(into), version
        self._missing = set(range(len(manifest.buckets)))
        self._problem: str | None = None

    def unpack(self, index: int, memory: Tensor, elsewhere: Runs | None = None) -> None:
        """Take over a bucket, if it is the one it should be and nothing of it was damaged.

        Args:
            index: of the bucket.
            memory: of the bucket.
            elsewhere: its rectangles, where only the header is in `memory`.
        """
        bucket = self._manifest.buckets[index]
        host = memory[: HEADER_BYTES if elsewhere is not None else bucket.num_bytes].cpu()
        runs = _runs(bucket, host) if elsewhere is None else elsewhere
        version, place, *expected = struct.unpack_from(_header_of(runs), host.numpy().data)
        if (version, place) != (self._version, index):
            self._refuse(f"expected bucket {index} of version {self._version}, found bucket {place} of {version}")
            return
        for rectangle, run, checksum in zip(bucket.rectangles, runs, expected, strict=True):
            if xxhash.xxh3_64_intdigest(run.data) != checksum:
                self._refuse(f"{rectangle.name} was damaged on its way: its checksum differs")
                return
            target = self._bytes.run(rectangle, rectangle.target)
            if target is None:
                own = rectangle.view(memory) if elsewhere is None else rectangle.shaped(torch.from_numpy(run.copy()))
                self._into[rectangle.name].detach()[rectangle.target.index].copy_(own)
            else:
                target[:] = run
        self._missing.discard(index)

    def finish(self) -> None:
        """Return if the model has all of the version.

        Raises:
            WeightsMismatchError: a bucket was damaged, of another version, or did not come.
        """
        problem = self._problem
        if problem is None and self._missing:
            lost = self._manifest.buckets[min(self._missing)].rectangles[0].name
            problem = f"{len(self._missing)} of {len(self._manifest.buckets)} buckets did not come, {lost} first"
        if problem is not None:
            raise WeightsMismatchError(f"version {self._version} was not loaded: {problem}")

    def _refuse(self, problem: str) -> None:
        self._problem = self._problem or problem


class _Bytes:
    """The memory of tensors, for copies that take half a microsecond each, where those of torch take six."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self._flat: dict[str, npt.NDArray[np.uint8] | None] = {}

    def run(self, rectangle: Rectangle, place: Place) -> npt.NDArray[np.uint8] | None:
        """Return the bytes of a rectangle; None where they do not lie end to end on the host, in its type."""
        if place.run is None:
            return None
        name = rectangle.name
        if name not in self._flat:
            tensor = self._tensors[name].detach()
            is_plain = tensor.dtype == rectangle.dtype and tensor.device.type == "cpu" and tensor.is_contiguous()
            self._flat[name] = tensor.view(-1).view(torch.uint8).numpy() if is_plain else None
        flat = self._flat[name]
        return None if flat is None else flat[place.run]


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
            places = [Place.of(part, outer, one.dtype) for outer in (one.part, Part.whole(part.shape))]
            rectangles.append(Rectangle(name, one.dtype, part, end, end + num_bytes, *places))
            end = _aligned(end + num_bytes)
    if rectangles:
        yield tuple(rectangles)


def seal(memory: Tensor, index: int, version: int, runs: Runs) -> None:
    """Write a bucket's header: what it is, and the xxh3_64 of each rectangle's bytes."""
    checksums = (xxhash.xxh3_64_intdigest(run.data) for run in runs)
    struct.pack_into(_header_of(runs), memory.numpy().data, 0, version, index, *checksums)


def _header_of(runs: Runs) -> str:
    """Return the layout of a header: version, place in the stream, and a checksum for each rectangle."""
    return f"<{_NUM_BEFORE_CHECKSUMS + len(runs)}Q"


def _runs(bucket: Bucket, host: Tensor) -> Runs:
    """Return the bytes of each rectangle in the memory of a bucket."""
    data = host.numpy()
    return [data[one.start : one.stop] for one in bucket.rectangles]


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
