"""What is checked of a model while it is loaded: whether files hold exactly its weights, and that packing fits it.

Errors name missing, unexpected and misshapen tensors. Packed rows are compared with the model's own code, once for
every model that is loaded, or for a sketch of it.

The engine and the generator run the backbone and the head themselves, so that anything else a family computes (soft
caps, attention sinks, scaled logits, attention in both directions) would be silently left out. Two rows of a few tokens
show it; what they cannot show (a window longer than the rows) is tested with tiny models, or refused by `load`.

Ranks of `dp_shard` hold rows of every weight, and a pass would gather the whole model. There every rank checks a sketch
by itself: a small model of the same kind with random weights, before its own part is allocated.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from rallypoint.errors import ModelError
from rallypoint.families import FAMILIES
from rallypoint.model_files.mxfp4 import find_packed, packed_names
from rallypoint.model_files.reader import Read, TensorFiles
from rallypoint.model_files.tensor_names import forms_of
from rallypoint.models.attention import ATTENTION, PackedRows
from rallypoint.models.head import logit_softcap, soft_capped
from rallypoint.models.kinds.experts import EXPERTS, OWN_CODE
from rallypoint.models.shard import ModelShard, allocate, build
from rallypoint.parallel import Collective, DeviceMesh

_LENGTHS = (7, 3)
_LONGEST = 64
_TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 1e-1}
"""Allowed difference, relative to the largest logit."""


@torch.no_grad()
def check_agreement(path: str, model: PreTrainedModel, head: nn.Module) -> None:
    """Compare a packed pass with one eager pass per row.

    Args:
        path: of the model, for errors.
        model: loaded, with our attention.
        head: its output layer.

    Raises:
        ModelError: they differ, or the model cannot run on packed rows.
    """
    num_ids = int(model.config.vocab_size)  # pyright: ignore[reportArgumentType]
    lengths = _lengths(model)
    rows = [(torch.arange(length, device=model.device) + 1) % num_ids for length in lengths]
    # Sequence classifiers look for the last token that is not padding.
    padding = model.config.pad_token_id
    rows = [torch.where(row == padding, (row + 1) % num_ids, row) if padding is not None else row for row in rows]
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    packed = PackedRows(offsets, model.device)
    try:
        output = model.base_model(
            input_ids=torch.cat(rows).unsqueeze(0), position_ids=packed.position_ids, use_cache=False, rows=packed
        )
        ours = head(output.last_hidden_state.squeeze(0))
        if head is model.get_output_embeddings():
            ours = soft_capped(ours, logit_softcap(model.config))
    except (TypeError, ValueError, RuntimeError) as error:
        raise ModelError(f"{path}: {type(model).__name__} cannot run on packed rows: {error}") from error
    model.set_attn_implementation("eager")
    model.set_experts_implementation(OWN_CODE)
    try:
        theirs = torch.cat([model(input_ids=row.unsqueeze(0), use_cache=False).logits.flatten(0, -2) for row in rows])
    finally:
        model.set_attn_implementation(ATTENTION)
        model.set_experts_implementation(EXPERTS)
    if len(theirs) == len(rows):  # one number a row
        ours = ours[offsets[1:] - 1]
    differences, scale = (ours - theirs).abs().amax(-1), float(theirs.abs().max())
    if theirs.shape[-1] == 1:  # so few numbers may all be near zero by chance, but their rounding errors are not
        scale = max(scale, _usual_size(head, output.last_hidden_state))
    # A router may choose another of two experts with nearly equal scores: for some tokens, but not for most.
    difference = float(differences.median() if is_mixture(model.config) else differences.max())
    if not math.isfinite(scale) or math.isnan(difference):
        raise ModelError(
            f"{path}: its logits are not finite, though its weights are: they are damaged, or sums are too large for "
            f"{model.dtype}; copy or download the folder again, or set model.dtype=float32"
        )
    family = FAMILIES.get(str(model.config.model_type))
    # transformers rounds the states of linear attention to float32.
    rounded = torch.float32 if family is not None and family.linear_attentions else torch.float64
    if not difference <= max(_TOLERANCES[dtype] for dtype in (model.dtype, rounded)) * scale:
        raise ModelError(
            f"{path}: {type(model).__name__} on packed rows differs from its own code by {difference:.2g} in logits of "
            f"up to {scale:.2g}: it does something that is not supported yet; models of type {', '.join(FAMILIES)} are"
        )


def check_finite(path: str, tensors: Mapping[str, Tensor], tp: Collective) -> None:
    """Refuse weights that are NaN or infinite.

    Args:
        path: of the model, for errors.
        tensors: the weights, or this rank's part of them.
        tp: the tensor-parallel ranks, which have the same names and raise the same error.

    Raises:
        ModelError: some are not finite; their tensors are named.
    """
    flags = torch.tensor([not is_finite(tensor) for tensor in tensors.values()], dtype=torch.int32)
    tp.all_reduce_max(flags)
    if wrong := [name for name, flag in zip(tensors, flags.tolist(), strict=True) if flag]:
        more = f", and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise ModelError(
            f"{path}: its weights are not finite (NaN or infinite) in {', '.join(wrong[:5])}{more}; copy or download "
            "the folder again, or use an older checkpoint"
        )


def is_finite(tensor: Tensor) -> bool:
    """Return whether no number of a tensor is NaN or infinite."""
    return not tensor.is_floating_point() or not tensor.numel() or all(end.isfinite() for end in tensor.aminmax())


def _usual_size(head: nn.Module, states: Tensor) -> float:
    """Return the expected size of a one-output head's results for random states of this size."""
    weight = head.weight if isinstance(head, nn.Linear) else torch.zeros(1)
    return float(weight.float().norm() * states.float().square().mean().sqrt())


def _lengths(model: PreTrainedModel) -> tuple[int, ...]:
    """Return the lengths of the rows to compare, one of them longer than a short window."""
    window = getattr(model.config, "sliding_window", None)
    return (window + 3, *_LENGTHS) if window is not None and window < _LONGEST else _LENGTHS


_MOST = {"vocab_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64}
"""Bounds on widths on which no other size of a config depends."""
_LEAST_LAYERS = 2
_SPECIAL_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")


def sketch_of(config: PreTrainedConfig, least_layers: int = _LEAST_LAYERS) -> PreTrainedConfig:
    """Return the config of a small model of the same kind, with narrow MLPs and at least one layer of every type.

    Args:
        config: of the large model; it is not changed.
        least_layers: lower bound on the number of layers, if the large model has as many.
    """
    sketch = copy.deepcopy(config)
    text: Any = sketch.get_text_config()
    values = dict(vars(text))
    for name, most in _MOST.items():
        if type(values.get(name)) is int:
            setattr(text, name, min(values[name], most))
    for name in _SPECIAL_TOKENS:
        if name in values:
            setattr(text, name, None)
    num_layers = values.get("num_hidden_layers")
    if type(num_layers) is not int:
        return sketch
    per_layer = {name: value for name, value in values.items() if isinstance(value, list) and len(value) == num_layers}
    kept = min(num_layers, max([least_layers, *map(_first_of_every_kind, per_layer.values())]))
    text.num_hidden_layers = kept
    for name, value in per_layer.items():
        setattr(text, name, value[:kept])
    return sketch


def make_sketch(
    config: PreTrainedConfig, factory: Any, *, dtype: torch.dtype, device: torch.device, trust_remote_code: bool
) -> ModelShard:
    """Return a small model of the kind of a config, with random weights that are equal on every rank.

    Args:
        config: of the large model.
        factory: see `build`.
        dtype: of its weights.
        device: of its weights.
        trust_remote_code: see `build`.
    """

    def built(config: PreTrainedConfig) -> ModelShard:
        return build(config, factory, dtype=dtype, mesh=DeviceMesh.solo(), trust_remote_code=trust_remote_code)

    kinds = _kinds_of_layers(built(copy.deepcopy(config)).model)
    shard = built(sketch_of(config, max(_LEAST_LAYERS, _first_of_every_kind(kinds))))
    allocate(shard, device)
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for weight in shard.model.parameters():
            if weight.ndim < 2:  # norms and biases
                weight.uniform_(0.5, 1.5, generator=generator)
            else:
                weight.normal_(std=1 / math.sqrt(weight.shape[-1]), generator=generator)
    return shard


def _kinds_of_layers(model: PreTrainedModel) -> list[Any]:
    """Return the modules of each layer; a config may distinguish layers by a number ("the first three are dense")."""
    stacks = [child for child in model.base_model.children() if isinstance(child, nn.ModuleList)]
    layers: Iterable[nn.Module] = max(stacks, key=len, default=())
    return [[(name, type(module)) for name, module in layer.named_modules()] for layer in layers]


def _first_of_every_kind(layers: list[Any]) -> int:
    """Return the number of first layers that include every kind.

    >>> _first_of_every_kind(["sliding", "sliding", "full", "sliding", "sliding", "full"])
    3
    """
    return max((layers.index(kind) for kind in layers), default=0) + 1


def is_mixture(config: PreTrainedConfig) -> bool:
    """Return whether a model is a mixture of experts."""
    family = FAMILIES.get(str(config.model_type))
    return family is not None and family.experts is not None


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
    packed: tuple[Read, ...]
    """Weights in MXFP4, which have two tensors each."""


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
    family = FAMILIES.get(str(shard.model.config.model_type))
    if family is not None and family.within:
        read = [name for name in files.entries if not name.startswith("model.visual.")]
        files.entries = {name.replace(".language_model.", "."): files.entries[name] for name in read}
    wanted = _Wanted(shard, files)
    problems: list[tuple[str, str]] = []
    for name in shard.parts:
        if not wanted.look_packed(path, name):
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
    return Fit(tuple(wanted.reads), tuple(wanted.lacking), tuple(wanted.same), tuple(wanted.packed))


class _Wanted:
    """The search for a model's weights in files."""

    def __init__(self, shard: ModelShard, files: TensorFiles) -> None:
        self._shard, self._files, self._tensors = shard, files, shard.tensors()
        self._forms = forms_of(shard.model)
        self._names = _all_names(shard)
        self.used: set[str] = set()
        self.known: list[str] = []
        self.reads: list[Read] = []
        self.missing: list[str] = []
        self.lacking: list[str] = []
        self.same: list[tuple[str, str]] = []
        self.packed: list[Read] = []

    def look_packed(self, path: str, name: str) -> bool:
        """Find a weight in MXFP4, and say whether it is there."""
        read = find_packed(path, self._files.entries, name, self._shard.parts[name], self._tensors[name])
        if read is not None:
            self.packed.append(read)
            self.used.update(packed_names(name))
        return read is not None

    def look(self, name: str, may_lack: tuple[str, ...]) -> Iterator[tuple[str, str]]:
        """Find the pieces of a weight under any of its names, and yield those that are wrong with the reason."""
        part = self._shard.parts[name]
        forms = [[sources(alias, part.shape) for alias in self._names[name]] for sources in self._forms]
        found = self._files.entries.keys()
        options = max(forms, key=lambda form: sum(piece.tensor in found for pieces in form for piece in pieces))
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
            if entry.shape != piece.stored.shape:
                yield piece.tensor, f"wrong shape {what} {list(piece.stored.shape)}"
            elif entry.dtype.is_floating_point != self._tensors[name].dtype.is_floating_point:
                yield piece.tensor, f"wrong type {what} numbers of {self._tensors[name].dtype}; it may be quantized"
            elif (overlap := piece.part.overlap(part)) is not None:
                self.reads.append(Read(piece.tensor, piece.place(overlap), self._tensors[name][overlap.within(part)]))


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
