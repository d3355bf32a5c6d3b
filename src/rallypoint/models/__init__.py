"""The arithmetic of Hugging Face models on packed rows, and the part of a model that one rank holds.

Must not know: files, optimizers, roles, losses.
"""

from rallypoint.models.attention import ATTENTION, AttentionRows, PackedRows
from rallypoint.models.cut_rows import CutRows, Dealt, TokenSlice
from rallypoint.models.head import lm_head, value_head
from rallypoint.models.kinds.load_balancing import BiasUpdate, LoadBalancing
from rallypoint.models.lora import adapt_alike, twin
from rallypoint.models.part import Part
from rallypoint.models.prefix import SharedPrefixes
from rallypoint.models.shard import MAKING, ModelShard, named_weights, trained_weights

__all__ = [
    "ATTENTION",
    "MAKING",
    "AttentionRows",
    "BiasUpdate",
    "CutRows",
    "Dealt",
    "LoadBalancing",
    "ModelShard",
    "PackedRows",
    "Part",
    "SharedPrefixes",
    "TokenSlice",
    "adapt_alike",
    "lm_head",
    "named_weights",
    "trained_weights",
    "twin",
    "value_head",
]
