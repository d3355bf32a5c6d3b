"""Hugging Face models, made ready for packed rows."""

from rallypoint.models.adapter import (
    adapters_of,
    fresh,
    is_adapter,
    merge_adapters,
    open_adapter,
    read_adapter,
    save_adapter,
)
from rallypoint.models.attention import ATTENTION, PackedRows, Rows
from rallypoint.models.create import create_model
from rallypoint.models.gather import gather
from rallypoint.models.load import (
    DTYPES,
    lm_head,
    load_critic,
    load_policy,
    load_reward_model,
    named_weights,
    outline_policy,
    reload,
    value_head,
)
from rallypoint.models.lora import LoRALinear, adapt_alike, adapted_layers, trained_weights, twin
from rallypoint.models.part import Part, rectangles_of
from rallypoint.models.prefix import SharedPrefixes
from rallypoint.models.reader import Read, TensorFiles
from rallypoint.models.shard import ModelShard
from rallypoint.models.sharding import shard_model, shard_parts
from rallypoint.models.writer import Writing, save_model, save_tensors

__all__ = [
    "ATTENTION",
    "DTYPES",
    "LoRALinear",
    "ModelShard",
    "PackedRows",
    "Part",
    "Read",
    "Rows",
    "SharedPrefixes",
    "TensorFiles",
    "Writing",
    "adapt_alike",
    "adapted_layers",
    "adapters_of",
    "create_model",
    "fresh",
    "gather",
    "is_adapter",
    "lm_head",
    "load_critic",
    "load_policy",
    "load_reward_model",
    "merge_adapters",
    "named_weights",
    "open_adapter",
    "outline_policy",
    "read_adapter",
    "rectangles_of",
    "reload",
    "save_adapter",
    "save_model",
    "save_tensors",
    "shard_model",
    "shard_parts",
    "trained_weights",
    "twin",
    "value_head",
]
