"""Which files hold the weights of a model: of a folder here, or of a name on the Hugging Face hub.

Owns: the rules by which Hugging Face tools find them, safetensors only. Must not know: what is in them, but for the
index that names them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers.utils.hub import cached_file

from rallypoint.errors import ModelError
from rallypoint.models.reader import TensorFiles

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


@dataclasses.dataclass(frozen=True, slots=True)
class WeightFiles:
    """The files of a model's weights."""

    paths: tuple[Path, ...]
    index: Mapping[str, str]
    """Tensor -> file name, as the folder's index says; empty for a single file."""

    def open(self) -> TensorFiles:
        """Open all files and check them against each other.

        Raises:
            ModelError: a file is damaged, or holds other tensors than the index says.
        """
        files = TensorFiles(self.paths)
        misplaced = [
            f"{name} is not in {file}"
            for name, file in self.index.items()
            if name not in files.entries or files.entries[name].path.name != file
        ]
        if misplaced:
            files.close()
            shown = ", ".join(misplaced[:5]) + (f", and {len(misplaced) - 5} more" if len(misplaced) > 5 else "")
            raise ModelError(
                f"{self.paths[0].parent}: {INDEX} and its files do not belong together: {shown}; "
                "copy or download the folder again"
            )
        return files


def find_weights(path: str) -> WeightFiles:
    """Return the files of a folder, or of a hub name: from the cache, or downloaded.

    Raises:
        ModelError: there are none, or some of those that the index names are missing.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        return _find_on_hub(path)
    if (folder / SINGLE).is_file():
        return WeightFiles((folder / SINGLE,), {})
    if not (folder / INDEX).is_file():
        pickled = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in folder.glob(pattern))
        what = f"found {', '.join(pickled[:3])}, but pickled weights are not loaded; " if pickled else ""
        raise ModelError(
            f"{path}: expected {SINGLE} or {INDEX}; {what}save the model again with save_pretrained of a current "
            "transformers, which writes safetensors"
        )
    index = _read_index(folder / INDEX)
    names = sorted(set(index.values()))
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise ModelError(
            f"{path}: {INDEX} names {len(names)} files, of which {len(missing)} are missing: "
            f"{', '.join(missing[:10])}; copy or download them"
        )
    return WeightFiles(tuple(folder / name for name in names), index)


def _find_on_hub(name: str) -> WeightFiles:
    """Resolve a repository as transformers does: cache, offline mode, revisions and tokens included."""
    try:
        return WeightFiles((Path(str(cached_file(name, SINGLE))),), {})
    except OSError:
        with explained(name):
            index = _read_index(Path(str(cached_file(name, INDEX))))
            return WeightFiles(tuple(Path(str(cached_file(name, file))) for file in sorted(set(index.values()))), index)


def _read_index(path: Path) -> dict[str, str]:
    try:
        index = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        wrong = [name for name in index.values() if Path(name).name != name or not name.endswith(".safetensors")]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(
            f"{path}: cannot be read as the index of a model: {error}; copy or download it again"
        ) from error
    if wrong or not index:
        raise ModelError(f"{path}: expected names of safetensors files beside it, found {wrong[:3] or 'none'}")
    return index


@contextlib.contextmanager
def explained(path: str) -> Iterator[None]:
    """Turn what transformers raises about a folder or a hub name into a `ModelError`."""
    try:
        yield
    except ModelError:
        raise
    except (
        OSError,
        ValueError,
        RuntimeError,
        KeyError,
        ImportError,
        SafetensorError,
        # Of values in config.json that are of another type, or make no model.
        StrictDataclassError,
        TypeError,
        AttributeError,
        ArithmeticError,
    ) as error:
        raise ModelError(f"{path}: transformers cannot load it: {error}") from error
