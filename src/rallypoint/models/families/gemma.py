"""Gemma 1 (arXiv 2403.08295), Gemma 2 (2408.00118) and the text models of Gemma 3 (2503.19786).

Their norms and scaled embeddings do not matter here. Gemma 2 caps scores and logits, Gemma 3 could.
"""

from rallypoint.models.families.family import ATTENTION, GATED_MLP, HEAD_NORMS, Family

GEMMA = Family("gemma", {"self_attn": ATTENTION, "mlp": GATED_MLP})
GEMMA2 = Family("gemma2", {"self_attn": ATTENTION, "mlp": GATED_MLP}, caps_logits=True)
GEMMA3 = Family("gemma3_text", {"self_attn": ATTENTION | HEAD_NORMS, "mlp": GATED_MLP}, caps_logits=True)
