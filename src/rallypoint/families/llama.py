"""Llama 2 and 3 (arXiv 2307.09288, 2407.21783), and Mistral (2310.06825): a Llama whose attention may have a window."""

from rallypoint.families.family import ATTENTION, GATED_MLP, Family, Norm, no_window

LLAMA = Family(
    "llama",
    {"self_attn": ATTENTION, "mlp": GATED_MLP},
    norms={"LlamaRMSNorm": Norm()},
    attentions={"LlamaAttention": no_window},
    mlps=("LlamaMLP",),
    is_plain=True,
)
MISTRAL = Family(
    "mistral",
    {"self_attn": ATTENTION, "mlp": GATED_MLP},
    norms={"MistralRMSNorm": Norm()},
    attentions={"MistralAttention": lambda attention: attention.config.sliding_window},
    mlps=("MistralMLP",),
)
