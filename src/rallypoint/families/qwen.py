"""Qwen2 and Qwen2.5, Qwen3, and Qwen3 as a mixture of experts.

Qwen2 (arXiv 2407.10671, 2412.15115) has biases on queries, keys and values; Qwen3 (2505.09388) normalizes queries
and keys, head by head. Some layers of a mixture may have a plain MLP.
"""

from rallypoint.families.family import ATTENTION, GATED_MLP, HEAD_NORMS, Family, Norm, own_window

QWEN2 = Family(
    "qwen2",
    {"self_attn": ATTENTION, "mlp": GATED_MLP},
    norms={"Qwen2RMSNorm": Norm()},
    attentions={"Qwen2Attention": own_window},
    mlps=("Qwen2MLP",),
    is_plain=True,
)
QWEN3 = Family(
    "qwen3",
    {"self_attn": ATTENTION | HEAD_NORMS, "mlp": GATED_MLP},
    norms={"Qwen3RMSNorm": Norm()},
    attentions={"Qwen3Attention": own_window},
    mlps=("Qwen3MLP",),
    is_plain=True,
)
QWEN3_MOE = Family(
    "qwen3_moe",
    {"self_attn": ATTENTION | HEAD_NORMS, "mlp": GATED_MLP},
    norms={"Qwen3MoeRMSNorm": Norm()},
    attentions={"Qwen3MoeAttention": own_window},
    mlps=("Qwen3MoeMLP",),
    routers=("Qwen3MoeTopKRouter",),
    experts="mlp.experts",
    stored_experts={"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)},
)
