"""Facts about families of models, a file each.

Must not know: torch, transformers, what is made of the facts.
"""

from __future__ import annotations

import importlib
import pkgutil

from rallypoint.families.family import Cut, Family, Norm

__all__ = [
    "BIASED",
    "FAMILIES",
    "MIXTURES",
    "Cut",
    "Family",
    "Norm",
    "small_experts",
    "small_heads",
    "small_linear_attention",
]


def _found() -> dict[str, Family]:
    modules = (
        importlib.import_module(f"{__name__}.{module.name}")
        for module in pkgutil.iter_modules(__path__)
        if not module.ispkg
    )
    found = (value for module in modules for value in vars(module).values() if isinstance(value, Family))
    return {family.model_type: family for family in sorted(found, key=lambda family: family.model_type)}


FAMILIES = _found()
"""`model_type` of config.json -> family, in alphabetical order."""
MIXTURES = {name: family for name, family in FAMILIES.items() if family.experts}
"""Those of them that are mixtures of experts."""
BIASED = {name: family for name, family in MIXTURES.items() if family.biased_routers}
"""Those of the mixtures whose routers choose with a bias of each expert."""


def small_experts(model_type: str, num_layers: int, intermediate_size: int) -> dict[str, int]:
    """Return what config.json of a small model says of its experts, if its family has any.

    >>> small_experts("qwen3_moe", 2, 32)
    {'num_experts': 8, 'num_experts_per_tok': 2, 'moe_intermediate_size': 8, 'norm_topk_prob': True}
    """
    make = MIXTURES[model_type].small_experts if model_type in MIXTURES else None
    return {} if make is None else make(num_layers, intermediate_size)


def small_heads(model_type: str, hidden_size: int, num_heads: int) -> dict[str, int]:
    """Return what config.json of a small model says of the sizes of heads, and of the latents that they are made of.

    >>> small_heads("llama", 64, 4)
    {'head_dim': 16}
    >>> small_heads("deepseek_v3", 64, 4)  # doctest: +NORMALIZE_WHITESPACE
    {'head_dim': 8, 'qk_nope_head_dim': 16, 'qk_rope_head_dim': 8, 'v_head_dim': 16, 'q_lora_rank': 32,
     'kv_lora_rank': 32}
    """
    head_dim = hidden_size // num_heads
    if model_type not in FAMILIES or not FAMILIES[model_type].has_latents:
        return {"head_dim": head_dim}
    rotated = 2 * -(-head_dim // 4)  # which is what transformers calls the size of a head
    sizes = {"head_dim": rotated, "qk_nope_head_dim": head_dim, "qk_rope_head_dim": rotated, "v_head_dim": head_dim}
    return sizes | {"q_lora_rank": hidden_size // 2, "kv_lora_rank": hidden_size // 2}


def small_linear_attention(model_type: str, num_heads: int, head_dim: int) -> dict[str, int]:
    """Return what config.json of a small hybrid says of its linear attention, if its family has any.

    >>> small_linear_attention("llama", 4, 16)
    {}
    """
    if model_type not in FAMILIES or not FAMILIES[model_type].linear_attentions:
        return {}
    sizes = {"linear_num_key_heads": num_heads, "linear_num_value_heads": num_heads, "linear_conv_kernel_dim": 4}
    return sizes | {"linear_key_head_dim": head_dim, "linear_value_head_dim": head_dim, "full_attention_interval": 2}
