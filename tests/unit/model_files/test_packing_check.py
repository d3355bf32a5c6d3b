"""What is asked of a small model in the place of one that no rank has whole."""

import pytest
import torch
from tiny_models import TINY
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    Qwen3MoeConfig,
    SmolLM3Config,
)

from rallypoint.errors import ModelError
from rallypoint.model_files.load_checks import check_agreement, make_sketch, sketch_of
from rallypoint.models.head import lm_head

LARGE = TINY | {"vocab_size": 100_000, "intermediate_size": 50_000, "num_hidden_layers": 12}
MIXTURE = {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 50_000}
CONFIGS = {
    "llama": LlamaConfig(**LARGE),
    "mixture": Qwen3MoeConfig(**LARGE, **MIXTURE, mlp_only_layers=[0]),
    "capped": Gemma2Config(**LARGE, head_dim=8, attn_logit_softcapping=2.0, final_logit_softcapping=3.0),
    "two kinds of layers": Gemma3TextConfig(**LARGE, head_dim=8, sliding_window=5),
    "some layers without positions": SmolLM3Config(**LARGE),
}


def sketch(config, dtype=torch.float32):
    return make_sketch(
        config, AutoModelForCausalLM, dtype=dtype, device=torch.device("cpu"), trust_remote_code=False
    ).model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_a_sketch_of_what_packed_rows_can_do_agrees_with_its_own_code_and_is_small(config, dtype):
    model = sketch(config, dtype)
    check_agreement("here", model, lm_head(model))
    assert sum(weight.numel() for weight in model.parameters()) < 100_000
    assert (config.num_hidden_layers, config.vocab_size, config.intermediate_size) == (12, 100_000, 50_000)


def test_a_sketch_of_what_they_cannot_do_differs():
    model = sketch(CohereConfig(**LARGE))
    with pytest.raises(ModelError, match="CohereForCausalLM on packed rows differs from its own code"):
        check_agreement("here", model, lm_head(model))


def test_a_sketch_has_a_layer_of_every_kind():
    assert sketch_of(CONFIGS["two kinds of layers"]).layer_types == ["sliding_attention"] * 5 + ["full_attention"]
    assert sketch_of(CONFIGS["some layers without positions"]).no_rope_layers == [1, 1, 1, 0]
    assert sketch_of(CONFIGS["llama"]).num_hidden_layers == 2


@pytest.mark.parametrize(
    ("config", "kinds"),
    [
        (Qwen3MoeConfig(**LARGE, **MIXTURE, mlp_only_layers=[0, 1, 2]), ["GatedMLP"] * 3 + ["Qwen3MoeSparseMoeBlock"]),
        (Qwen3MoeConfig(**LARGE, **MIXTURE, decoder_sparse_step=4), ["GatedMLP"] * 3 + ["Qwen3MoeSparseMoeBlock"]),
        (Qwen3MoeConfig(**LARGE, **MIXTURE), ["Qwen3MoeSparseMoeBlock"] * 2),
    ],
    ids=["listed by number", "every fourth", "all alike"],
)
def test_a_sketch_has_a_layer_of_every_kind_that_the_config_says_by_a_number(config, kinds):
    assert [type(layer.mlp).__name__ for layer in sketch(config).model.layers] == kinds


def test_every_rank_has_the_same_sketch():
    first, second = (dict(sketch(CONFIGS["llama"]).named_parameters()) for _ in range(2))
    assert all(torch.equal(weight, second[name]) for name, weight in first.items())
