"""gpt-oss (OpenAI, 2025, arXiv 2508.10925): a mixture of experts with sinks of attention.

Every second layer has a window. Heads have a sink, and all projections a bias (`rallypoint.models.sinks`). Attention,
and the gate of experts, silu with a slope of 1.702 whose inputs are clamped, run transformers' code. Experts are
stored as inputs by outputs, all of a layer in one tensor, gate and up side by side.
"""

from rallypoint.families.family import ATTENTION, Cut, Family, Norm


def _small_experts(num_layers: int, width: int) -> dict[str, int]:
    del num_layers
    # A window is shorter than the rows of digits.
    sizes = {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": max(1, width // 4)}
    return sizes | {"sliding_window": 8}


GPT_OSS = Family(
    "gpt_oss",
    {"self_attn": ATTENTION | {"sinks": Cut.OUTPUTS}, "mlp": {}},
    norms={"GptOssRMSNorm": Norm()},
    routers=("GptOssTopKRouter",),
    experts="mlp.experts",
    has_biases=True,
    small_experts=_small_experts,
)
