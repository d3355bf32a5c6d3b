"""Qwen2 and Qwen2.5 (arXiv 2407.10671, 2412.15115): queries, keys and values have biases."""

from rallypoint.models.families.family import ATTENTION, GATED_MLP, Family

QWEN2 = Family("qwen2", {"self_attn": ATTENTION, "mlp": GATED_MLP})
