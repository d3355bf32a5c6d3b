"""Llama 2 and 3 (arXiv 2307.09288, 2407.21783)."""

from rallypoint.families.family import ATTENTION, GATED_MLP, Family, Norm, no_window

LLAMA = Family(
    "llama",
    {"self_attn": ATTENTION, "mlp": GATED_MLP},
    norms={"LlamaRMSNorm": Norm()},
    attentions={"LlamaAttention": no_window},
    mlps=("LlamaMLP",),
    is_plain=True,
)
