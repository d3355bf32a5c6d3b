"""Every family through the door of the loader, against transformers' own code on each row alone.

Its eager attention rounds every softmax to float32, and its linear attention all states, so that these are compared
more loosely than its sdpa, which knows no capped scores. Its norms and routers, which round likewise, are ours on both
sides: they have tests of their own. Rows are longer than the windows.
"""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    Glm4MoeConfig,
    GptOssConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from rallypoint.engine import policy_outputs
from rallypoint.engine.forward import trained_positions
from rallypoint.families import FAMILIES
from rallypoint.model_files import load_policy, own_names
from rallypoint.model_files.pieces import stored_tensors
from rallypoint.models import ModelShard
from rallypoint.models.kinds.experts import replace_routers
from rallypoint.models.norm import replace_norms
from rallypoint.types import Sequences

SIZES = {
    "vocab_size": 24,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "pad_token_id": None,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
HYBRID = {"head_dim": 8, "linear_key_head_dim": 4, "linear_value_head_dim": 6}
HYBRID |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "initializer_range": 0.1}
MIXTURE = {"head_dim": 8, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
SPARSE = {"num_local_experts": 6, "num_experts_per_tok": 2}
ROUTED = {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "first_k_dense_replace": 1}
GROUPS = {"n_group": 3, "topk_group": 2, "routed_scaling_factor": 1.5}
LATENTS = {"num_key_value_heads": 4, "kv_lora_rank": 6, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5}
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 32}
YARN |= {"mscale": 1.0, "mscale_all_dim": 0.7, "beta_fast": 32, "beta_slow": 1}
SLIDING = {"sliding_window": 5, "use_sliding_window": True}
CONFIGS = {
    "deepseek_v3": (DeepseekV3Config(**SIZES | ROUTED | GROUPS | LATENTS, q_lora_rank=10), "sdpa"),
    "deepseek_v3, queries without latents, yarn": (
        DeepseekV3Config(
            **SIZES | ROUTED | LATENTS | {"v_head_dim": 12},
            q_lora_rank=None,
            n_group=1,
            topk_group=1,
            rope_parameters=YARN,
            attention_bias=True,
        ),
        "sdpa",
    ),
    "gemma": (GemmaConfig(**SIZES, head_dim=8), "sdpa"),
    "gemma2": (
        Gemma2Config(**SIZES, head_dim=8, sliding_window=5, attn_logit_softcapping=2.0, final_logit_softcapping=3.0),
        "eager",
    ),
    "gemma3_text": (Gemma3TextConfig(**SIZES, head_dim=8, sliding_window=5, sliding_window_pattern=2), "sdpa"),
    "glm4_moe": (Glm4MoeConfig(**SIZES, **ROUTED, head_dim=8, attention_bias=True), "sdpa"),
    "glm4_moe, norms of heads and groups": (
        Glm4MoeConfig(**SIZES, **ROUTED, **GROUPS, use_qk_norm=True, norm_topk_prob=False, n_shared_experts=2),
        "sdpa",
    ),
    "gpt_oss": (GptOssConfig(**SIZES, **SPARSE, head_dim=8, sliding_window=5), "eager"),
    "mistral": (MistralConfig(**SIZES, sliding_window=5), "sdpa"),
    "mistral without a window": (MistralConfig(**SIZES, sliding_window=None), "sdpa"),
    "qwen2": (Qwen2Config(**SIZES), "sdpa"),
    "qwen2, some layers slide": (Qwen2Config(**SIZES, **SLIDING, max_window_layers=1), "sdpa"),
    "qwen3, some layers slide": (Qwen3Config(**SIZES, head_dim=8, **SLIDING, max_window_layers=2), "sdpa"),
    "qwen3_5_text": (Qwen3_5TextConfig(**SIZES | HYBRID, full_attention_interval=2), "sdpa"),
    "qwen3_5_moe_text": (
        Qwen3_5MoeTextConfig(**SIZES | MIXTURE | HYBRID, full_attention_interval=2, shared_expert_intermediate_size=12),
        "sdpa",
    ),
    "qwen3_moe": (Qwen3MoeConfig(**SIZES, **MIXTURE), "sdpa"),
    "qwen3_moe, some layers dense": (Qwen3MoeConfig(**SIZES, **MIXTURE, decoder_sparse_step=2), "sdpa"),
    "qwen3_next": (
        Qwen3NextConfig(**SIZES | MIXTURE | HYBRID, full_attention_interval=2, shared_expert_intermediate_size=12),
        "sdpa",
    ),
    "qwen3_moe that slides": (Qwen3MoeConfig(**SIZES, **MIXTURE, **SLIDING), "sdpa"),
}
TOLERANCES = {"eager": 1e-6, "sdpa": 1e-12, "linear": 1e-4}
LENGTHS = (23, 1, 6, 70)


@pytest.fixture(params=CONFIGS.values(), ids=CONFIGS.keys())
def both(request, tmp_path):
    """A model as we load it and as transformers loads it, and how near they have to be."""
    config, attention = request.param
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for name, bias in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            bias.normal_(std=0.1)
    model.save_pretrained(tmp_path)
    ours = load_policy(str(tmp_path), dtype="float64").model
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation=attention, experts_implementation="eager", dtype=torch.float64
    )
    replace_norms(theirs)  # transformers rounds what a norm of a float64 model returns to float32
    replace_routers(theirs)
    rounds = "linear" if FAMILIES[config.model_type].linear_attentions else attention
    return ours, theirs.eval(), TOLERANCES[rounds]


def test_the_logprobs_and_gradients_of_packed_rows_are_those_of_each_row_alone(both):
    ours, theirs, tolerance = both
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(SIZES["vocab_size"], (length,), generator=generator) for length in LENGTHS]
    offsets = torch.tensor([0, *LENGTHS]).cumsum(0)
    loss_mask = torch.ones(sum(LENGTHS), dtype=torch.bool)
    loss_mask[offsets[:-1]] = False
    batch = Sequences(
        offsets=offsets,
        tokens=torch.cat(rows),
        loss_mask=loss_mask,
        prompt_index=torch.arange(len(rows)),
        sample_index=torch.zeros(len(rows), dtype=torch.int64),
    )
    logprobs = policy_outputs(ModelShard.whole(ours), batch, trained_positions(batch), 1.0).logprobs
    wanted = torch.cat(
        [
            theirs(row.unsqueeze(0), use_cache=False).logits[0, :-1].log_softmax(-1).gather(1, row[1:, None]).squeeze(1)
            for row in rows
        ]
    )
    assert (logprobs - wanted).abs().max() <= tolerance * wanted.abs().max()
    weigh = torch.linspace(-1, 1, len(wanted), dtype=torch.float64)
    for values in (logprobs, wanted):
        (values @ weigh).backward()
    expected = {name: weight.grad for name, weight in theirs.named_parameters()}
    own = own_names(ours)  # where files have each weight as transformers has it in memory
    for name, weight in ours.named_parameters():
        scale = max(1.0, float(expected[name].abs().max()))
        gradient = stored_tensors(own, name, weight.grad)[name]
        assert (gradient - expected[name]).abs().max() <= tolerance * scale, name


def test_every_family_is_tested():
    assert {config.model_type for config, _ in CONFIGS.values()} | {"llama"} == set(FAMILIES)
