"""Mistral (arXiv 2310.06825): a Llama whose attention may look back over a window only."""

from rallypoint.models.families.family import ATTENTION, GATED_MLP, Family

MISTRAL = Family("mistral", {"self_attn": ATTENTION, "mlp": GATED_MLP})
