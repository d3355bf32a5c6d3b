"""Llama 2 and 3 (arXiv 2307.09288, 2407.21783)."""

from rallypoint.models.families.family import ATTENTION, GATED_MLP, Family

LLAMA = Family("llama", {"self_attn": ATTENTION, "mlp": GATED_MLP})
