"""Mistral (arXiv 2310.06825): a Llama whose attention may look back over a window only."""

from rallypoint.families.family import ATTENTION, GATED_MLP, Family, Norm

MISTRAL = Family(
    "mistral",
    {"self_attn": ATTENTION, "mlp": GATED_MLP},
    norms={"MistralRMSNorm": Norm()},
    attentions={"MistralAttention": lambda attention: attention.config.sliding_window},
    mlps=("MistralMLP",),
)
