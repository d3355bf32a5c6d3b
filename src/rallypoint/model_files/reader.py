"""Tensors of safetensors files, read rectangle by rectangle straight into their destination.

Owns: checking headers, and reading. Must not know: models, or which rank reads what. Invariants: no tensor is read
before all headers are checked, and beyond the destination, reads need `NUM_READERS` buffers of `CHUNK_BYTES`. Files are
not mapped, because mapped pages count as memory of the process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import stat
import struct
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self

import torch
import xxhash
from torch import Tensor

from rallypoint.errors import ModelError
from rallypoint.model_files.pieces import Sources
from rallypoint.models.part import Part

CHUNK_BYTES = 4 * 2**20
"""Size of a read into a buffer, where the bytes in the file cannot go straight to the destination."""
LONG_ROW_BYTES = 2**16
"""Length of rows from which a part of each row is read by itself."""
NUM_READERS = 4
"""Number of tensors that are read at the same time."""

TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Name in the format -> type, for all that can be read."""

_MAX_HEADER_BYTES = 100_000_000
_MAX_READ_BYTES = 2**30
_REMEDY = "copy or download the file again"


@dataclasses.dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor in a file, as its header describes it."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    """First byte, counted from the beginning of the file."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Read:
    """A rectangle, and the tensor of its sizes to read it into, of any type and device."""

    name: str
    part: Part
    """Part of the tensor in the file, or of a view of it: [8, 4] may be read as [1, 8, 4]."""
    into: Tensor


def reads_of(sources: Sources, name: str, part: Part, into: Tensor) -> Iterator[Read]:
    """Yield what fills a part of a weight.

    Args:
        sources: where weights are in the files.
        name: of the weight.
        part: of it.
        into: tensor with the part's sizes.
    """
    for piece in sources(name, part.shape):
        if (overlap := piece.part.overlap(part)) is not None:
            yield Read(piece.tensor, piece.place(overlap), into[overlap.within(part)])


class TensorFiles:
    """The tensors of some safetensors files, by name; the files are open until the end of the `with` block."""

    def __init__(self, paths: Iterable[Path]) -> None:
        """Open files and check their headers; no tensor is read yet.

        Raises:
            ModelError: a file is missing, truncated or not safetensors, or two files have a tensor of the same name.
        """
        self.entries: dict[str, TensorEntry] = {}
        self._files: dict[Path, int] = {}
        with contextlib.ExitStack() as unless_all_open:
            unless_all_open.callback(self.close)
            for path in paths:
                self._open(path)
            unless_all_open.pop_all()

    def _open(self, path: Path) -> None:
        try:
            self._files[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            found = _read_header(path, self._files[path])
        except OSError as error:
            raise ModelError(f"{path}: cannot be read: {error.strerror}") from error
        for name, entry in found.items():
            if name in self.entries:
                raise ModelError(f"{name} is in two files, {self.entries[name].path} and {path}: remove one of them")
            self.entries[name] = entry

    def read(self, reads: Iterable[Read]) -> None:
        """Read rectangles, several at a time.

        Raises:
            ModelError: the disk fails, or a file has become shorter.
        """
        in_order = sorted(reads, key=lambda read: (self.entries[read.name].path, self.entries[read.name].start))
        buffer = _Buffer()
        with ThreadPoolExecutor(NUM_READERS, thread_name_prefix="read") as readers:
            for _ in readers.map(lambda read: self._read(read, buffer), in_order):
                pass

    def equal(self, one: str, other: str) -> bool:
        """Return whether two tensors hold the same numbers.

        Raises:
            ModelError: the disk fails, or a file has become shorter.
        """
        sizes = {math.prod(self.entries[name].shape) for name in (one, other)}
        if len(sizes) > 1:
            return False
        whole = Part.whole([sizes.pop()])
        for begin in range(0, whole.num_elements, CHUNK_BYTES // 8):
            part = whole.rows(begin, min(begin + CHUNK_BYTES // 8, whole.num_elements))
            reads = [Read(name, part, torch.empty(part.sizes, dtype=self.entries[name].dtype)) for name in (one, other)]
            self.read(reads)
            if not torch.equal(reads[0].into, reads[1].into):
                return False
        return True

    def checksum(self, name: str) -> str:
        """Return the xxh3_64 of a tensor's bytes.

        Raises:
            ModelError: the disk fails, or a file has become shorter.
        """
        entry, digest = self.entries[name], xxhash.xxh3_64()
        end = entry.start + math.prod(entry.shape) * entry.dtype.itemsize
        try:
            for start in range(entry.start, end, CHUNK_BYTES):
                data = os.pread(self._files[entry.path], min(CHUNK_BYTES, end - start), start)
                digest.update(data)
        except OSError as error:
            raise ModelError(f"{entry.path}: {name} cannot be read: {error}; {_REMEDY}") from error
        return digest.hexdigest()

    def _read(self, read: Read, buffer: _Buffer) -> None:
        entry, part = self.entries[read.name], read.part
        assert math.prod(part.shape) == math.prod(entry.shape), f"{read.name}: {part} of {entry.shape}"
        assert tuple(read.into.shape) == part.sizes, f"{read.name}: {part} into {tuple(read.into.shape)}"
        if not part.num_elements:
            return
        file = _Reader(self._files[entry.path], entry, buffer)
        try:
            with torch.no_grad():
                file.read(entry.start, part.shape, list(zip(part.starts, part.sizes, strict=True)), read.into)
        except OSError as error:
            raise ModelError(f"{entry.path}: {read.name} cannot be read: {error}; {_REMEDY}") from error

    def close(self) -> None:
        """Close the files."""
        while self._files:
            os.close(self._files.popitem()[1])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class _Buffer(threading.local):
    """Buffer of a thread for tensors that are converted or cut, allocated once."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = torch.empty(CHUNK_BYTES, dtype=torch.uint8)


class _Reader:
    """Reads from one tensor in a file."""

    def __init__(self, file: int, entry: TensorEntry, buffer: _Buffer) -> None:
        self._file, self._dtype, self._size = file, entry.dtype, entry.dtype.itemsize
        self._buffer = buffer

    def read(self, start: int, shape: Sequence[int], window: list[tuple[int, int]], into: Tensor) -> None:
        """Read a window, (start, size) in each dimension, of a row-major block at byte `start`."""
        if not shape:
            shape, window, into = (1,), [(0, 1)], into.view(1)
        row = math.prod(shape[1:]) * self._size
        first, num_rows = window[0]
        start += first * row
        is_full = all(size == extent for (_, size), extent in zip(window[1:], shape[1:], strict=True))
        if is_full and into.is_contiguous():
            self._stream(start, into.view(-1))
        elif num_rows > 1 and row <= LONG_ROW_BYTES:
            self._band(start, row, shape[1:], window[1:], into)
        else:
            for index in range(num_rows):
                self.read(start + index * row, shape[1:], window[1:], into[index])

    def _stream(self, start: int, into: Tensor) -> None:
        """Read contiguous bytes, without a copy if type and device allow it."""
        if into.dtype == self._dtype and into.device.type == "cpu":
            self._fill(start, into)
            return
        step = CHUNK_BYTES // self._size
        buffer = self._buffer.memory.view(self._dtype)
        for begin in range(0, len(into), step):
            chunk = into[begin : begin + step]
            self._fill(start + begin * self._size, buffer[: len(chunk)])
            chunk.copy_(buffer[: len(chunk)])

    def _band(self, start: int, row: int, shape: Sequence[int], window: list[tuple[int, int]], into: Tensor) -> None:
        """Read parts of short rows together with the bytes between them: fewer, longer reads."""
        step = CHUNK_BYTES // row
        inside = (slice(None), *(slice(first, first + size) for first, size in window))
        buffer = self._buffer.memory.view(self._dtype)[: step * row // self._size].view(step, *shape)
        for begin in range(0, len(into), step):
            rows = into[begin : begin + step]
            self._fill(start + begin * row, buffer[: len(rows)])
            rows.copy_(buffer[: len(rows)][inside])

    def _fill(self, start: int, into: Tensor) -> None:
        memory = into.reshape(-1).view(torch.uint8).numpy().data
        done = 0
        while done < len(memory):
            count = os.preadv(self._file, [memory[done : done + _MAX_READ_BYTES]], start + done)
            if not count:
                raise OSError("the file has become shorter")
            done += count


def _read_header(path: Path, file: int) -> dict[str, TensorEntry]:
    info = os.fstat(file)
    if not stat.S_ISREG(info.st_mode):
        raise ModelError(f"{path}: expected a safetensors file, found a folder or a device")
    length = os.pread(file, 8, 0)
    num_bytes = struct.unpack("<Q", length)[0] if len(length) == 8 else 0
    if not 2 <= num_bytes <= min(_MAX_HEADER_BYTES, info.st_size - 8):
        raise ModelError(
            f"{path}: expected a safetensors header of {num_bytes} bytes, found a file of {info.st_size} bytes; "
            f"it is cut off or of another format: {_REMEDY}"
        )
    try:
        header = json.loads(os.pread(file, num_bytes, 8), object_pairs_hook=_unique)
        header.pop("__metadata__", None)
        entries = dict(_entries(path, header, 8 + num_bytes, info.st_size))
    except ModelError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ModelError(f"{path}: its safetensors header is damaged ({error}); {_REMEDY}") from error
    return entries


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    if len(found := dict(pairs)) < len(pairs):
        raise ValueError("a name stands there twice")
    return found


def _entries(
    path: Path, header: dict[str, dict[str, object]], data: int, file_size: int
) -> Iterator[tuple[str, TensorEntry]]:
    """Yield the tensors of a header, whose bytes must fill the rest of the file without gap or overlap."""
    spans: list[tuple[int, int, str]] = []
    for name, described in header.items():
        if described["dtype"] not in TYPES:
            raise ModelError(
                f"{path}: {name} is of type {described['dtype']!r}; known are {', '.join(TYPES)}. Quantized "
                "weights cannot be trained: use the original ones, or convert these to bfloat16"
            )
        dtype = TYPES[str(described["dtype"])]
        shape, (begin, end) = _numbers(described["shape"]), _numbers(described["data_offsets"])
        if end - begin != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{name}: {end - begin} bytes for {list(shape)} of {dtype}")
        spans.append((begin, end, name))
        yield name, TensorEntry(path, dtype, shape, data + begin)
    expected = 0
    for begin, end, name in sorted(spans):
        if begin != expected:
            raise ValueError(f"{name} begins at {begin} instead of {expected}")
        expected = end
    if data + expected != file_size:
        raise ModelError(
            f"{path}: expected {data + expected} bytes, as its header says, found {file_size}; "
            f"{'it is cut off' if file_size < data + expected else 'something was added to it'}: {_REMEDY}"
        )


def _numbers(value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(number) is int and number >= 0 for number in value):
        raise ValueError(f"expected a list of numbers, found {value!r}")
    return tuple(value)
