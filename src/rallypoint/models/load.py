"""Hugging Face folders in and out: causal language models, and critics as token classifiers.

Owns: which class is built, with our attention, from safetensors only, and what is said when a folder
does not fit. Must not know: who trains the model.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification, PreTrainedModel
from transformers.utils import logging as transformers_logging

from rallypoint.errors import ModelError
from rallypoint.models.attention import ATTENTION

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
    model = _load(AutoModelForCausalLM, path, dtype, trust_remote_code, {})
    if model.get_output_embeddings() is None:
        raise ModelError(f"{path}: {type(model).__name__} has no output embeddings; expected a causal language model")
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
    extra = {"num_labels": 1, "classifier_dropout": 0.0}
    model = _load(AutoModelForTokenClassification, path, dtype, trust_remote_code, extra, may_lack=("score.",))
    head = cast("nn.Linear", value_head(model))
    if not _has_value_head(path):
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


def save_model(model: PreTrainedModel, folder: Path) -> None:
    """Write config.json and model.safetensors, as any Hugging Face tool reads them."""
    implementation = model.config._attn_implementation
    model.config._attn_implementation = None
    try:
        model.save_pretrained(folder)
    finally:
        model.config._attn_implementation = implementation


def named_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return every weight by name, each once: what is tied appears under its first name."""
    return dict(model.named_parameters(remove_duplicate=True))


def _load(
    factory: Any,
    path: str,
    dtype: str,
    trust_remote_code: bool,
    extra: dict[str, Any],
    may_lack: tuple[str, ...] = (),
) -> PreTrainedModel:
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code, "local_files_only": Path(path).is_dir()}
    try:
        config = AutoConfig.from_pretrained(path, **options, **extra)
        model, report = factory.from_pretrained(
            path,
            config=config,
            dtype=DTYPES[dtype],
            attn_implementation=ATTENTION,
            use_safetensors=True,
            output_loading_info=True,
            **options,
        )
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise ModelError(f"{path}: transformers cannot load it: {error}") from error
    _check_complete(path, report, may_lack)
    _check_attention(path, model)
    return cast("PreTrainedModel", model.eval())


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
    if not getattr(model, "_supports_attention_backend", False):
        raise ModelError(f"{path}: {type(model).__name__} does not use transformers' attention registry")


def _has_value_head(path: str) -> bool:
    config = Path(path) / "config.json"
    if not config.is_file():
        return False
    architectures = json.loads(config.read_text(encoding="utf-8")).get("architectures") or [""]
    return architectures[0].endswith("ForTokenClassification")


def lm_head(model: PreTrainedModel) -> nn.Module:
    """Return the layer that turns hidden states into logits; `load_policy` made sure that there is one."""
    head = model.get_output_embeddings()
    assert isinstance(head, nn.Module), "load_policy refuses a model without one"
    return head
