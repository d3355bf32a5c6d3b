"""Qwen3 as a mixture of experts (arXiv 2505.09388); some layers may have a plain MLP."""

from rallypoint.families.family import ATTENTION, GATED_MLP, HEAD_NORMS, Family, Norm, own_window

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
