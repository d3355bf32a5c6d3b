"""A model of a few thousand weights of every family, in transformers' own configs.

Windows are shorter than most rows, scores and logits are capped where a family does that, and sizes divide by two.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tiny_models import edit_weights
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    Glm4MoeConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

SIZES: dict[str, Any] = {
    "vocab_size": 23,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 128,
    "pad_token_id": 3,
    "use_cache": False,
}
MIXTURE: dict[str, Any] = {
    "head_dim": 8,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 8,
    "norm_topk_prob": True,
}
ROUTED: dict[str, Any] = {
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 8,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
}
LATENTS: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 10,
    "kv_lora_rank": 6,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
}
HYBRID: dict[str, Any] = {
    "head_dim": 8,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 6,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
}
FAMILY_CONFIGS: dict[str, Callable[..., PreTrainedConfig]] = {
    "gpt_oss": lambda **sizes: GptOssConfig(
        **sizes, head_dim=8, sliding_window=4, num_local_experts=8, num_experts_per_tok=3
    ),
    "llama": LlamaConfig,
    "mistral": lambda **sizes: MistralConfig(**sizes, sliding_window=4),
    "qwen2": Qwen2Config,
    "qwen3": lambda **sizes: Qwen3Config(**sizes, head_dim=8),
    "qwen3_5_text": lambda **sizes: Qwen3_5TextConfig(**sizes, **HYBRID, full_attention_interval=2),
    "qwen3_5_moe_text": lambda **sizes: Qwen3_5MoeTextConfig(
        **sizes, **MIXTURE | HYBRID, full_attention_interval=2, shared_expert_intermediate_size=12
    ),
    "qwen3_moe": lambda **sizes: Qwen3MoeConfig(**sizes, **MIXTURE),
    "qwen3_next": lambda **sizes: Qwen3NextConfig(
        **sizes, **MIXTURE | HYBRID, full_attention_interval=2, shared_expert_intermediate_size=12
    ),
    "glm4_moe": lambda **sizes: Glm4MoeConfig(**sizes, **ROUTED, head_dim=8, attention_bias=True, use_qk_norm=True),
    "deepseek_v3": lambda **sizes: DeepseekV3Config(**sizes | ROUTED | LATENTS),
    "gemma": lambda **sizes: GemmaConfig(**sizes, head_dim=8),
    "gemma2": lambda **sizes: Gemma2Config(
        **sizes, head_dim=8, sliding_window=4, attn_logit_softcapping=2.0, final_logit_softcapping=3.0
    ),
    "gemma3_text": lambda **sizes: Gemma3TextConfig(
        **sizes, head_dim=8, sliding_window=4, layer_types=["sliding_attention", "full_attention"]
    ),
}
"""By the `model_type` of config.json; each takes `SIZES`, changed or not."""


def make_family_model(folder: Path, model_type: str, **sizes: int) -> str:
    """Write a policy with random weights to a folder, norms and biases too, also of routers, and return the folder."""
    model = AutoModelForCausalLM.from_config(FAMILY_CONFIGS[model_type](**SIZES | sizes))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * (0.3 if weight.dim() > 1 else 0.1))
            weight += 1.0 if weight.dim() == 1 else 0.0
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.1)
    model.save_pretrained(folder)
    return str(folder)


def stack_experts(folder: Path) -> None:
    """Have a folder's file hold the experts of each layer in two tensors, as transformers has them in memory."""

    def stack(tensors: dict[str, Tensor]) -> None:
        for layer in {name.split(".experts.")[0] for name in tensors if ".experts." in name}:
            each = range(MIXTURE["num_experts"])
            gates, ups, downs = (
                torch.stack([tensors.pop(f"{layer}.experts.{expert}.{matrix}_proj.weight") for expert in each])
                for matrix in ("gate", "up", "down")
            )
            tensors[f"{layer}.experts.gate_up_proj"] = torch.cat([gates, ups], 1)
            tensors[f"{layer}.experts.down_proj"] = downs

    edit_weights(folder, stack)
