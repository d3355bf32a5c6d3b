"""The families that can be cut over ranks: a file each, which the table names."""

from rallypoint.errors import ModelError
from rallypoint.models.families.family import Cut, Family
from rallypoint.models.families.gemma import GEMMA, GEMMA2, GEMMA3
from rallypoint.models.families.llama import LLAMA
from rallypoint.models.families.mistral import MISTRAL
from rallypoint.models.families.qwen2 import QWEN2
from rallypoint.models.families.qwen3 import QWEN3
from rallypoint.models.families.qwen3_moe import QWEN3_MOE

__all__ = ["FAMILIES", "Cut", "Family", "family_of"]

FAMILIES = {family.model_type: family for family in (GEMMA, GEMMA2, GEMMA3, LLAMA, MISTRAL, QWEN2, QWEN3, QWEN3_MOE)}
"""By the `model_type` of config.json."""


def family_of(model_type: str) -> Family:
    """Return a family by the `model_type` of its config.json.

    Raises:
        ModelError: it is not in the table.
    """
    if model_type not in FAMILIES:
        raise ModelError(
            f"models of type {model_type} cannot be cut over ranks (tp > 1); supported are {', '.join(FAMILIES)}"
        )
    return FAMILIES[model_type]
