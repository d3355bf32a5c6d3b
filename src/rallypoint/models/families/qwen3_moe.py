"""Qwen3 as a mixture of experts (arXiv 2505.09388); some layers may have a plain MLP."""

from rallypoint.models.families.family import ATTENTION, GATED_MLP, HEAD_NORMS, Family

QWEN3_MOE = Family("qwen3_moe", {"self_attn": ATTENTION | HEAD_NORMS, "mlp": GATED_MLP}, experts="mlp.experts")
