"""Qwen3 (arXiv 2505.09388): queries and keys are normed, head by head."""

from rallypoint.families.family import ATTENTION, GATED_MLP, HEAD_NORMS, Family, Norm, own_window

QWEN3 = Family(
    "qwen3",
    {"self_attn": ATTENTION | HEAD_NORMS, "mlp": GATED_MLP},
    norms={"Qwen3RMSNorm": Norm()},
    attentions={"Qwen3Attention": own_window},
    mlps=("Qwen3MLP",),
    is_plain=True,
)
