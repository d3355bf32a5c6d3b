"""Whether files hold exactly the weights of a model, and the reads that fill one rank's part of it.

Owns: errors about missing, unexpected and misshapen tensors. Must not know: how tensors are read.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Collection, Iterable, Iterator, Sequence

from rallypoint.errors import ModelError
from rallypoint.model_files.reader import Read, TensorFiles
from rallypoint.model_files.tensor_names import sources_of
from rallypoint.models.shard import ModelShard

_MAX_COMPARED = 10_000
"""Most pairs of names compared to find the nearest; that many take a second."""
_NUMBER = re.compile(r"(?<=\.)(0|[1-9]\d{0,8})(?=\.)")
"""Number of a layer or an expert in a name."""
_HARMLESS = (r"rotary_emb\.inv_freq$",)
"""Tensors that old versions of transformers wrote; they are computed from the config."""


@dataclasses.dataclass(frozen=True, slots=True)
class Fit:
    """The reads that fill a model from files."""

    reads: tuple[Read, ...]
    lacking: tuple[str, ...]
    """Optional weights that the files lack."""
    same: tuple[tuple[str, str], ...]
    """Pairs of tensors that are one weight of the model and must be equal."""


def fit(
    path: str, shard: ModelShard, files: TensorFiles, *, may_lack: Sequence[str] = (), may_exceed: Sequence[str] = ()
) -> Fit:
    """Compare the weights of a model with the tensors in its files, before anything is read.

    Args:
        path: of the model, for the error.
        shard: of the model, allocated.
        files: opened.
        may_lack: prefixes of optional weights.
        may_exceed: patterns of tensors that are ignored.

    Raises:
        ModelError: they differ; all differences are listed, one line for all layers.
    """
    wanted = _Wanted(shard, files)
    problems: list[tuple[str, str]] = []
    for name in shard.parts:
        problems += wanted.look(name, tuple(may_lack))
    left = [name for name in files.entries if name not in wanted.used]
    ignored = re.compile("|".join((*_HARMLESS, *may_exceed, *(shard.model._keys_to_ignore_on_load_unexpected or ()))))
    superfluous = [name for name in left if not ignored.search(name)]
    if wanted.missing or problems or superfluous:
        listed = "".join(f"\n  - {line}" for line in _lines(wanted, problems, superfluous, files))
        raise ModelError(
            f"{path}: the weights do not fit config.json, which describes a {type(shard.model).__name__}:{listed}\n"
            "Give the config.json and the safetensors files that were saved together."
        )
    return Fit(tuple(wanted.reads), tuple(wanted.lacking), tuple(wanted.same))


class _Wanted:
    """The search for a model's weights in files."""

    def __init__(self, shard: ModelShard, files: TensorFiles) -> None:
        self._shard, self._files, self._tensors = shard, files, shard.tensors()
        self._sources = sources_of(shard.model)
        self._names = _all_names(shard)
        self.used: set[str] = set()
        self.known: list[str] = []
        self.reads: list[Read] = []
        self.missing: list[str] = []
        self.lacking: list[str] = []
        self.same: list[tuple[str, str]] = []

    def look(self, name: str, may_lack: tuple[str, ...]) -> Iterator[tuple[str, str]]:
        """Find the pieces of a weight under any of its names, and yield those that are wrong with the reason."""
        part = self._shard.parts[name]
        options = [self._sources(alias, part.shape) for alias in self._names[name]]
        there = [pieces for pieces in options if all(piece.tensor in self._files.entries for piece in pieces)]
        self.used.update(piece.tensor for pieces in there for piece in pieces)
        self.known += [piece.tensor for pieces in options for piece in pieces]
        for others in there[1:]:
            self.same += [(one.tensor, other.tensor) for one, other in zip(there[0], others, strict=True)]
        for piece in (there or options)[0]:
            entry = self._files.entries.get(piece.tensor)
            if entry is None:
                (self.lacking if piece.tensor.startswith(may_lack or ("\0",)) else self.missing).append(piece.tensor)
                continue
            self.used.add(piece.tensor)
            what = f"{{names}}: {list(entry.shape)} of {entry.dtype} in {{files}}, expected"
            if entry.shape != piece.stored_shape:
                yield piece.tensor, f"wrong shape {what} {list(piece.stored_shape)}"
            elif entry.dtype.is_floating_point != self._tensors[name].dtype.is_floating_point:
                yield piece.tensor, f"wrong type {what} numbers of {self._tensors[name].dtype}; it may be quantized"
            elif (overlap := piece.part.overlap(part)) is not None:
                self.reads.append(
                    Read(piece.tensor, overlap.seen_from(piece.part), self._tensors[name][overlap.within(part)])
                )


def _all_names(shard: ModelShard) -> dict[str, list[str]]:
    """Return all names of each weight, the first one first: tied weights have several."""
    first: dict[int, str] = {}
    names: dict[str, list[str]] = {name: [] for name in shard.parts}
    for name, weight in shard.model.named_parameters(remove_duplicate=False):
        names[first.setdefault(id(weight), name)].append(name)
    return {name: aliases or [name] for name, aliases in names.items()}


def _lines(
    wanted: _Wanted, problems: Sequence[tuple[str, str]], superfluous: Sequence[str], files: TensorFiles
) -> Iterator[str]:
    """Yield all problems, one line for all layers and experts with the same one."""
    missing, unknown, known = map(by_layers, (wanted.missing, superfluous, wanted.known))
    num_compared = _MAX_COMPARED // (1 + len(missing) + len(unknown))
    for names in missing:
        yield f"missing {names}{_nearest(names, num_compared, ('in the files', unknown))}"
    for what in dict.fromkeys(what for _, what in problems):
        for names, each in by_layers(name for name, same in problems if same == what).items():
            yield what.format(names=names, files=_files(each, files))
    for names, each in unknown.items():
        nearest = _nearest(names, num_compared, ("that is missing", missing), ("of the model", known))
        yield f"not known to the model: {names} in {_files(each, files)}{nearest}"


def by_layers(names: Iterable[str]) -> dict[str, list[str]]:
    """Group names that differ only in the numbers of layers and experts.

    >>> list(by_layers(["norm", "layers.0.up", "layers.1.up", "layers.2.up", "layers.5.up", "layers.5.down"]))
    ['norm', 'layers.{0..2,5}.up', 'layers.5.down']
    """
    found = {tuple(_NUMBER.split(name)): [name] for name in names}
    for place in range(max(map(len, found), default=1) - 2, 0, -2):  # the last number first
        alike: dict[tuple[str, ...], dict[int, list[str]]] = {}
        for parts, each in found.items():
            if len(parts) > place:
                alike.setdefault((*parts[:place], "", *parts[place + 1 :]), {})[int(parts[place])] = each
            else:
                alike[parts] = {0: each}
        found = {
            (*parts[:place], _ranges(sorted(numbers)), *parts[place + 1 :]) if len(parts) > place else parts: [
                name for each in numbers.values() for name in each
            ]
            for parts, numbers in alike.items()
        }
    return {"".join(parts): each for parts, each in found.items()}


def _ranges(numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return str(numbers[0])
    there = set(numbers)
    first = [number for number in numbers if number - 1 not in there]
    last = [number for number in numbers if number + 1 not in there]
    runs = (str(begin) if begin == end else f"{begin}..{end}" for begin, end in zip(first, last, strict=True))
    return f"{{{','.join(runs)}}}"


def _files(names: Sequence[str], files: TensorFiles) -> str:
    paths = list(dict.fromkeys(files.entries[name].path.name for name in names))
    return paths[0] if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"


def _nearest(name: str, num_compared: int, *choices: tuple[str, Collection[str]]) -> str:
    """Name the nearest of some names, from the first choice that has a near one."""
    for where, others in choices:
        near = difflib.get_close_matches(name, list(others)[:num_compared], n=1, cutoff=0.7)
        if near:
            return f"; the nearest name {where} is {near[0]}"
    return ""
