"""Qwen2 and Qwen2.5, Qwen3, and Qwen3 as a mixture of experts; hybrids: Qwen3.5, dense or a mixture, and Qwen3-Next.

Qwen2 (arXiv 2407.10671, 2412.15115) has biases on queries, keys and values; Qwen3 (2505.09388) normalizes queries
and keys, head by head. Some layers of a mixture may have a plain MLP. Three of four layers of a hybrid have linear
attention (arXiv 2412.06464), and the output of the others' attention is gated: that runs transformers' code. In
hybrids that are mixtures an MLP that all tokens pass stands beside the experts. The files of Qwen3.5 have all experts
of a layer in one tensor.
"""

from rallypoint.families.family import (
    ATTENTION,
    DELTA_RULE,
    GATED_MLP,
    HEAD_NORMS,
    STORED_EXPERTS,
    Cut,
    Family,
    Norm,
    own_window,
)

_QWEN3_5_DELTA_RULE = DELTA_RULE | dict.fromkeys(("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"), Cut.OUTPUTS)
_QWEN3_NEXT_DELTA_RULE = DELTA_RULE | dict.fromkeys(("in_proj_qkvz", "in_proj_ba"), Cut.OUTPUTS)


def _small_experts(num_layers: int, width: int) -> dict[str, int]:
    del num_layers
    sizes = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": max(1, width // 4)}
    return sizes | {"norm_topk_prob": True}


def _small_experts_beside_a_shared_one(num_layers: int, width: int) -> dict[str, int]:
    return _small_experts(num_layers, width) | {"shared_expert_intermediate_size": max(1, width // 4)}


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
    stored_experts=STORED_EXPERTS,
    small_experts=_small_experts,
)
QWEN3_5 = Family(
    "qwen3_5_text",
    {"self_attn": ATTENTION | HEAD_NORMS, "linear_attn": _QWEN3_5_DELTA_RULE, "mlp": GATED_MLP},
    norms={"Qwen3_5RMSNorm": Norm(eps="eps", offset=1.0)},
    mlps=("Qwen3_5MLP",),
    within="qwen3_5",
    linear_attentions=("Qwen3_5GatedDeltaNet",),
    gates_attention=True,
    grouped=("linear_attn.in_proj_qkv", "linear_attn.conv1d"),
)
QWEN3_5_MOE = Family(
    "qwen3_5_moe_text",
    {
        "self_attn": ATTENTION | HEAD_NORMS,
        "linear_attn": _QWEN3_5_DELTA_RULE,
        "mlp": GATED_MLP,
        "mlp.shared_expert": GATED_MLP,
    },
    norms={"Qwen3_5MoeRMSNorm": Norm(eps="eps", offset=1.0)},
    mlps=("Qwen3_5MoeMLP",),
    routers=("Qwen3_5MoeTopKRouter",),
    within="qwen3_5_moe",
    linear_attentions=("Qwen3_5MoeGatedDeltaNet",),
    gates_attention=True,
    grouped=("linear_attn.in_proj_qkv", "linear_attn.conv1d"),
    experts="mlp.experts",
    stored_experts=STORED_EXPERTS,
    stacks_experts=True,
    small_experts=_small_experts_beside_a_shared_one,
)
QWEN3_NEXT = Family(
    "qwen3_next",
    {
        "self_attn": ATTENTION | HEAD_NORMS,
        "linear_attn": _QWEN3_NEXT_DELTA_RULE,
        "mlp": GATED_MLP,
        "mlp.shared_expert": GATED_MLP,
    },
    norms={"Qwen3NextRMSNorm": Norm(eps="eps", offset=1.0)},
    mlps=("Qwen3NextMLP",),
    routers=("Qwen3NextTopKRouter",),
    linear_attentions=("Qwen3NextGatedDeltaNet",),
    gates_attention=True,
    grouped=("linear_attn.conv1d",),
    experts="mlp.experts",
    stored_experts=STORED_EXPERTS,
    small_experts=_small_experts_beside_a_shared_one,
)
