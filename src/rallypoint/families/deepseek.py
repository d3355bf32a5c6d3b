"""DeepSeek-V3 and R1 (arXiv 2412.19437), and models of their shape, such as Moonlight and Kimi K2.

Latent attention (MLA, arXiv 2405.04434): keys and values of all heads are products of one small latent of a token, and
so may queries be. Every rank of `tp` has what makes latents, and some heads. Keys have a part that is rotated and the
same for all heads, so that they are wider than values. That runs transformers' code. Biases of routers choose experts,
some groups of them for each token; an MLP that all tokens pass stands beside them. The layer that predicts a second
token ahead is left out, in files too.
"""

from rallypoint.families.family import GATED_MLP, STORED_EXPERTS, Cut, Family, Norm, small_routed_experts

LATENT_ATTENTION = {
    "q_proj": Cut.OUTPUTS,
    "q_a_proj": Cut.SUMMED,
    "q_a_layernorm": Cut.SUMMED,
    "q_b_proj": Cut.OUTPUTS,
    "kv_a_proj_with_mqa": Cut.SUMMED,
    "kv_a_layernorm": Cut.SUMMED,
    "kv_b_proj": Cut.OUTPUTS,
    "o_proj": Cut.INPUTS,
}
"""Cut of latent attention: a rank has some heads, and all of the latents."""

DEEPSEEK_V3 = Family(
    "deepseek_v3",
    {"self_attn": LATENT_ATTENTION, "mlp": GATED_MLP, "mlp.shared_experts": GATED_MLP},
    norms={"DeepseekV3RMSNorm": Norm()},
    mlps=("DeepseekV3MLP",),
    biased_routers=("DeepseekV3TopkRouter",),
    has_latents=True,
    experts="mlp.experts",
    stored_experts=STORED_EXPERTS,
    small_experts=lambda num_layers, width: small_routed_experts(num_layers, width) | {"n_group": 4, "topk_group": 2},
)
