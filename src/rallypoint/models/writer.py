"""Models and named tensors as safetensors files, written tensor by tensor.

Owns: the layout of the files, and that each is whole or not there. Must not know: how whole tensors are put together.
Shapes are known beforehand, so that headers come first and no more than one tensor is held at a time.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import math
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor
from transformers.dynamic_module_utils import custom_object_save

from rallypoint.errors import CheckpointError
from rallypoint.models.folder import INDEX, SINGLE
from rallypoint.models.gather import gather
from rallypoint.models.part import Part
from rallypoint.models.reader import TYPES
from rallypoint.models.shard import ModelShard
from rallypoint.observability.disk import explain
from rallypoint.parallel import DeviceMesh

MAX_FILE_BYTES = 5 * 10**9
"""Of the tensors in one file of a model; a larger tensor has a file of its own."""

_MAX_WRITE_BYTES = 2**30
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
    """Called with every tensor's name in the file and its bytes, as they are written."""


def save_model(
    shard: ModelShard, folder: Path, *, max_file_bytes: int = MAX_FILE_BYTES, how: Writing | None = None
) -> None:
    """Write a model as an ordinary Hugging Face folder: every rank of its mesh calls, rank 0 writes.

    Args:
        shard: the model.
        folder: is made if it is not there.
        max_file_bytes: of the tensors in one file.
        how: None as `Writing` does by default.

    Raises:
        CheckpointError: the disk is full or not writable; no partial file stays behind.
    """
    dtypes = shard.written_dtypes()
    specs = {
        piece.tensor: Spec(dtypes[name], piece.stored_shape)
        for name, part in shard.parts.items()
        for piece in shard.sources(name, part.shape)
    }
    stored = _stored(shard, gather(shard.tensors(), shard.parts, shard.mesh, dtypes))
    if shard.mesh.rank == 0:
        with _explained(folder, stored, specs):
            folder.mkdir(parents=True, exist_ok=True)
            _save_config(shard, folder)
            _write_model(folder, specs, stored, max_file_bytes, how or Writing())
    _exhaust(stored)


def save_tensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    parts: Mapping[str, Part],
    mesh: DeviceMesh,
    *,
    how: Writing | None = None,
) -> None:
    """Write tensors of which every rank holds a part to one file: every rank of the mesh calls, rank 0 writes.

    Args:
        path: of the file.
        tensors: what this rank holds.
        parts: of the whole tensors, which rectangle each of them is.
        mesh: the ranks.
        how: None as `Writing` does by default.

    Raises:
        CheckpointError: the disk is full or not writable; no partial file stays behind.
    """
    specs = {name: Spec(tensor.dtype, parts[name].shape) for name, tensor in tensors.items()}
    whole = gather(tensors, parts, mesh)
    if mesh.rank == 0:
        with _explained(path, whole, specs):
            _write({path: specs}, whole, how or Writing())
    _exhaust(whole)


def _stored(shard: ModelShard, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield weights as they stand in files."""
    for name, weight in weights:
        for piece in shard.sources(name, weight.shape):
            yield piece.tensor, weight[piece.part.within(Part.whole(weight.shape))].reshape(piece.stored_shape)
        del weight  # before the next one is gathered


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


def _write_model(
    folder: Path, specs: Mapping[str, Spec], tensors: Iterable[tuple[str, Tensor]], max_file_bytes: int, how: Writing
) -> None:
    files: list[dict[str, Spec]] = [{}]
    for name, spec in specs.items():
        if files[-1] and sum(other.num_bytes for other in files[-1].values()) + spec.num_bytes > max_file_bytes:
            files.append({})
        files[-1][name] = spec
    if len(files) == 1:
        _write({folder / SINGLE: specs}, tensors, how)
        return
    names = [f"model-{number:05}-of-{len(files):05}.safetensors" for number in range(1, len(files) + 1)]
    _write({folder / name: file for name, file in zip(names, files, strict=True)}, tensors, how)
    index = {
        "metadata": {"total_size": sum(spec.num_bytes for spec in specs.values())},
        "weight_map": {tensor: name for name, file in zip(names, files, strict=True) for tensor in file},
    }
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _write(files: Mapping[Path, Mapping[str, Spec]], tensors: Iterable[tuple[str, Tensor]], how: Writing) -> None:
    """Write tensors, in whatever order they come, into files that appear when all of them are on the disk."""
    places: dict[str, tuple[int, int, Spec]] = {}
    with contextlib.ExitStack() as cleanup:
        descriptors: dict[Path, int] = {}
        for path, specs in files.items():
            partial = path.with_name(f".{path.name}.partial")
            descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
            cleanup.callback(partial.unlink, missing_ok=True)
            cleanup.callback(os.close, descriptor)
            descriptors[path] = descriptor
            header, starts = _header(specs)
            _put(descriptor, memoryview(header), 0)
            places |= {name: (descriptor, starts[name], spec) for name, spec in specs.items()}
        for name, tensor in tensors:
            descriptor, start, spec = places.pop(name)
            assert (tensor.dtype, tuple(tensor.shape)) == (spec.dtype, spec.shape), (
                f"{name}: another tensor than {spec}"
            )
            if spec.num_bytes:
                data = tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().data
                _put(descriptor, data, start)
            else:
                data = memoryview(b"")
            if how.seen is not None:
                how.seen(name, data)
            del tensor, data  # before the next one is gathered
        assert not places, f"tensors that did not come: {sorted(places)[:5]}"
        for descriptor in descriptors.values():
            if how.durable:
                os.fsync(descriptor)
        for path in descriptors:
            path.with_name(f".{path.name}.partial").replace(path)


def _header(specs: Mapping[str, Spec]) -> tuple[bytes, dict[str, int]]:
    """Return the first bytes of a file, and where each tensor begins: wider types first, so that all are aligned."""
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
    return struct.pack("<Q", len(text)) + text, {name: 8 + len(text) + start for name, start in starts.items()}


def _put(descriptor: int, data: memoryview, start: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done : done + _MAX_WRITE_BYTES], start + done)


def _exhaust(items: Iterable[object]) -> None:
    for _ in items:
        pass


@contextlib.contextmanager
def _explained(path: Path, tensors: Iterable[object], specs: Mapping[str, Spec]) -> Iterator[None]:
    """Turn a failing disk into a `CheckpointError`, when the other ranks have got rid of their parts."""
    try:
        yield
    except OSError as error:
        said = explain(path, error, sum(spec.num_bytes for spec in specs.values()))
        _exhaust(tensors)
        raise CheckpointError(f"{said}; nothing partial is left of it") from error
