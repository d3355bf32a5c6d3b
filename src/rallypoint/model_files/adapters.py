"""Adapters in PEFT's format: adapter_config.json and adapter_model.safetensors.

Owns: the content of both files, and the refusal of adapters that we cannot compute. A tensor's name is that of the
weight with the prefix `base_model.model.`, also in modules that are trained whole (PEFT's modules_to_save). The names
of the tensors say which layers are adapted.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import torch

from rallypoint.config import LoRAConfig
from rallypoint.errors import ModelError
from rallypoint.model_files.reader import TensorFiles, reads_of
from rallypoint.model_files.tensor_names import own_names
from rallypoint.model_files.writer import Writing, save_tensors
from rallypoint.models.lora import (
    MERGE_WITH_PEFT,
    A,
    Adapters,
    B,
    adapted_layers,
    first_values,
    is_adapter_weight,
    merge_layers,
    short_names,
)
from rallypoint.models.part import Part
from rallypoint.models.shard import ModelShard

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."

_HARMLESS = {
    # Keys that are handled, or do not change what the adapter computes.
    "peft_type", "task_type", "base_model_name_or_path", "r", "lora_alpha", "use_rslora", "target_modules",
    "exclude_modules", "modules_to_save", "layers_to_transform", "layers_pattern", "inference_mode", "lora_dropout",
    "revision", "auto_mapping", "peft_version", "megatron_core", "qalora_group_size", "ensure_weight_tying",
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
    """Config of the adapter, with the full names of the adapted layers."""
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
    for name in adapted_layers(shard.model):
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
    endings = tuple(sorted({name.rpartition(".")[2] for name in found.target_modules}))
    return found.model_copy(update={"path": None, "target_modules": endings})


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
    trained = shard.trained()
    save_tensors(
        folder / WEIGHTS,
        {_PREFIX + name: tensor for name, tensor in trained.items()},
        {_PREFIX + name: shard.parts[name] for name in trained},
        shard.mesh,
        sources=own_names(shard.model),
        how=how,
        before=lambda: _save_config(shard, folder, base),
    )


def _save_config(shard: ModelShard, folder: Path, base: str) -> None:
    layer = next(iter(adapted_layers(shard.model).values()))
    whole = sorted({name.rpartition(".")[0] for name in shard.trained() if not is_adapter_weight(name)})
    config = {
        "peft_type": "LORA",
        "task_type": _task_of(shard),
        "base_model_name_or_path": str(Path(base).expanduser().absolute()) if _is_folder(base) else base,
        "r": layer.rank,
        "lora_alpha": int(layer.alpha) if layer.alpha.is_integer() else layer.alpha,
        "use_rslora": layer.rslora,
        "lora_dropout": 0.0,
        "target_modules": short_names(shard.model),
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
    # Of linear layers outside the decoder PEFT writes the frozen weight, too.
    others = {name.partition(".base_layer.")[0].partition(".lora_")[0] for name in names if _is_foreign(name)}
    if others:
        raise ModelError(
            f"{folder / WEIGHTS}: it adapts {', '.join(sorted(others))}, and adapters of other than linear layers of "
            f"the decoder are not supported; {MERGE_WITH_PEFT}"
        )
    layers = tuple(sorted(name.removesuffix(A) for name in names if name.endswith(A)))
    rank, alpha, rslora = config.get("r"), config.get("lora_alpha"), bool(config.get("use_rslora"))
    wrong = [n for n in layers if names[n + A][:1] != (rank,) or names.get(n + B, ())[1:] != (rank,)]
    if not layers or wrong or not isinstance(rank, int) or not isinstance(alpha, int | float) or not alpha > 0:
        said = f"r={rank!r}, lora_alpha={alpha!r}"
        found = f"{wrong[0]} has another rank" if wrong else f"{WEIGHTS} has {len(layers)} adapted layers"
        raise ModelError(f"{folder / CONFIG}: {said} does not describe its adapter: {found}")
    rest = {name.rpartition(".")[0] for name in names if not name.endswith((A, B))}
    return AdapterFolder(
        path=folder,
        base=str(config.get("base_model_name_or_path")),
        is_reward_model=config.get("task_type") == "SEQ_CLS",
        lora=LoRAConfig(rank=rank, alpha=float(alpha), rslora=rslora, target_modules=layers, path=str(folder)),
        whole=tuple(sorted(rest)),
    )


def _is_foreign(name: str) -> bool:
    return ".base_layer." in name or (".lora_" in name and not is_adapter_weight(name))


def read_adapter(shard: ModelShard, folder: Path) -> None:
    """Read this rank's part of the trained weights of a model with adapters.

    Raises:
        ModelError: the file cannot be read, or belongs to another model; the differences are listed.
    """
    trained = shard.trained()
    parts = {_PREFIX + name: shard.parts[name] for name in trained}
    with TensorFiles([folder / WEIGHTS]) as files:
        found = files.entries
        wrong = [
            *(f"unknown {name}" for name in sorted(set(found) - set(parts))),
            *(f"lacking {name}" for name in sorted(set(parts) - set(found))),
            *(
                f"{name}: {list(entry.shape)} instead of {list(parts[name].shape)}"
                for name, entry in found.items()
                if name in parts and entry.shape != parts[name].shape
            ),
        ]
        if wrong:
            shown = "; ".join(wrong[:10]) + (f"; and {len(wrong) - 10} more" if len(wrong) > 10 else "")
            raise ModelError(f"{folder}: the adapter does not fit {type(shard.model).__name__}: {shown}")
        own = own_names(shard.model)
        files.read(
            read for name, part in parts.items()
            for read in reads_of(own, name, part, trained[name.removeprefix(_PREFIX)])
        )  # fmt: skip


def _check_plain(folder: Path, config: dict[str, object]) -> None:
    """Refuse keys that would be ignored silently; a key that is off has no effect."""
    beyond = [
        f"{name}={value!r}"
        for name, value in config.items()
        if value and name not in _HARMLESS and not (name == "bias" and value == "none")
        and not (name == "init_lora_weights" and value in _PLAIN_STARTS)
    ]  # fmt: skip
    if beyond:
        raise ModelError(f"{folder / CONFIG}: {', '.join(beyond)} is not supported; {MERGE_WITH_PEFT}")


def _is_folder(path: str) -> bool:
    return Path(path).expanduser().is_dir()
