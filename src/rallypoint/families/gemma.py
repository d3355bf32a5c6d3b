"""Gemma 1 (arXiv 2403.08295), Gemma 2 (2408.00118) and the text models of Gemma 3 (2503.19786).

Their norms multiply by 1 + weight. Attentions, MLPs and scaled embeddings run transformers' code. Gemma 2 caps scores
and logits; configs of Gemma 3 may.
"""

from rallypoint.families.family import ATTENTION, GATED_MLP, HEAD_NORMS, Family, Norm

_NORM = Norm(eps="eps", offset=1.0)

GEMMA = Family(
    "gemma",
    {"self_attn": ATTENTION, "mlp": GATED_MLP},
    norms={"GemmaRMSNorm": _NORM},
    ties_embeddings=True,
)
GEMMA2 = Family(
    "gemma2",
    {"self_attn": ATTENTION, "mlp": GATED_MLP},
    norms={"Gemma2RMSNorm": _NORM},
    caps_logits=True,
    ties_embeddings=True,
)
GEMMA3 = Family(
    "gemma3_text",
    {"self_attn": ATTENTION | HEAD_NORMS, "mlp": GATED_MLP},
    norms={"Gemma3RMSNorm": _NORM},
    caps_logits=True,
    ties_embeddings=True,
)
