"""Published weights as a folder that other programs can read: a folder of Hugging Face or PEFT, and a manifest.

Owns: the content of the folder, which is either whole or absent. Must not know: who reads it, or when it is removed. A
reader needs no code of ours: safetensors for the tensors, JSON for the manifest, and xxh3 to verify them.

    published/version_000012/
        config.json  model.safetensors              of all weights; several files and an index when they are large
        adapter_config.json  adapter_model.safetensors      of adapters, instead
        manifest.json                               written last

    {"format": 1, "version": 12, "kind": "model",
     "tensors": {"model.norm.weight": {"file": "model.safetensors", "dtype": "BF16", "shape": [64], "xxh3_64": "..."}}}

The checksum of a tensor is the xxh3_64, in hex, of its bytes in the file, computed from memory as they are written.
Nothing is flushed to the disk: after a power cut, the resumed run publishes again.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import xxhash

from rallypoint.disk import explain
from rallypoint.errors import CheckpointError, ModelError, WeightsMismatchError
from rallypoint.model_files import TensorFiles, Writing, read_adapter, reload, save_adapter, save_model
from rallypoint.model_files.locate import open_weights
from rallypoint.model_files.reader import TYPES
from rallypoint.models import ModelShard

MANIFEST = "manifest.json"
_FORMAT = 1
_ADAPTER = "adapter_model.safetensors"
_NAMES = {dtype: name for name, dtype in TYPES.items()}


def version_folder(folder: Path, version: int) -> Path:
    """Return the folder of a version.

    >>> version_folder(Path("published"), 12)
    PosixPath('published/version_000012')
    """
    return folder / f"version_{version:06d}"


def write(shard: ModelShard, folder: Path, version: int, *, base: str) -> Path:
    """Write the trained weights of a model, and return their folder; every rank of its mesh calls.

    Args:
        shard: the model; if it has adapters, only these are written.
        folder: of all versions; an existing folder of this version is replaced.
        version: of the weights.
        base: folder or hub name of the model, for the config of adapters.

    Raises:
        CheckpointError: the disk is full or not writable; nothing partial is left.
    """
    final = version_folder(folder, version)
    partial = folder / f".{final.name}.partial"
    digests: defaultdict[str, xxhash.xxh3_64] = defaultdict(xxhash.xxh3_64)

    def seen(name: str, data: memoryview) -> None:
        digests[name].update(data)

    how = Writing(durable=False, seen=seen)
    is_first = shard.mesh.rank == 0
    with _replacing(partial, final) if is_first else contextlib.nullcontext():
        if shard.has_adapters:
            save_adapter(shard, partial, base=base, how=how)
        else:
            save_model(shard, partial, how=how)
        if is_first:
            _write_manifest(partial, version, digests, is_adapter=shard.has_adapters)
    return final


def remove_others(written: Path) -> None:
    """Remove all versions but this one, which every engine has loaded."""
    for path in written.parent.glob("*version_*"):
        if path != written:
            shutil.rmtree(path, ignore_errors=True)


def verify(folder: Path, version: int) -> bool:
    """Compare every tensor with the manifest, and say whether they are those of an adapter.

    Args:
        folder: of one version.
        version: that the folder must have.

    Raises:
        WeightsMismatchError: it is missing, incomplete or damaged, or of another version.
    """
    try:
        found = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        held, is_adapter, known = int(found["version"]), found["kind"] == "adapter", found["format"]
        expected = {name: str(tensor["xxh3_64"]) for name, tensor in dict(found["tensors"]).items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsMismatchError(f"{folder}: its {MANIFEST} cannot be read: {error}") from error
    if known != _FORMAT:
        raise WeightsMismatchError(f"{folder}: expected format {_FORMAT}, found {known}")
    if held != version:
        raise WeightsMismatchError(f"{folder}: expected weights of version {version}, found {held}")
    try:
        with _open(folder, is_adapter=is_adapter) as files:
            wrong = sorted(expected.keys() ^ files.entries.keys()) or [
                name for name, checksum in expected.items() if files.checksum(name) != checksum
            ]
    except ModelError as error:
        raise WeightsMismatchError(f"version {version} was damaged on its way: {error}") from error
    if wrong:
        raise WeightsMismatchError(
            f"{folder}: version {version} was damaged on its way: {', '.join(wrong[:5])} "
            f"{'differs' if len(wrong) == 1 else 'differ'} from {MANIFEST}"
        )
    return is_adapter


def digest_of(folder: Path) -> str:
    """Return a digest of the checksums in a folder's manifest."""
    return xxhash.xxh3_128_hexdigest((folder / MANIFEST).read_bytes())


def read(shard: ModelShard, folder: Path, version: int) -> None:
    """Replace weights by those of a folder, once all of it has been verified.

    Args:
        shard: of the same model, whole or cut.
        folder: of one version.
        version: that the folder must have.

    Raises:
        WeightsMismatchError: see `verify`; or the folder is of another model.
    """
    is_adapter = verify(folder, version)
    try:
        if is_adapter:
            read_adapter(shard, folder)
        else:
            reload(str(folder), shard)
    except ModelError as error:
        raise WeightsMismatchError(f"version {version} is of another model: {error}") from error


def _open(folder: Path, *, is_adapter: bool) -> TensorFiles:
    return TensorFiles([folder / _ADAPTER]) if is_adapter else open_weights(str(folder))


def _write_manifest(folder: Path, version: int, digests: Mapping[str, xxhash.xxh3_64], *, is_adapter: bool) -> None:
    with _open(folder, is_adapter=is_adapter) as files:
        tensors = {
            name: {
                "file": entry.path.name,
                "dtype": _NAMES[entry.dtype],
                "shape": list(entry.shape),
                "xxh3_64": digests[name].hexdigest(),
            }
            for name, entry in files.entries.items()
        }
    manifest = {
        "format": _FORMAT,
        "version": version,
        "kind": "adapter" if is_adapter else "model",
        "tensors": tensors,
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")


@contextlib.contextmanager
def _replacing(partial: Path, final: Path) -> Iterator[None]:
    """Rename a folder once it is whole."""
    try:
        shutil.rmtree(partial, ignore_errors=True)
        yield
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
    except OSError as error:
        raise CheckpointError(explain(final, error)) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
