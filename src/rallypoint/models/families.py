"""What is asked of the family of a model that is loaded; the families themselves are in `rallypoint.families`."""

from transformers import PreTrainedConfig, PreTrainedModel

from rallypoint.errors import ModelError
from rallypoint.families import FAMILIES, Family


def family_of(model_type: str) -> Family:
    """Return a family by the `model_type` of its config.json.

    Raises:
        ModelError: it is not known.
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
    """Return whether a model has transformers' own backbone of one of the families.

    Of these it is known what a pass changes, which is nothing: several threads may pass through it at a time. Of what
    transformers has, only rotary embeddings that depend on the longest row write down anything, which no model of ours
    has (`load`).
    """
    return str(model.config.model_type) in FAMILIES and type(model.base_model).__module__.startswith("transformers.")


def is_mixture(config: PreTrainedConfig) -> bool:
    """Return whether a model has experts."""
    family = FAMILIES.get(str(config.model_type))
    return family is not None and family.experts is not None
