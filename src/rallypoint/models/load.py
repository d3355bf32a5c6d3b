"""Hugging Face folders in and out: causal language models, and critics as token classifiers.

Owns: which class is built, with our attention, from safetensors only, and what is said when a folder
does not fit. Must not know: who trains the model.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging as transformers_logging

from rallypoint.errors import ModelError
from rallypoint.models.agreement import check_agreement
from rallypoint.models.attention import ATTENTION
from rallypoint.models.experts import EXPERTS

LOADING = threading.Lock()
"""Held while transformers loads or makes a model: it swaps methods of its classes meanwhile, for all threads."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def load_policy(path: str, *, dtype: str, trust_remote_code: bool = False) -> PreTrainedModel:
    """Load a causal language model for packed rows.

    Args:
        path: a Hugging Face folder, or the name of a repository on the hub.
        dtype: "float32" or "bfloat16".
        trust_remote_code: whether Python code in the folder may run.

    Raises:
        ModelError: the folder is missing, incomplete, or of a kind that cannot be trained here.
    """
    config = _read_config(path, trust_remote_code)
    if _architecture(config).endswith("Classification"):
        raise ModelError(f"{path}: holds a critic or reward model ({_architecture(config)}), expected a language model")
    model = _load(AutoModelForCausalLM, path, config, dtype, trust_remote_code)
    if model.get_output_embeddings() is None:
        raise ModelError(f"{path}: {type(model).__name__} has no output embeddings; expected a causal language model")
    check_agreement(path, model, lm_head(model))
    return model


def load_critic(path: str, *, dtype: str, seed: int, trust_remote_code: bool = False) -> PreTrainedModel:
    """Load a token classifier with one label; a folder without such a head gets a zero one.

    With a zero head the first values are zero, whatever the backbone: the critic starts neutral.

    Args:
        path: a Hugging Face folder or hub name, of a critic or of any model of the family.
        dtype: "float32" or "bfloat16".
        seed: for weights that the folder lacks.
        trust_remote_code: whether Python code in the folder may run.

    Raises:
        ModelError: the folder is missing or incomplete, or its family has no token classifier.
    """
    torch.manual_seed(seed)
    config = _read_config(path, trust_remote_code, num_labels=1)
    has_head = _architecture(config).endswith("ForTokenClassification")
    may_lack = () if has_head else ("score.",)
    model = _load(AutoModelForTokenClassification, path, config, dtype, trust_remote_code, may_lack)
    head = value_head(model)
    check_agreement(path, model, head)
    if not has_head:
        with torch.no_grad():
            for parameter in head.parameters():
                parameter.zero_()
    return model


def value_head(model: PreTrainedModel) -> nn.Module:
    """Return the layer that turns hidden states into values.

    Raises:
        ModelError: the family names it otherwise.
    """
    head = getattr(model, "score", None)
    if not isinstance(head, nn.Module):
        raise ModelError(f"{type(model).__name__} has no `score` head; its family cannot be a critic yet")
    return head


def quiet_transformers() -> None:
    """Keep its progress bars and advice off the screen, which shows the run."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


def save_model(model: PreTrainedModel, folder: Path) -> None:
    """Write config.json and model.safetensors, as any Hugging Face tool reads them."""
    quiet_transformers()
    implementation = model.config._attn_implementation
    model.config._attn_implementation = None
    try:
        model.save_pretrained(folder)
    finally:
        model.config._attn_implementation = implementation


def named_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return every weight by name, each once: what is tied appears under its first name."""
    return dict(model.named_parameters(remove_duplicate=True))


def _read_config(path: str, trust_remote_code: bool, **changes: Any) -> PreTrainedConfig:
    quiet_transformers()
    if path.startswith(("/", ".", "~")) and not Path(path).is_dir():
        raise ModelError(f"{path}: there is no such folder")
    with _explained(path):
        return AutoConfig.from_pretrained(path, **_options(path, trust_remote_code), **changes)


def _architecture(config: PreTrainedConfig) -> str:
    """Return the class that the folder was saved from, as far as it says."""
    return (config.architectures or [""])[0]


def _options(path: str, trust_remote_code: bool) -> dict[str, Any]:
    return {"trust_remote_code": trust_remote_code, "local_files_only": Path(path).is_dir()}


@contextlib.contextmanager
def _explained(path: str) -> Iterator[None]:
    """Turn what transformers raises about a folder into a `ModelError`."""
    try:
        yield
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        raise ModelError(f"{path}: transformers cannot load it: {error}") from error


def _load(
    factory: Any,
    path: str,
    config: PreTrainedConfig,
    dtype: str,
    trust_remote_code: bool,
    may_lack: tuple[str, ...] = (),
) -> PreTrainedModel:
    with _explained(path), LOADING:
        model, report = factory.from_pretrained(
            path,
            config=config,
            dtype=DTYPES[dtype],
            attn_implementation=ATTENTION,
            experts_implementation=EXPERTS,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # reported below, by name
            output_loading_info=True,
            **_options(path, trust_remote_code),
        )
    _check_complete(path, report, may_lack)
    _check_attention(path, model)
    _realign(model)
    return cast("PreTrainedModel", model.eval())


@torch.no_grad()
def _realign(model: nn.Module) -> None:
    """Move every weight into memory of torch's own alignment, one at a time.

    Weights read from a file lie where the file has them, and some matrix products give other last bits at another
    alignment: two folders with the same weights would not give the same run.
    """
    for weight in model.parameters():
        weight.data = weight.data.clone()


def _check_complete(path: str, report: dict[str, Any], may_lack: tuple[str, ...]) -> None:
    """Refuse a folder whose tensors are missing or of another shape: they would be silently random."""
    missing = sorted(name for name in report["missing_keys"] if not name.startswith(may_lack or ("\0",)))
    mismatched = sorted(str(entry) for entry in report["mismatched_keys"])
    if missing or mismatched:
        lines = [f"missing {name}" for name in missing] + [f"wrong shape {entry}" for entry in mismatched]
        shown = "; ".join(lines[:10]) + (f"; and {len(lines) - 10} more" if len(lines) > 10 else "")
        raise ModelError(f"{path}: the weights do not fit config.json: {shown}")


def _check_attention(path: str, model: PreTrainedModel) -> None:
    """Refuse what packed attention cannot do yet, rather than compute something else."""
    kinds = set(getattr(model.config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        raise ModelError(
            f"{path}: layers of type {', '.join(sorted(kinds - {'full_attention'}))} are not supported yet"
        )
    rope: dict[str, Any] = getattr(model.config, "rope_parameters", None) or {}
    kinds = {entry.get("rope_type") for entry in (rope, *rope.values()) if isinstance(entry, dict)}
    if kinds & {"dynamic", "longrope"}:
        raise ModelError(f"{path}: its rotary embedding depends on the longest row beside, which is not supported yet")
    if not getattr(model, "_supports_attention_backend", False):
        raise ModelError(f"{path}: {type(model).__name__} does not use transformers' attention registry")


def lm_head(model: PreTrainedModel) -> nn.Module:
    """Return the layer that turns hidden states into logits; `load_policy` made sure that there is one."""
    head = model.get_output_embeddings()
    assert isinstance(head, nn.Module), "load_policy refuses a model without one"
    return head
