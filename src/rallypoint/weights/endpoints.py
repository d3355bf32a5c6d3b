"""Both ends of a transfer: weights packed into buckets, and unpacked into a model, each rectangle with a checksum.

Owns: the copies and the checksums. Must not know: how a bucket gets from one process to another.

Rectangles are copied into the model as they arrive, so that no second model is needed; from the first to the last one,
the model has no version (`Receiver`). On a host, a damaged rectangle is found before it is copied. On accelerators the
host waits for no bucket: errors are collected on the device and read once, at the end.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch import Tensor

from rallypoint.errors import WeightsMismatchError
from rallypoint.weights.checksums import sums
from rallypoint.weights.manifest import (
    CHECKSUM_BYTES,
    CHECKSUMS_START,
    HEADER_BYTES,
    Bucket,
    Manifest,
    Position,
    Rectangle,
)

Runs: TypeAlias = Sequence[npt.NDArray[np.uint8]]
"""Bytes of each rectangle of a bucket, in order, on the host."""

_IDENTITY = struct.Struct("<QQ")
"""Version, and index of the bucket."""


class Sender:
    """The weights of one rank, as they are sent."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        """Send the tensors that the manifest describes; other types are converted, rectangle by rectangle."""
        self._tensors, self._bytes = tensors, _Bytes(tensors)
        self._staged: Tensor | None = None

    def pack(self, manifest: Manifest, index: int, version: int, memory: Tensor) -> None:
        """Fill the memory of a bucket, which may be on the host while the weights are not."""
        bucket = manifest.buckets[index]
        if manifest.checksum == "xxh3":
            data = memory.numpy()
            for rectangle in bucket.rectangles:
                run = self.run(rectangle)
                if run is None:
                    rectangle.view(memory).copy_(self.part(rectangle))
                else:
                    data[rectangle.start : rectangle.stop] = run
            seal(memory, index, version, _runs(bucket, memory))
            return
        here = self._beside(memory)
        for rectangle in bucket.rectangles:
            rectangle.view(here).copy_(self.part(rectangle))
        words, checksums = _header(bucket, here)
        words[0].fill_(version)
        words[1].fill_(index)
        checksums.copy_(_sums(bucket, here))
        if here is not memory:
            memory[: bucket.num_bytes].copy_(here[: bucket.num_bytes])

    def part(self, rectangle: Rectangle) -> Tensor:
        """Return a rectangle of the weights, without a copy and in their own type."""
        return self._tensors[rectangle.name].detach()[rectangle.source.index]

    def run(self, rectangle: Rectangle) -> npt.NDArray[np.uint8] | None:
        """Return its bytes in place; see `_Bytes.run`."""
        return self._bytes.run(rectangle, rectangle.source)

    def lie_at(self, addresses: Mapping[str, int]) -> bool:
        """Return whether tensors still have these addresses."""
        return all(self._tensors[name].data_ptr() == address for name, address in addresses.items())

    def _beside(self, memory: Tensor) -> Tensor:
        """Return memory for a bucket on the device of the weights: the given one, if it is there."""
        device = next(iter(self._tensors.values())).device
        if memory.device == device:
            return memory
        if self._staged is None:
            self._staged = torch.empty_like(memory, device=device)
        return self._staged


class Sink(Protocol):
    """What the buckets of one version are handed to, in order."""

    def take(self, index: int, source: Sender, packed: Tensor | None = None) -> None:
        """Take a bucket of this process's own, straight from the weights, or as it was packed for others."""
        ...

    def unpack(self, index: int, memory: Tensor, in_place: Runs | None = None) -> None:
        """Take a bucket that arrived; see `Receiver.unpack`."""
        ...


class Receiver:
    """A model that receives the weights of one version, bucket by bucket.

    Errors are kept until `finish`, so that a rank goes on receiving and the others can finish sending.
    """

    def __init__(
        self, manifest: Manifest, into: Mapping[str, Tensor], version: int, device: torch.device | None = None
    ) -> None:
        """Begin: from now on, until `finish` has returned, the model has no version.

        Args:
            manifest: checked against `into`.
            into: all published weights of the model.
            version: expected in every bucket.
            device: of the weights; None: of the first of them.
        """
        self._manifest, self._into, self._bytes, self._version = manifest, into, _Bytes(into), version
        self._device = device or next(iter(into.values())).device
        self._missing = set(range(len(manifest.buckets)))
        self._problem: str | None = None
        self._unread: list[tuple[int, Tensor]] = []
        """Buckets unpacked on an accelerator: index, and [version, index, whether each rectangle is damaged]."""

    def take(self, index: int, source: Sender, packed: Tensor | None = None) -> None:
        """Copy a bucket of this process's own, straight from the weights."""
        del packed
        for rectangle in self._manifest.buckets[index].rectangles:
            run, target = source.run(rectangle), self._bytes.run(rectangle, rectangle.target)
            if run is None or target is None:
                self._copy(rectangle, source.part(rectangle))
            else:
                target[:] = run
        self._missing.discard(index)

    def unpack(self, index: int, memory: Tensor, in_place: Runs | None = None) -> None:
        """Unpack a bucket, if it is the expected one and undamaged.

        Args:
            index: of the bucket.
            memory: of the bucket.
            in_place: its rectangles, if only the header is in `memory`.
        """
        if self._manifest.checksum == "xxh3":
            self._unpack_on_host(index, memory, in_place)
            return
        bucket = self._manifest.buckets[index]
        here = memory[: bucket.num_bytes].to(self._device)
        words, checksums = _header(bucket, here)
        is_damaged = (checksums != _sums(bucket, here)).any(1)
        self._unread.append((index, torch.cat([words, is_damaged.long()])))
        for rectangle in bucket.rectangles:
            self._copy(rectangle, rectangle.view(here))
        self._missing.discard(index)

    def finish(self) -> None:
        """Return once the model has the whole version.

        Raises:
            WeightsMismatchError: a bucket was damaged, had another version, or did not come.
        """
        self._read()
        problem = self._problem
        if problem is None and self._missing:
            lost = self._manifest.buckets[min(self._missing)].rectangles[0].name
            problem = f"{len(self._missing)} of {len(self._manifest.buckets)} buckets did not come, {lost} first"
        if problem is not None:
            raise WeightsMismatchError(f"version {self._version} was not loaded: {problem}")

    def _unpack_on_host(self, index: int, memory: Tensor, in_place: Runs | None) -> None:
        bucket = self._manifest.buckets[index]
        runs = _runs(bucket, memory) if in_place is None else in_place
        header = memory[:HEADER_BYTES].numpy().data
        if not self._is_expected(index, *_IDENTITY.unpack_from(header)):
            return
        checksums = header[CHECKSUMS_START:].tobytes()
        for number, (rectangle, run) in enumerate(zip(bucket.rectangles, runs, strict=True)):
            start = number * CHECKSUM_BYTES
            if xxhash.xxh3_128_digest(run.data) != checksums[start : start + CHECKSUM_BYTES]:
                self._refuse_damaged(rectangle)
                return
            target = self._bytes.run(rectangle, rectangle.target)
            if target is None:
                own = rectangle.view(memory) if in_place is None else rectangle.shaped(torch.from_numpy(run.copy()))
                self._copy(rectangle, own)
            else:
                target[:] = run
        self._missing.discard(index)

    def _copy(self, rectangle: Rectangle, part: Tensor) -> None:
        self._into[rectangle.name].detach()[rectangle.target.index].copy_(part)

    def _read(self) -> None:
        """Read the errors of the buckets unpacked on an accelerator; the host waits for it once."""
        unread, self._unread = self._unread, []
        if not unread:
            return
        found = iter(torch.cat([flags for _, flags in unread]).tolist())
        for index, flags in unread:
            version, number, *damaged = (next(found) for _ in range(len(flags)))
            if self._is_expected(index, version, number):
                for rectangle, is_damaged in zip(self._manifest.buckets[index].rectangles, damaged, strict=True):
                    if is_damaged:
                        self._refuse_damaged(rectangle)

    def _is_expected(self, index: int, version: int, number: int) -> bool:
        """Compare the header of a bucket with what is expected."""
        if (version, number) == (self._version, index):
            return True
        self._refuse(f"expected bucket {index} of version {self._version}, found bucket {number} of {version}")
        return False

    def _refuse_damaged(self, rectangle: Rectangle) -> None:
        self._refuse(f"{rectangle.name} was damaged on its way: its checksum differs")

    def _refuse(self, problem: str) -> None:
        self._problem = self._problem or problem


class _Bytes:
    """Tensors as bytes in numpy, whose copies take half a microsecond of overhead where torch's take six."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self._flat: dict[str, npt.NDArray[np.uint8] | None] = {}

    def run(self, rectangle: Rectangle, place: Position) -> npt.NDArray[np.uint8] | None:
        """Return the bytes of a rectangle; None unless they lie end to end on the host, in its type."""
        if place.run is None:
            return None
        name = rectangle.name
        if name not in self._flat:
            tensor = self._tensors[name].detach()
            is_plain = tensor.dtype == rectangle.dtype and tensor.device.type == "cpu" and tensor.is_contiguous()
            self._flat[name] = tensor.view(-1).view(torch.uint8).numpy() if is_plain else None
        flat = self._flat[name]
        return None if flat is None else flat[place.run]

    def forget(self, name: str) -> None:
        """Keep nothing of a tensor."""
        self._flat.pop(name, None)


def seal(memory: Tensor, index: int, version: int, runs: Runs) -> None:
    """Write the header of a bucket on the host: version, index, and the xxh3_128 of each rectangle."""
    header = memory.numpy().data
    _IDENTITY.pack_into(header, 0, version, index)
    checksums = b"".join(xxhash.xxh3_128_digest(run.data) for run in runs)
    header[CHECKSUMS_START : CHECKSUMS_START + len(checksums)] = checksums


def _header(bucket: Bucket, memory: Tensor) -> tuple[Tensor, Tensor]:
    """Return the header of a bucket as int64: version and index, [2]; checksums of its rectangles, [R, 2]."""
    end = CHECKSUMS_START + len(bucket.rectangles) * CHECKSUM_BYTES
    return memory[:CHECKSUMS_START].view(torch.int64), memory[CHECKSUMS_START:end].view(torch.int64).view(-1, 2)


def _sums(bucket: Bucket, memory: Tensor) -> Tensor:
    """Compute the checksums of the rectangles in a bucket: [R, 2] int64."""
    return torch.stack([sums(memory[one.start : one.stop]) for one in bucket.rectangles])


def _runs(bucket: Bucket, memory: Tensor) -> Runs:
    """Return the bytes of each rectangle in the memory of a bucket on the host."""
    data = memory.numpy()
    return [data[one.start : one.stop] for one in bucket.rectangles]
