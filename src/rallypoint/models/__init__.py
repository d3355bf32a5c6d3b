"""Hugging Face models, made ready for packed rows."""

from rallypoint.models.attention import ATTENTION, PackedRows, Rows
from rallypoint.models.create import create_model
from rallypoint.models.load import lm_head, load_critic, load_policy, named_weights, save_model, value_head

__all__ = [
    "ATTENTION",
    "PackedRows",
    "Rows",
    "create_model",
    "lm_head",
    "load_critic",
    "load_policy",
    "named_weights",
    "save_model",
    "value_head",
]
