"""The families that can be cut over ranks: a file each, which the table names."""

from transformers import PreTrainedConfig, PreTrainedModel

from rallypoint.errors import ModelError
from rallypoint.models.families.family import Cut, Family
from rallypoint.models.families.gemma import GEMMA, GEMMA2, GEMMA3
from rallypoint.models.families.llama import LLAMA
from rallypoint.models.families.mistral import MISTRAL
from rallypoint.models.families.qwen2 import QWEN2
from rallypoint.models.families.qwen3 import QWEN3
from rallypoint.models.families.qwen3_moe import QWEN3_MOE

__all__ = ["FAMILIES", "Cut", "Family", "family_of", "is_known", "is_mixture", "logit_softcap"]

FAMILIES = {family.model_type: family for family in (GEMMA, GEMMA2, GEMMA3, LLAMA, MISTRAL, QWEN2, QWEN3, QWEN3_MOE)}
"""By the `model_type` of config.json."""


def family_of(model_type: str) -> Family:
    """Return a family by the `model_type` of its config.json.

    Raises:
        ModelError: it is not in the table.
    """
    if model_type not in FAMILIES:
        raise ModelError(
            f"models of type {model_type!r} cannot be cut over ranks (tp > 1); those of type {', '.join(FAMILIES)} can"
        )
    return FAMILIES[model_type]


def logit_softcap(config: PreTrainedConfig) -> float | None:
    """Return the bound that a model bends its logits below, see `head_outputs`; None if it does not."""
    family = FAMILIES.get(str(config.model_type))
    return config.final_logit_softcapping if family is not None and family.caps_logits else None  # pyright: ignore[reportReturnType]


def is_known(model: PreTrainedModel) -> bool:
    """Return whether a model is transformers' own of one of the families, of which it is known what a pass changes.

    Nothing does: several threads may pass through it at a time. Of what transformers has, only rotary embeddings that
    depend on the longest row write down anything, which no model of ours has (`load`).
    """
    return str(model.config.model_type) in FAMILIES and type(model).__module__.startswith("transformers.")


def is_mixture(config: PreTrainedConfig) -> bool:
    """Return whether a model has experts."""
    family = FAMILIES.get(str(config.model_type))
    return family is not None and family.experts is not None
