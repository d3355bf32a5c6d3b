"""Whether files hold exactly the weights of a model, and which reads fill one rank's part of it.

Owns: what is said about tensors that are missing, superfluous or of another shape. Must not know: how they are read.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterator, Sequence

from rallypoint.errors import ModelError
from rallypoint.models.reader import Read, TensorFiles
from rallypoint.models.shard import ModelShard

_MAX_SHOWN = 20
_MAX_COMPARED = 2000
_HARMLESS = (r"rotary_emb\.inv_freq$",)
"""Written by old versions of transformers, and computed from the config."""


@dataclasses.dataclass(frozen=True, slots=True)
class Fit:
    """How a model's weights are filled from files."""

    reads: tuple[Read, ...]
    lacking: tuple[str, ...]
    """Weights that may be missing and are."""
    same: tuple[tuple[str, str], ...]
    """Pairs of tensors that are one weight of the model, so that they must hold the same."""


def fit(
    path: str, shard: ModelShard, files: TensorFiles, *, may_lack: Sequence[str] = (), may_exceed: Sequence[str] = ()
) -> Fit:
    """Compare what a model needs with what the files hold, before anything is read.

    Args:
        path: of the model, for the error.
        shard: allocated.
        files: opened.
        may_lack: prefixes of weights that the files need not hold.
        may_exceed: patterns of tensors that the files may hold and the model does not need.

    Raises:
        ModelError: they differ; all differences are listed.
    """
    wanted, problems = _Wanted(shard, files), []
    for name in shard.parts:
        problems += wanted.look(name, tuple(may_lack))
    left = [name for name in files.entries if name not in wanted.used]
    ignored = re.compile("|".join((*_HARMLESS, *may_exceed, *(shard.model._keys_to_ignore_on_load_unexpected or ()))))
    superfluous = [name for name in left if not ignored.search(name)]
    missing = [_with_nearest(name, superfluous) if at < _MAX_SHOWN else name for at, name in enumerate(wanted.missing)]
    lines = [
        *(f"missing {name}" for name in missing),
        *problems,
        *(f"not known to the model: {name} in {files.entries[name].path.name}" for name in superfluous),
    ]
    if lines:
        shown = [*lines[:_MAX_SHOWN], *([f"and {len(lines) - _MAX_SHOWN} more"] if len(lines) > _MAX_SHOWN else [])]
        listed = "".join(f"\n  - {line}" for line in shown)
        raise ModelError(
            f"{path}: the weights do not fit config.json, which describes a {type(shard.model).__name__}:{listed}\n"
            "Give the config.json and the safetensors files that were saved together."
        )
    return Fit(tuple(wanted.reads), tuple(wanted.lacking), tuple(wanted.same))


class _Wanted:
    """What has been found of a model so far."""

    def __init__(self, shard: ModelShard, files: TensorFiles) -> None:
        self._shard, self._files, self._tensors = shard, files, shard.tensors()
        self._names = _all_names(shard)
        self.used: set[str] = set()
        self.reads: list[Read] = []
        self.missing: list[str] = []
        self.lacking: list[str] = []
        self.same: list[tuple[str, str]] = []

    def look(self, name: str, may_lack: tuple[str, ...]) -> Iterator[str]:
        """Take the pieces of a weight, under whichever of its names, and yield what is wrong with them."""
        part = self._shard.parts[name]
        options = [self._shard.sources(alias, part.shape) for alias in self._names[name]]
        there = [pieces for pieces in options if all(piece.tensor in self._files.entries for piece in pieces)]
        self.used.update(piece.tensor for pieces in there for piece in pieces)
        for others in there[1:]:
            self.same += [(one.tensor, other.tensor) for one, other in zip(there[0], others, strict=True)]
        for piece in (there or options)[0]:
            entry = self._files.entries.get(piece.tensor)
            if entry is None:
                (self.lacking if piece.tensor.startswith(may_lack or ("\0",)) else self.missing).append(piece.tensor)
                continue
            self.used.add(piece.tensor)
            where = f"{piece.tensor}: {list(entry.shape)} of {entry.dtype} in {entry.path.name}"
            if entry.shape != piece.stored_shape:
                yield f"wrong shape {where}, expected {list(piece.stored_shape)}"
            elif entry.dtype.is_floating_point != self._tensors[name].dtype.is_floating_point:
                yield f"wrong type {where}, expected numbers of {self._tensors[name].dtype}; it may be quantized"
            elif (overlap := piece.part.overlap(part)) is not None:
                self.reads.append(
                    Read(piece.tensor, overlap.seen_from(piece.part), self._tensors[name][overlap.within(part)])
                )


def _all_names(shard: ModelShard) -> dict[str, list[str]]:
    """Return every name of each weight, the first one first: tied weights have several."""
    first: dict[int, str] = {}
    names: dict[str, list[str]] = {name: [] for name in shard.parts}
    for name, weight in shard.model.named_parameters(remove_duplicate=False):
        names[first.setdefault(id(weight), name)].append(name)
    return {name: aliases or [name] for name, aliases in names.items()}


def _with_nearest(name: str, superfluous: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, superfluous[:_MAX_COMPARED], n=1, cutoff=0.7)
    return f"{name}; the nearest name in the files is {near[0]}" if near else name
