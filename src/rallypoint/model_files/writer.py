"""Models and named tensors as safetensors files, to which every rank writes what it holds.

Owns: the layout of the files, and that each is whole or not there. Must not know: what cuts tensors into parts.
Shapes are known beforehand, so that rank 0 writes the headers first and every rank knows where its rectangles begin.
Ranks may be on several hosts that share the folder. No tensor travels, unless somebody wants to see all bytes.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import errno
import json
import math
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor
from transformers.dynamic_module_utils import custom_object_save

from rallypoint.disk import explain
from rallypoint.errors import CheckpointError
from rallypoint.model_files.locate import INDEX, SINGLE
from rallypoint.model_files.reader import CHUNK_BYTES, TYPES
from rallypoint.model_files.tensor_names import Sources, sources_of
from rallypoint.models.part import Part, rectangles_of
from rallypoint.models.shard import ModelShard, gather, given_by_ranks
from rallypoint.parallel import DeviceMesh

MAX_FILE_BYTES = 5 * 10**9
"""Of the tensors in one file of a model; a larger tensor has a file of its own."""

_NAMES = {dtype: name for name, dtype in TYPES.items()}


@dataclasses.dataclass(frozen=True, slots=True)
class Spec:
    """A tensor that will be written."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True, slots=True)
class Writing:
    """How files are written."""

    durable: bool = True
    """Whether they survive a machine that loses its power."""
    seen: Callable[[str, memoryview], None] | None = None
    """Called on rank 0 with the name in the file and the bytes of every tensor, in pieces that follow each other.

    Whole tensors are put together on rank 0 for it, one at a time.
    """


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Put:
    """Values that go into a file."""

    name: str
    """Of their tensor there."""
    part: Part
    """Of that tensor, or of a view of it with as many elements."""
    values: Tensor
    """Of the part's sizes, in any type."""


def save_model(
    shard: ModelShard, folder: Path, *, max_file_bytes: int = MAX_FILE_BYTES, how: Writing | None = None
) -> None:
    """Write a model as an ordinary Hugging Face folder: every rank of its mesh calls, and writes what it holds.

    Args:
        shard: the model.
        folder: is made if it is not there.
        max_file_bytes: of the tensors in one file.
        how: None as `Writing` does by default.

    Raises:
        CheckpointError: the disk is full or not writable, for any rank; no partial file stays behind.
    """
    how = how or Writing()
    dtypes, sources = shard.written_dtypes(), sources_of(shard.model)
    specs = {
        piece.tensor: Spec(dtypes[name], piece.stored_shape)
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
    how: Writing | None = None,
    before: Callable[[], None] = lambda: None,
) -> None:
    """Write tensors of which every rank holds a part to one file: every rank of the mesh calls, and writes its own.

    Args:
        path: of the file; its folder is made if it is not there.
        tensors: what this rank holds.
        parts: of the whole tensors, which rectangle each of them is.
        mesh: the ranks.
        how: None as `Writing` does by default.
        before: what rank 0 writes into the folder first.

    Raises:
        CheckpointError: the disk is full or not writable, for any rank; no partial file stays behind.
    """
    how = how or Writing()
    specs = {name: Spec(tensor.dtype, parts[name].shape) for name, tensor in tensors.items()}
    with _explained(path, specs, mesh):
        _write({path: specs}, _puts(tensors, parts, mesh, how), mesh, how, before=before)


def _puts(
    tensors: Mapping[str, Tensor],
    parts: Mapping[str, Part],
    mesh: DeviceMesh,
    how: Writing,
    dtypes: Mapping[str, torch.dtype] | None = None,
) -> Iterator[_Put]:
    """Yield what this rank writes: of what it holds all that no lower rank has, or of whole tensors all or nothing."""
    if how.seen is not None:
        for name, whole in gather(tensors, parts, mesh, dtypes):
            yield _Put(name, Part.whole(whole.shape), whole)
            del whole  # before the next one is gathered
        return
    for name, part in given_by_ranks(parts, mesh)[mesh.rank].items():
        yield _Put(name, part, tensors[name])


def _stored(sources: Sources, puts: Iterable[_Put]) -> Iterator[_Put]:
    """Yield parts of weights as parts of the tensors that stand in files."""
    for put in puts:
        for piece in sources(put.name, put.part.shape):
            if (common := put.part.overlap(piece.part)) is not None:
                yield _Put(piece.tensor, common.seen_from(piece.part), put.values[common.within(put.part)])
        del put  # before the next one is gathered


def _save_config(shard: ModelShard, folder: Path) -> None:
    model = shard.model
    config = copy.deepcopy(model.config)
    config._attn_implementation = config._experts_implementation = None  # ours are known here only
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
    """Write tensors, in whatever order they come, into files that appear when all of them are on the disk."""
    partial = {path: path.with_name(f".{path.name}.partial") for path in files}
    headers = {path: _header(specs) for path, specs in files.items()}

    def begin() -> int:
        for path in files:
            path.parent.mkdir(parents=True, exist_ok=True)
        before()
        for path, header in headers.items():
            # Closed before another rank opens it: hosts that share a disk over a network see what was closed.
            with partial[path].open("wb") as file:
                file.write(header.text)
                file.truncate(header.num_bytes)
        return 0

    def fill() -> int:
        try:
            return _fill({partial[path]: (headers[path], specs) for path, specs in files.items()}, puts, how)
        except OSError:
            for _ in puts:  # what others send on their way to rank 0
                pass
            raise

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


def _fill(files: Mapping[Path, tuple[_Header, Mapping[str, Spec]]], puts: Iterable[_Put], how: Writing) -> int:
    """Write into files that are there; return the number of bytes."""
    path_of = {name: path for path, (_, specs) in files.items() for name in specs}
    written = 0
    with contextlib.ExitStack() as cleanup:
        descriptors: dict[Path, int] = {}
        for put in puts:
            path = path_of[put.name]
            if path not in descriptors:
                descriptors[path] = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
                cleanup.callback(os.close, descriptors[path])
            header, specs = files[path]
            written += _put(descriptors[path], header.starts[put.name], specs[put.name], put, how)
            del put  # before the next one is gathered
        for descriptor in descriptors.values():
            if how.durable:
                os.fsync(descriptor)
    return written


def _put(descriptor: int, start: int, spec: Spec, put: _Put, how: Writing) -> int:
    """Write a part, converted and copied from its device in pieces; return the number of bytes."""
    assert math.prod(put.part.shape) == math.prod(spec.shape), f"{put.name}: {put.part} of {spec}"
    assert tuple(put.values.shape) == put.part.sizes, f"{put.name}: {put.values.shape} for {put.part}"
    size = spec.dtype.itemsize
    for cut in rectangles_of(put.part, CHUNK_BYTES // size):
        piece = put.values[cut.within(put.part)].detach().to(spec.dtype).cpu()
        data = piece.reshape(-1).view(torch.uint8).numpy().data
        done = 0
        for first, count in cut.runs():
            _put_bytes(descriptor, data[done : done + count * size], start + first * size)
            done += count * size
        if how.seen is not None:
            how.seen(put.name, data)
    return put.part.num_elements * size


@dataclasses.dataclass(frozen=True, slots=True)
class _Header:
    """What stands before the tensors of a file."""

    text: bytes
    starts: Mapping[str, int]
    """Tensor -> its first byte, counted from the beginning of the file."""
    num_bytes: int
    """Of the whole file."""


def _header(specs: Mapping[str, Spec]) -> _Header:
    """Lay out a file: wider types first, so that all are aligned."""
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


def _nothing() -> int:
    return 0


def _forget(path: Path) -> None:
    """Remove a partial file, if the disk that failed lets us."""
    with contextlib.suppress(OSError):
        path.unlink()


def _together(mesh: DeviceMesh, act: Callable[[], int]) -> int:
    """Do something, wait until all ranks have done it, and return the sum of what it gave them.

    Raises:
        OSError: it failed on this rank, or else on another one.
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
    """Turn a disk that fails a rank, which all of them hear of, into a `CheckpointError` on each."""
    try:
        yield
    except OSError as error:
        _together(mesh, _nothing)  # rank 0 has removed what is partial: what is free is what there was
        said = explain(path, error, sum(spec.num_bytes for spec in specs.values()))
        raise CheckpointError(f"{said}; nothing partial is left of it") from error
