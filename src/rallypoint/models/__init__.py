"""The arithmetic of Hugging Face models on packed rows, and the part of a model that one rank holds.

Must not know: files, optimizers, roles, losses.
"""

from rallypoint.models.attention import ATTENTION as ATTENTION, AttentionRows as AttentionRows, PackedRows as PackedRows
from rallypoint.models.cut_rows import CutRows as CutRows, Dealt as Dealt, TokenSlice as TokenSlice
from rallypoint.models.head import lm_head as lm_head, value_head as value_head
from rallypoint.models.kinds.load_balancing import BiasUpdate as BiasUpdate, LoadBalancing as LoadBalancing
from rallypoint.models.lora import adapt_alike as adapt_alike, twin as twin
from rallypoint.models.part import Part as Part
from rallypoint.models.prefix import SharedPrefixes as SharedPrefixes
from rallypoint.models.shard import (
    MAKING as MAKING,
    ModelShard as ModelShard,
    named_weights as named_weights,
    trained_weights as trained_weights,
)
