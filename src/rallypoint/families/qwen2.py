"""Qwen2 and Qwen2.5 (arXiv 2407.10671, 2412.15115): queries, keys and values have biases."""

from rallypoint.families.family import ATTENTION, GATED_MLP, Family, Norm, own_window

QWEN2 = Family(
    "qwen2",
    {"self_attn": ATTENTION, "mlp": GATED_MLP},
    norms={"Qwen2RMSNorm": Norm()},
    attentions={"Qwen2Attention": own_window},
    mlps=("Qwen2MLP",),
    is_plain=True,
)
