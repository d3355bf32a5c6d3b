"""GLM-4.5 and GLM-4.5-Air (arXiv 2508.06471): mixtures whose first layers are dense.

A part of each head is rotated, queries, keys and values may have biases, and some models normalize heads; their
attention runs transformers' code. Routers are those of DeepSeek-V3. An MLP that all tokens pass stands beside the
experts. The layer that predicts a second token ahead is left out, in files too.
"""

from rallypoint.families.family import (
    ATTENTION,
    GATED_MLP,
    HEAD_NORMS,
    STORED_EXPERTS,
    Family,
    Norm,
    small_routed_experts,
)

GLM4_MOE = Family(
    "glm4_moe",
    {"self_attn": ATTENTION | HEAD_NORMS, "mlp": GATED_MLP, "mlp.shared_experts": GATED_MLP},
    norms={"Glm4MoeRMSNorm": Norm()},
    mlps=("Glm4MoeMLP",),
    biased_routers=("Glm4MoeTopkRouter",),
    experts="mlp.experts",
    stored_experts=STORED_EXPERTS,
    small_experts=lambda num_layers, width: small_routed_experts(num_layers, width) | {"attention_bias": True},
)
