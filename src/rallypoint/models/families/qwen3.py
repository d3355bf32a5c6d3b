"""Qwen3 (arXiv 2505.09388): queries and keys are normed, head by head."""

from rallypoint.models.families.family import ATTENTION, GATED_MLP, HEAD_NORMS, Family

QWEN3 = Family("qwen3", {"self_attn": ATTENTION | HEAD_NORMS, "mlp": GATED_MLP})
