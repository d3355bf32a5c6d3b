"""Adapters in PEFT's format: adapter_config.json and adapter_model.safetensors.

Owns: the content of both files, and the refusal of adapters that we cannot compute. A tensor's name is that of the
weight with the prefix `base_model.model.`, also in modules that are trained whole (PEFT's modules_to_save). The names
of the tensors say which layers are adapted.

PEFT has the updates of experts (its target_parameters) as two matrices, with names that tell of no weight: it wraps the
module of the experts once for each adapted weight, in the order of the weights.

    ours                                         PEFT's
    experts.lora.gate_up_proj.lora_A [X, r, M]   experts.base_layer.lora_A [X * r, M], if both weights are adapted
    experts.lora.down_proj.lora_A    [X, r, M]   experts.lora_A            [X * r, M]
    experts.lora.down_proj.lora_B    [X, N, r]   experts.lora_B            [N, r * X]: r by r, not expert by expert
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from rallypoint.config import LoRAConfig
from rallypoint.errors import ModelError
from rallypoint.model_files.pieces import Piece, Sources
from rallypoint.model_files.reader import TensorFiles, reads_of
from rallypoint.model_files.tensor_names import own_names
from rallypoint.model_files.writer import Writing, save_tensors
from rallypoint.models.kinds.expert_adapters import MATRICES, updated_weight
from rallypoint.models.lora import (
    MERGE_WITH_PEFT,
    A,
    Adapters,
    B,
    adapted_experts,
    adapted_layers,
    first_values,
    is_adapter_weight,
    merge_layers,
    short_names,
    short_parameters,
)
from rallypoint.models.part import Part
from rallypoint.models.shard import ModelShard

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."

_HARMLESS = {
    # Keys that are handled, or do not change what the adapter computes.
    "peft_type", "task_type", "base_model_name_or_path", "r", "lora_alpha", "use_rslora", "target_modules",
    "exclude_modules", "modules_to_save", "layers_to_transform", "layers_pattern",
    "inference_mode", "lora_dropout", "revision", "auto_mapping", "peft_version", "megatron_core",
    "qalora_group_size", "ensure_weight_tying",
}  # fmt: skip
_PLAIN_STARTS = (True, "gaussian", "orthogonal", "eva")
"""Values of init_lora_weights that do not change the base model's weights."""


@dataclasses.dataclass(frozen=True, slots=True)
class AdapterFolder:
    """The description of an adapter in its folder."""

    path: Path
    base: str
    """Folder or hub name of its base model."""
    is_reward_model: bool
    """Whether it scores whole rows."""
    lora: LoRAConfig
    """Config of the adapter, with the full names of the adapted layers and weights of experts."""
    whole: tuple[str, ...]
    """Names of modules that it holds whole."""


def is_adapter(path: str) -> bool:
    """Whether a path is a folder with an adapter and no model."""
    folder = Path(path).expanduser()
    return (folder / CONFIG).is_file() and not (folder / "config.json").is_file()


def adapters_of(lora: LoRAConfig, *, whole: tuple[str, ...] = ()) -> Adapters:
    """Return the adapters of a config, or of the folder `lora.path`.

    Args:
        lora: the config.
        whole: names of modules of which all weights are trained, in addition to new adapters.

    Raises:
        ModelError: the folder cannot be used.
    """
    if lora.path is None:
        return Adapters(lora, whole, None)
    found = open_adapter(lora.path)
    return Adapters(found.lora, found.whole, found.path)


@torch.no_grad()
def fill_adapters(shard: ModelShard, adapters: Adapters, *, seed: int) -> None:
    """Give adapters their initial values: those of their folder, or PEFT's for new ones.

    Raises:
        ModelError: the folder is of another model.
    """
    if adapters.folder is not None:
        read_adapter(shard, adapters.folder)
        return
    tensors = shard.tensors()
    for name in (*adapted_layers(shard.model), *adapted_experts(shard.model)):
        part = shard.parts[name + A]
        values = first_values(name, part.shape, seed)
        tensors[name + A].copy_(values[part.within(Part.whole(part.shape))])
        tensors[name + B].zero_()


def merge_adapters(shard: ModelShard) -> ModelShard:
    """Return a model without adapters that computes the same; the given one must not be used afterwards."""
    assert shard.is_whole, "the product of A and B is computed whole"
    merge_layers(shard.model)
    parts = {name: part for name, part in shard.parts.items() if not is_adapter_weight(name)}
    return dataclasses.replace(shard, parts=parts)


def fresh(lora: LoRAConfig) -> LoRAConfig:
    """Return a config of a new adapter of the same kind on the same kinds of layers.

    Raises:
        ModelError: `lora.path` cannot be used.
    """
    if lora.path is None:
        return lora
    found = open_adapter(lora.path).lora
    layers = tuple(sorted({name.rpartition(".")[2] for name in found.target_modules}))
    experts = tuple(sorted({".".join(name.split(".")[-2:]) for name in found.target_parameters}))
    return found.model_copy(update={"path": None, "target_modules": layers, "target_parameters": experts})


def save_adapter(shard: ModelShard, folder: Path, *, base: str, how: Writing | None = None) -> None:
    """Write the trained weights of a model with adapters: every rank of its mesh calls and writes its own part.

    Args:
        shard: model with adapters.
        folder: created if needed.
        base: folder or hub name of the base model; a folder becomes an absolute path.
        how: None for the defaults of `Writing`.

    Raises:
        CheckpointError: the disk is full or not writable.
    """
    tensors, parts, sources = _as_stored(shard)
    save_tensors(
        folder / WEIGHTS,
        tensors,
        parts,
        shard.mesh,
        sources=sources,
        how=how,
        before=lambda: _save_config(shard, folder, base),
    )


def _as_stored(shard: ModelShard) -> tuple[Mapping[str, Tensor], Mapping[str, Part], Sources]:
    """Return this rank's trained weights with their numbers in PEFT's order, and where they are in its file."""
    tensors, own = shard.trained(), own_names(shard.model)
    parts = {name: shard.parts[name] for name in tensors}
    stacks = {updated_weight(name): name for name in adapted_experts(shard.model)}
    files = {
        f"{stacks[weight]}{end}": f"{wrapper}{end}" for weight, wrapper in _wrappers(stacks).items() for end in (A, B)
    }
    for name in files:
        if name.endswith(B):
            part, axes = parts[name], (1, 2, 0)
            tensors[name] = tensors[name].permute(axes)
            parts[name] = Part(
                *(tuple(numbers[axis] for axis in axes) for numbers in (part.shape, part.starts, part.sizes))
            )

    def find(name: str, shape: Sequence[int]) -> Sequence[Piece]:
        if name not in files:
            return [dataclasses.replace(piece, tensor=_PREFIX + piece.tensor) for piece in own(name, shape)]
        first, second, third = shape
        matrix = [first * second, third] if name.endswith(A) else [first, second * third]
        return [Piece(_PREFIX + files[name], Part.whole(shape), Part.whole(matrix))]

    return tensors, parts, find


def _wrappers(weights: Collection[str]) -> dict[str, str]:
    """Return the names of PEFT's wrappers of adapted weights: the first weight of a module has the innermost one.

    >>> _wrappers(["mlp.experts.down_proj", "mlp.experts.gate_up_proj"])
    {'mlp.experts.down_proj': 'mlp.experts', 'mlp.experts.gate_up_proj': 'mlp.experts.base_layer'}
    >>> _wrappers(["mlp.experts.gate_up_proj"])
    {'mlp.experts.gate_up_proj': 'mlp.experts'}
    """
    found = dict[str, str]()
    for name in weights:
        experts, _, matrix = name.rpartition(".")
        outer = [other for other in MATRICES[MATRICES.index(matrix) + 1 :] if f"{experts}.{other}" in weights]
        found[name] = experts + ".base_layer" * len(outer)
    return found


def _save_config(shard: ModelShard, folder: Path, base: str) -> None:
    layer = next(iter([*adapted_layers(shard.model).values(), *adapted_experts(shard.model).values()]))
    whole = sorted({name.rpartition(".")[0] for name in shard.trained() if not is_adapter_weight(name)})
    base_folder = Path(base).expanduser()
    config = {
        "peft_type": "LORA",
        "task_type": _task_of(shard),
        "base_model_name_or_path": str(base_folder.absolute()) if base_folder.is_dir() else base,
        "r": layer.rank,
        "lora_alpha": int(layer.alpha) if layer.alpha.is_integer() else layer.alpha,
        "use_rslora": layer.rslora,
        "lora_dropout": 0.0,
        "target_modules": short_names(shard.model),
        "target_parameters": short_parameters(shard.model) or None,
        "modules_to_save": whole or None,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
    }
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _task_of(shard: ModelShard) -> str:
    """Return what PEFT calls the kind of a model."""
    if shard.model.get_output_embeddings() is not None:
        return "CAUSAL_LM"
    return "SEQ_CLS" if type(shard.model).__name__.endswith("ForSequenceClassification") else "TOKEN_CLS"


def open_adapter(path: str) -> AdapterFolder:
    """Read the description of an adapter, without its weights.

    Raises:
        ModelError: it is no adapter, it is damaged, or the adapter is of a kind that is not supported.
    """
    folder = Path(path).expanduser()
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: cannot be read as an adapter in PEFT's format: {error}") from error
    with TensorFiles([folder / WEIGHTS]) as files:
        shapes = {name: entry.shape for name, entry in files.entries.items()}
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise ModelError(f"{folder / CONFIG}: expected an object with peft_type LORA; other adapters are not supported")
    _check_plain(folder, config)
    names = {name.removeprefix(_PREFIX): shape for name, shape in shapes.items()}
    experts = _adapted_weights(folder, config, names)
    # Of linear layers outside the decoder PEFT writes the frozen weight, too.
    wrapped = {f"{wrapper}{end}" for wrapper in experts.values() for end in (A, B)}
    others = {
        name.partition(".base_layer.")[0].partition(".lora_")[0] for name in names.keys() - wrapped if _is_foreign(name)
    }
    if others:
        raise ModelError(
            f"{folder / WEIGHTS}: it adapts {', '.join(sorted(others))}, and adapters of other than linear layers and "
            f"experts of the decoder are not supported; {MERGE_WITH_PEFT}"
        )
    layers = tuple(sorted(name.removesuffix(A) for name in names.keys() - wrapped if name.endswith(A)))
    rank, alpha, rslora = config.get("r"), config.get("lora_alpha"), bool(config.get("use_rslora"))
    wrong = [n for n in layers if names[n + A][:1] != (rank,) or names.get(n + B, ())[1:] != (rank,)]
    if (
        not (layers or experts)
        or wrong
        or not isinstance(rank, int)
        or not isinstance(alpha, int | float)
        or not alpha > 0
    ):
        said = f"r={rank!r}, lora_alpha={alpha!r}"
        found = f"{wrong[0]} has another rank" if wrong else f"{WEIGHTS} has {len(layers)} adapted layers"
        raise ModelError(f"{folder / CONFIG}: {said} does not describe its adapter: {found}")
    rest = {name.rpartition(".")[0] for name in names if not name.endswith((A, B))}
    return AdapterFolder(
        path=folder,
        base=str(config.get("base_model_name_or_path")),
        is_reward_model=config.get("task_type") == "SEQ_CLS",
        lora=LoRAConfig(
            rank=rank,
            alpha=float(alpha),
            rslora=rslora,
            target_modules=layers,
            target_parameters=tuple(sorted(experts)),
            path=str(folder),
        ),
        whole=tuple(sorted(rest)),
    )


def _adapted_weights(
    folder: Path, config: Mapping[str, object], names: Mapping[str, tuple[int, ...]]
) -> Mapping[str, str]:
    """Return the weights of experts that an adapter is for, with the names of their wrappers.

    Raises:
        ModelError: its config and its tensors say different things of them.
    """
    targets, rank = config.get("target_parameters") or [], config.get("r")
    if not isinstance(targets, list) or not isinstance(rank, int):
        return {}
    modules = {name.removesuffix(A).removesuffix(".base_layer") for name in names if name.endswith(A)}
    ends = tuple(f".{target}" for target in cast("list[object]", targets))
    found = _wrappers(
        [
            f"{module}.{matrix}" for module in sorted(modules) if module.endswith(".experts") for matrix in MATRICES
            if f".{module}.{matrix}".endswith(ends)
        ]
    )  # fmt: skip
    for weight, wrapper in found.items():
        a, b = (names.get(f"{wrapper}{end}", (0, 0)) for end in (A, B))
        if not a[0] or a[0] % rank or b[1] != a[0]:
            raise ModelError(
                f"{folder / CONFIG}: r={rank} and target_parameters={targets} do not describe its adapter: "
                f"{wrapper} has A {list(a)} and B {list(b)} for {weight}"
            )
    return found


def _is_foreign(name: str) -> bool:
    return ".base_layer." in name or (".lora_" in name and not is_adapter_weight(name))


def read_adapter(shard: ModelShard, folder: Path) -> None:
    """Read this rank's part of the trained weights of a model with adapters.

    Raises:
        ModelError: the file cannot be read, or belongs to another model; the differences are listed.
    """
    tensors, parts, sources = _as_stored(shard)
    shapes = {piece.tensor: piece.stored.shape for name, part in parts.items() for piece in sources(name, part.shape)}
    with TensorFiles([folder / WEIGHTS]) as files:
        found = files.entries
        wrong = [
            *(f"unknown {name}" for name in sorted(set(found) - set(shapes))),
            *(f"lacking {name}" for name in sorted(set(shapes) - set(found))),
            *(
                f"{name}: {list(entry.shape)} instead of {list(shapes[name])}"
                for name, entry in found.items()
                if name in shapes and entry.shape != shapes[name]
            ),
        ]
        if wrong:
            shown = "; ".join(wrong[:10]) + (f"; and {len(wrong) - 10} more" if len(wrong) > 10 else "")
            raise ModelError(f"{folder}: the adapter does not fit {type(shard.model).__name__}: {shown}")
        files.read(read for name, part in parts.items() for read in reads_of(sources, name, part, tensors[name]))


def _check_plain(folder: Path, config: dict[str, object]) -> None:
    """Refuse keys that would be ignored silently; a key that is off has no effect."""
    beyond = [
        f"{name}={value!r}"
        for name, value in config.items()
        if value and name not in _HARMLESS and not (name == "bias" and value == "none")
        and not (name == "target_parameters" and _are_of_experts(value))
        and not (name == "init_lora_weights" and value in _PLAIN_STARTS)
    ]  # fmt: skip
    if beyond:
        raise ModelError(f"{folder / CONFIG}: {', '.join(beyond)} is not supported; {MERGE_WITH_PEFT}")


def _are_of_experts(targets: object) -> bool:
    """Return whether an adapter's target_parameters are matrices of experts alone."""
    return isinstance(targets, list) and all(
        str(target).rpartition(".")[2] in MATRICES for target in cast("list[object]", targets)
    )
