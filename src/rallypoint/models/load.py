"""Hugging Face folders in: causal language models, and critics as token classifiers.

Owns: which class is built, with our attention, and what is said when a folder does not fit. Must not know: who trains
the model. A model is built without memory, cut for this rank, and only then filled, rectangle by rectangle, so that no
rank ever holds more than its own part and a few buffers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging as transformers_logging

from rallypoint.config import LoRAConfig
from rallypoint.errors import ModelError
from rallypoint.models.adapter import adapters_of, fill_adapters
from rallypoint.models.agreement import check_agreement
from rallypoint.models.fit import fit
from rallypoint.models.folder import explained, find_weights
from rallypoint.models.reader import TensorFiles
from rallypoint.models.shard import ModelShard, allocate, build
from rallypoint.parallel import DeviceMesh

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}

CPU = torch.device("cpu")


def load_policy(
    path: str,
    *,
    dtype: str,
    mesh: DeviceMesh | None = None,
    device: torch.device = CPU,
    trust_remote_code: bool = False,
    lora: LoRAConfig | None = None,
    seed: int = 0,
) -> ModelShard:
    """Load this rank's part of a causal language model, for packed rows.

    Args:
        path: a Hugging Face folder, or the name of a repository on the hub.
        dtype: "float32", "bfloat16" or "float64".
        mesh: the ranks that hold the model together; None for this one alone.
        device: where it will be.
        trust_remote_code: whether Python code in the folder may run.
        lora: adapters to give it, so that only they are trained; None for none.
        seed: of new adapters.

    Raises:
        ModelError: the folder is missing, incomplete, or of a kind that cannot be trained here.
    """
    config = _read_config(path, trust_remote_code)
    if _architecture(config).endswith("Classification"):
        raise ModelError(f"{path}: holds a critic or reward model ({_architecture(config)}), expected a language model")
    adapters = None if lora is None else adapters_of(lora)
    with explained(path):
        shard = build(
            config,
            AutoModelForCausalLM,
            dtype=DTYPES[dtype],
            mesh=mesh or DeviceMesh.solo(),
            trust_remote_code=trust_remote_code,
            adapters=adapters,
        )
    if shard.model.get_output_embeddings() is None:
        name = type(shard.model).__name__
        raise ModelError(f"{path}: {name} has no output embeddings; expected a causal language model")
    _check_attention(path, shard.model)
    _fill(path, shard, device)
    if adapters is not None:
        fill_adapters(shard, adapters, seed=seed)
    _read_generation_config(path, shard.model)
    if shard.is_whole:
        check_agreement(path, shard.model, lm_head(shard.model))
    return shard


def load_critic(
    path: str,
    *,
    dtype: str,
    mesh: DeviceMesh | None = None,
    device: torch.device = CPU,
    trust_remote_code: bool = False,
    lora: LoRAConfig | None = None,
    seed: int = 0,
) -> ModelShard:
    """Load this rank's part of a token classifier with one label; a folder without such a head gets a zero one.

    With a zero head the first values are zero, whatever the backbone: the critic starts neutral.

    Args:
        path: a Hugging Face folder or hub name, of a critic or of any model of the family.
        dtype: "float32", "bfloat16" or "float64".
        mesh: the ranks that hold the model together; None for this one alone.
        device: where it will be.
        trust_remote_code: whether Python code in the folder may run.
        lora: adapters to give it, so that only they and its head are trained; None for none.
        seed: of new adapters.

    Raises:
        ModelError: the folder is missing or incomplete, or its family has no token classifier.
    """
    config = _read_config(path, trust_remote_code, num_labels=1)
    has_head = _architecture(config).endswith("ForTokenClassification")
    adapters = None if lora is None else adapters_of(lora, whole=("score",))
    with explained(path):
        shard = build(
            config,
            AutoModelForTokenClassification,
            dtype=DTYPES[dtype],
            mesh=mesh or DeviceMesh.solo(),
            trust_remote_code=trust_remote_code,
            adapters=adapters,
        )
    _check_attention(path, shard.model)
    head = value_head(shard.model)
    lacks = () if has_head else ("score.",)
    _fill(path, shard, device, may_lack=lacks, may_exceed=() if has_head else (r"^lm_head\.",))
    if adapters is not None:
        fill_adapters(shard, adapters, seed=seed)
    if shard.is_whole:
        check_agreement(path, shard.model, head)
    return shard


def reload(path: str, shard: ModelShard) -> None:
    """Replace the weights of a model by those in a folder of the same shapes.

    Raises:
        ModelError: the folder holds another model.
    """
    with find_weights(path).open() as files:
        _read(path, shard, files)


def value_head(model: PreTrainedModel) -> nn.Module:
    """Return the layer that turns hidden states into values.

    Raises:
        ModelError: the family names it otherwise.
    """
    head = getattr(model, "score", None)
    if not isinstance(head, nn.Module):
        raise ModelError(f"{type(model).__name__} has no `score` head; its family cannot be a critic yet")
    return head


def lm_head(model: PreTrainedModel) -> nn.Module:
    """Return the layer that turns hidden states into logits; `load_policy` made sure that there is one."""
    head = model.get_output_embeddings()
    assert isinstance(head, nn.Module), "load_policy refuses a model without one"
    return head


def quiet_transformers() -> None:
    """Keep its progress bars and advice off the screen, which shows the run."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


def named_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return every weight by name, each once: what is tied appears under its first name."""
    return dict(model.named_parameters(remove_duplicate=True))


def _read_config(path: str, trust_remote_code: bool, **changes: Any) -> PreTrainedConfig:
    quiet_transformers()
    folder = Path(path).expanduser()
    if path.startswith(("/", ".", "~")) and not folder.is_dir():
        raise ModelError(f"{path}: there is no such folder")
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise ModelError(f"{path}: not a Hugging Face model folder: expected config.json in it, and *.safetensors")
    with explained(path):
        config = AutoConfig.from_pretrained(path, **_options(path, trust_remote_code), **changes)
    if quantization := getattr(config, "quantization_config", None):
        method = quantization.get("quant_method", "quantized")
        raise ModelError(
            f"{path}: its weights are quantized ({method}), which cannot be trained; use the original ones"
        )
    return config


def _architecture(config: PreTrainedConfig) -> str:
    """Return the class that the folder was saved from, as far as it says."""
    return (config.architectures or [""])[0]


def _options(path: str, trust_remote_code: bool) -> dict[str, Any]:
    return {"trust_remote_code": trust_remote_code, "local_files_only": Path(path).expanduser().is_dir()}


def _fill(
    path: str, shard: ModelShard, device: torch.device, may_lack: Sequence[str] = (), may_exceed: Sequence[str] = ()
) -> None:
    """Allocate a model and read its weights, once the headers of the files show that they fit."""
    with find_weights(path).open() as files:
        allocate(shard, device)
        _read(path, shard, files, may_lack, may_exceed)


def _read(
    path: str, shard: ModelShard, files: TensorFiles, may_lack: Sequence[str] = (), may_exceed: Sequence[str] = ()
) -> None:
    """Read the weights of a model; what the files may lack becomes zero."""
    found = fit(path, shard, files, may_lack=may_lack, may_exceed=may_exceed)
    files.read(found.reads)
    for one, other in found.same:
        if not files.equal(one, other):
            raise ModelError(
                f"{path}: config.json says that {one} and {other} are one matrix, but they differ: set "
                "tie_word_embeddings to false there, or remove one of them"
            )
    tensors = shard.tensors()
    for name in found.lacking:
        tensors[name].zero_()


def _read_generation_config(path: str, model: PreTrainedModel) -> None:
    """Keep the folder's defaults for sampling, for whoever saves the model and samples elsewhere."""
    folder = Path(path).expanduser()
    if not model.can_generate() or (folder.is_dir() and not (folder / "generation_config.json").is_file()):
        return
    with explained(path) if folder.is_dir() else contextlib.suppress(OSError):  # a repository need not have one
        model.generation_config = GenerationConfig.from_pretrained(folder if folder.is_dir() else path)


def _check_attention(path: str, model: PreTrainedModel) -> None:
    """Refuse what packed attention cannot do yet, rather than compute something else."""
    kinds = set(getattr(model.config, "layer_types", None) or ["full_attention"])
    if unknown := kinds - {"full_attention", "sliding_attention"}:
        raise ModelError(f"{path}: layers of type {', '.join(sorted(unknown))} are not supported yet")
    rope: dict[str, Any] = getattr(model.config, "rope_parameters", None) or {}
    kinds = {entry.get("rope_type") for entry in (rope, *rope.values()) if isinstance(entry, dict)}
    if kinds & {"dynamic", "longrope"}:
        raise ModelError(f"{path}: its rotary embedding depends on the longest row beside, which is not supported yet")
    if not getattr(model, "_supports_attention_backend", False):
        raise ModelError(f"{path}: {type(model).__name__} does not use transformers' attention registry")
