"""Models and named tensors as safetensors files, to which every rank writes its own parts.

Owns: the layout of the files, each of which is whole or absent. Must not know: how tensors were cut. Shapes are known
in advance, so that rank 0 writes the headers first and every rank knows the offsets of its rectangles. Ranks may be on
several hosts that share the folder. Tensors are sent to rank 0 only if `Writing.seen` asks for all bytes.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import errno
import itertools
import json
import math
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import torch
import xxhash
from torch import Tensor
from transformers.dynamic_module_utils import custom_object_save

from rallypoint.disk import Listed, explain, write_list
from rallypoint.errors import CheckpointError
from rallypoint.model_files.locate import INDEX, SINGLE
from rallypoint.model_files.pieces import Sources, same_names
from rallypoint.model_files.reader import CHUNK_BYTES, TYPES
from rallypoint.model_files.tensor_names import sources_of
from rallypoint.models.part import MODULUS, Part, rectangles_of, sum_of
from rallypoint.models.shard import ModelShard, gather, given_by_ranks
from rallypoint.parallel import DeviceMesh

MAX_FILE_BYTES = 5 * 10**9
"""Bound on the tensors in one file of a model; a larger tensor has a file of its own."""

_NAMES = {dtype: name for name, dtype in TYPES.items()}


@dataclasses.dataclass(frozen=True, slots=True)
class Spec:
    """A tensor that will be written."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Size of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True, slots=True)
class Writing:
    """How files are written."""

    durable: bool = True
    """Whether they are flushed to the disk, to survive a power cut."""
    is_listed: bool = False
    """Whether each rank leaves a list of what it wrote, with digests, beside each file, for `checkpoint.writing`."""
    is_summed: bool = False
    """Whether the list has a sum of it, too; those of all ranks add up to one that depends on no mesh."""
    seen: Callable[[str, memoryview], None] | None = None
    """Function called on rank 0 with the name of each tensor and its bytes, in consecutive pieces.

    Tensors are gathered on rank 0 for it, one at a time.
    """


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Put:
    """Values to write."""

    name: str
    """Name of their tensor in the file."""
    part: Part
    """Part of that tensor, or of a view of it."""
    values: Tensor
    """Tensor with the part's sizes, of any type."""


def save_model(
    shard: ModelShard, folder: Path, *, max_file_bytes: int = MAX_FILE_BYTES, how: Writing | None = None
) -> None:
    """Write a model as an ordinary Hugging Face folder: every rank of its mesh calls and writes its own parts.

    Args:
        shard: the model.
        folder: created if needed.
        max_file_bytes: bound on the tensors in one file.
        how: None for the defaults of `Writing`.

    Raises:
        CheckpointError: the disk is full or not writable, on any rank; no partial file is left.
    """
    how = how or Writing()
    dtypes, sources = shard.written_dtypes(), sources_of(shard.model)
    specs = {
        piece.tensor: Spec(dtypes[name], piece.stored.shape)
        for name, part in shard.parts.items()
        for piece in sources(name, part.shape)
    }
    files = _files(folder, specs, max_file_bytes)

    def index() -> None:
        if len(files) > 1:
            _write_index(folder, files)

    puts = _stored(sources, _puts(shard.tensors(), shard.parts, shard.mesh, how, dtypes))
    with _explained(folder, specs, shard.mesh):
        _write(files, puts, shard.mesh, how, before=lambda: _save_config(shard, folder), after=index)


def save_tensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    parts: Mapping[str, Part],
    mesh: DeviceMesh,
    *,
    sources: Sources = same_names,
    how: Writing | None = None,
    before: Callable[[], None] = lambda: None,
) -> None:
    """Write tensors that are cut over ranks to one file: every rank of the mesh calls and writes its own parts.

    Args:
        path: of the file; its folder is created if needed.
        tensors: this rank's parts.
        parts: the rectangle of its whole tensor that each of them is.
        mesh: the ranks.
        sources: where each of them is in the file.
        how: None for the defaults of `Writing`.
        before: called on rank 0 first, to write other files of the folder.

    Raises:
        CheckpointError: the disk is full or not writable, on any rank; no partial file is left.
    """
    how = how or Writing()
    specs = {
        piece.tensor: Spec(tensor.dtype, piece.stored.shape)
        for name, tensor in tensors.items()
        for piece in sources(name, parts[name].shape)
    }
    puts = _stored(sources, _puts(tensors, parts, mesh, how))
    with _explained(path, specs, mesh):
        _write({path: specs}, puts, mesh, how, before=before)


def _puts(
    tensors: Mapping[str, Tensor],
    parts: Mapping[str, Part],
    mesh: DeviceMesh,
    how: Writing,
    dtypes: Mapping[str, torch.dtype] | None = None,
) -> Iterator[_Put]:
    """Yield what this rank writes: parts that no lower rank holds, or on rank 0 whole tensors if all bytes are seen."""
    if how.seen is not None:
        for name, whole in gather(tensors, parts, mesh, dtypes):
            yield _Put(name, Part.whole(whole.shape), whole)
            del whole  # before the next one is gathered
        return
    for name, part in given_by_ranks(parts, mesh)[mesh.rank].items():
        yield _Put(name, part, tensors[name])


def _stored(sources: Sources, puts: Iterable[_Put]) -> Iterator[_Put]:
    """Turn parts of weights into parts of the tensors in files."""
    for put in puts:
        for piece in sources(put.name, put.part.shape):
            if (common := put.part.overlap(piece.part)) is not None:
                yield _Put(piece.tensor, piece.place(common), put.values[common.within(put.part)])
        del put  # before the next one is gathered


def _save_config(shard: ModelShard, folder: Path) -> None:
    model = shard.model
    config = copy.deepcopy(model.config)
    config._attn_implementation = config._experts_implementation = None  # ours are not known elsewhere
    config.architectures = [type(model).__name__.removeprefix("FSDP")]
    if model.is_remote_code():
        custom_object_save(model, folder, config=config)  # pyright: ignore[reportArgumentType] - as transformers calls it
    config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)


def _files(folder: Path, specs: Mapping[str, Spec], max_file_bytes: int) -> dict[Path, Mapping[str, Spec]]:
    files: list[dict[str, Spec]] = [{}]
    for name, spec in specs.items():
        if files[-1] and sum(other.num_bytes for other in files[-1].values()) + spec.num_bytes > max_file_bytes:
            files.append({})
        files[-1][name] = spec
    if len(files) == 1:
        return {folder / SINGLE: specs}
    return {folder / f"model-{number:05}-of-{len(files):05}.safetensors": file for number, file in enumerate(files, 1)}


def _write_index(folder: Path, files: Mapping[Path, Mapping[str, Spec]]) -> None:
    index = {
        "metadata": {"total_size": sum(spec.num_bytes for file in files.values() for spec in file.values())},
        "weight_map": {tensor: path.name for path, file in files.items() for tensor in file},
    }
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _write(
    files: Mapping[Path, Mapping[str, Spec]],
    puts: Iterator[_Put],
    mesh: DeviceMesh,
    how: Writing,
    *,
    before: Callable[[], None],
    after: Callable[[], None] = lambda: None,
) -> None:
    """Write tensors, in any order, into files that appear once all of them are complete."""
    partial = {path: _partial(path) for path in files}
    headers = {path: _header(specs) for path, specs in files.items()}

    def begin() -> int:
        for path in files:
            path.parent.mkdir(parents=True, exist_ok=True)
        before()
        for path, header in headers.items():
            # Closed before another rank opens it: over a network file system, hosts see closed files only.
            with partial[path].open("wb") as file:
                file.write(header.text)
                file.truncate(header.num_bytes)
            if how.is_listed:
                digest = xxhash.xxh3_128_hexdigest(header.text)
                write_list(path, "header", [(0, len(header.text), 0, 1, digest)])
        return 0

    def fill() -> int:
        try:
            written, listed = _fill({path: (headers[path], specs) for path, specs in files.items()}, puts, how)
            for path, (parts, total) in listed.items() if how.is_listed else ():
                write_list(path, str(mesh.rank), parts, total if how.is_summed else None)
        except OSError:
            for _ in puts:  # receive what the other ranks still send
                pass
            raise
        return written

    def end() -> int:
        for path in files:
            partial[path].replace(path)
        after()
        return 0

    with contextlib.ExitStack() as cleanup:
        if mesh.rank == 0:
            for path in partial.values():
                cleanup.callback(_forget, path)
        _together(mesh, begin if mesh.rank == 0 else _nothing)
        written = _together(mesh, fill)
        needed = sum(spec.num_bytes for specs in files.values() for spec in specs.values())
        assert written == needed, f"{', '.join(map(str, files))}: {written} bytes of {needed} were written"
        _together(mesh, end if mesh.rank == 0 else _nothing)


def _fill(
    files: Mapping[Path, tuple[_Header, Mapping[str, Spec]]], puts: Iterable[_Put], how: Writing
) -> tuple[int, dict[Path, tuple[list[Listed], int]]]:
    """Write into existing partial files; return the number of bytes, and of each file what was written and its sum."""
    path_of = {name: path for path, (_, specs) in files.items() for name in specs}
    written, listed = 0, dict[Path, tuple[list[Listed], int]]()
    with contextlib.ExitStack() as cleanup:
        descriptors: dict[Path, int] = {}
        for put in puts:
            path = path_of[put.name]
            if path not in descriptors:
                descriptors[path] = os.open(_partial(path), os.O_WRONLY | os.O_CLOEXEC)
                cleanup.callback(os.close, descriptors[path])
            header, specs = files[path]
            start, spec = header.starts[put.name], specs[put.name]
            for part in put.part.evenly():
                piece = _Put(put.name, part, put.values[part.within(put.part)])
                entry, total = _put(descriptors[path], start, spec, piece, how)
                del piece
                before, so_far = listed.get(path, ([], 0))
                before.append(entry)
                listed[path] = before, (so_far + total) % MODULUS
                written += entry[1] * entry[3]
            del put  # before the next one is gathered
        for descriptor in descriptors.values():
            if how.durable:
                os.fsync(descriptor)
    return written, listed


def _put(descriptor: int, start: int, spec: Spec, put: _Put, how: Writing) -> tuple[Listed, int]:
    """Convert a part, copy it from its device and write it, piece by piece; return what was written, and its sum.

    Digests are of the bytes in memory, and nothing is read back, so that a disk that keeps others is found out.
    """
    assert math.prod(put.part.shape) == math.prod(spec.shape), f"{put.name}: {put.part} of {spec}"
    assert tuple(put.values.shape) == put.part.sizes, f"{put.name}: {put.values.shape} for {put.part}"
    size, digest, total = spec.dtype.itemsize, xxhash.xxh3_128(), 0
    for cut in rectangles_of(put.part, CHUNK_BYTES // size):
        piece = put.values[cut.within(put.part)].detach().to(spec.dtype).cpu()
        data = piece.reshape(-1).view(torch.uint8).numpy().data
        done = 0
        for first, count in cut.runs():
            _put_bytes(descriptor, data[done : done + count * size], start + first * size)
            done += count * size
        if how.is_listed:
            digest.update(data)
        if how.is_summed:
            total += sum_of(data, cut, size, xxhash.xxh3_64_intdigest(put.name.encode()))
        if how.seen is not None:
            how.seen(put.name, data)
    runs = list(itertools.islice(put.part.runs(), 2)) or [(0, 0)]
    first, length = runs[0]
    count = put.part.num_elements // length if length else 0
    listed = start + first * size, length * size, (runs[-1][0] - first) * size, count, digest.hexdigest()
    return listed, total % MODULUS


@dataclasses.dataclass(frozen=True, slots=True)
class _Header:
    """The header of a file, and the offsets that follow from it."""

    text: bytes
    starts: Mapping[str, int]
    """Tensor -> its first byte in the file."""
    num_bytes: int
    """Size of the whole file."""


def _header(specs: Mapping[str, Spec]) -> _Header:
    """Lay out a file, with wider types first, so that all tensors are aligned."""
    described: dict[str, object] = {"__metadata__": {"format": "pt"}}
    starts: dict[str, int] = {}
    end = 0
    for name, spec in sorted(specs.items(), key=lambda item: -item[1].dtype.itemsize):
        starts[name], end = end, end + spec.num_bytes
        described[name] = {
            "dtype": _NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [starts[name], end],
        }
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    text = struct.pack("<Q", len(text)) + text
    return _Header(text, {name: len(text) + start for name, start in starts.items()}, len(text) + end)


def _put_bytes(descriptor: int, data: memoryview, start: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], start + done)


def _partial(path: Path) -> Path:
    return path.with_name(f".{path.name}.partial")


def _nothing() -> int:
    return 0


def _forget(path: Path) -> None:
    """Remove a partial file, if the failed disk allows it."""
    with contextlib.suppress(OSError):
        path.unlink()


def _together(mesh: DeviceMesh, act: Callable[[], int]) -> int:
    """Run a function on every rank, wait for all of them, and return the sum of the results.

    Raises:
        OSError: it failed on this rank or another one.
    """
    failure, result = None, 0
    try:
        result = act()
    except OSError as error:
        failure = error
    number = 0 if failure is None else failure.errno or errno.EIO
    told = mesh.everyone.all_gather(torch.tensor([[number, result]]), [1] * mesh.everyone.size)
    numbers, results = torch.cat(told).T.tolist()
    if failure is not None:
        raise failure
    if any(numbers):
        raise OSError(max(numbers), os.strerror(max(numbers)))
    return sum(results)


@contextlib.contextmanager
def _explained(path: Path, specs: Mapping[str, Spec], mesh: DeviceMesh) -> Iterator[None]:
    """Turn an `OSError`, which all ranks have after `_together`, into a `CheckpointError` on each."""
    try:
        yield
    except OSError as error:
        _together(mesh, _nothing)  # wait until rank 0 has removed partial files, so that the free space is right
        said = explain(path, error, sum(spec.num_bytes for spec in specs.values()))
        raise CheckpointError(f"{said}; nothing partial is left of it") from error
