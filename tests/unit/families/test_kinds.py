"""Kinds of layers: what they read from config.json, and what they say of a layer."""

import pytest
import torch
from tiny_families import FAMILY_CONFIGS, SIZES
from transformers import AutoModelForCausalLM

from rallypoint.config.shape import ModelShape, parse_shape
from rallypoint.families import FAMILIES
from rallypoint.families.kinds import MIXERS, MLP, MLPS, Attention, Experts, Layers, LinearAttention, read_layers
from rallypoint.observability.flops import flops_of

SMALL = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 24, "vocab_size": 9}
MIXTURE = {"num_experts_per_tok": 2, "moe_intermediate_size": 8}


def shape_of(values: dict) -> ModelShape:
    shape = parse_shape(SMALL | values)
    assert shape is not None
    return shape


@pytest.mark.parametrize(
    "model_type",
    [
        "gpt_oss",
        "llama",
        "mistral",
        "qwen3",
        "qwen3_moe",
        "qwen3_5_text",
        "qwen3_5_moe_text",
        "qwen3_next",
        "deepseek_v3",
    ],
)
def test_a_model_has_as_many_weights_as_its_kinds_say(model_type: str):
    config = FAMILY_CONFIGS[model_type](**SIZES)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shape = parse_shape(config.to_dict())
    assert shape is not None
    assert shape.num_parameters == sum(weight.numel() for weight in model.parameters())


@pytest.mark.parametrize("model_type", FAMILY_CONFIGS)
def test_linear_layers_of_a_model_are_those_that_its_kinds_have_adapters_for(model_type: str):
    config = FAMILY_CONFIGS[model_type](**SIZES)
    with torch.device("meta"):
        layers = AutoModelForCausalLM.from_config(config).model.layers
    linears = (module for module in layers.modules() if isinstance(module, torch.nn.Linear))
    shape = parse_shape(config.to_dict())
    assert shape is not None
    found = sum(
        each.count * sum(map(sum, kind.products.values())) for each in shape.layers for kind in (each.mixer, each.mlp)
    )
    assert found == sum(module.in_features + module.out_features for module in linears)


@pytest.mark.parametrize("model_type", FAMILY_CONFIGS)
def test_a_kind_costs_what_is_counted_of_the_model(model_type: str):
    config = FAMILY_CONFIGS[model_type](**SIZES)
    counted, shape = flops_of(AutoModelForCausalLM.from_config(config)), parse_shape(config.to_dict())
    assert shape is not None
    assert counted.forward.per_token == 2 * shape.token_cost
    assert counted.attention_cost == pytest.approx(shape.attention_cost)


def test_layers_are_dealt_to_kinds_in_turn_and_equal_ones_stand_together():
    linear = {f"linear_{name}": 2 for name in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")}
    values = SMALL | MIXTURE | linear | {"linear_conv_kernel_dim": 4, "full_attention_interval": 4}
    values |= {"n_routed_experts": 6, "n_shared_experts": 1, "first_k_dense_replace": 1}
    layers = read_layers(values, FAMILIES["qwen3_next"])
    assert [(each.count, type(each.mixer), type(each.mlp)) for each in layers] == [
        (1, LinearAttention, MLP),
        (2, LinearAttention, Experts),
        (1, Attention, Experts),
    ]
    assert layers[1].mlp == Experts(16, num_experts=6, num_chosen=2, size=8, shared_size=8)
    assert layers[2].mixer == Attention(16, 4, 4, 4, norms_heads=True, is_gated=True)


@pytest.mark.parametrize(
    "values",
    [
        {"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 8},
        {"num_experts": 6, "num_hidden_layers": 8, "decoder_sparse_step": 2} | MIXTURE,
    ],
)
def test_experts_are_found_under_the_names_that_projects_use(values: dict):
    [experts] = [each for each in shape_of(values).layers if isinstance(each.mlp, Experts)]
    assert experts == Layers(4, Attention(16, 4, 4, 4), Experts(16, num_experts=6, num_chosen=2, size=8))


def test_a_mixture_without_dense_layers_needs_no_size_of_dense_ones():
    values = {name: size for name, size in SMALL.items() if name != "intermediate_size"} | MIXTURE | {"num_experts": 4}
    shape = parse_shape(values)
    assert shape is not None
    assert shape.inner_size == 2 * 8


def test_an_mlp_beside_experts_is_cut_by_its_columns_and_all_tokens_pass_it():
    experts = Experts(16, num_experts=6, num_chosen=2, size=8, shared_size=8, gates_shared=True)
    assert experts.num_parameters == 6 * 3 * 8 * 16 + 6 * 16 + 3 * 8 * 16 + 16
    assert experts.num_uncut_parameters == 0
    assert experts.width == 3 * 8
    assert experts.part(2, None).width == 2 * 4 + 4
    assert experts.part(2, 3).width == 3 * 2 * 8 + 4, "room for the tokens of three ranks"
    assert experts.of_ep_rank(3).num_parameters == experts.num_parameters - 4 * (3 * 8 + 1) * 16


def test_the_native_engine_caches_keys_and_values_of_all_heads_and_a_server_their_latent():
    shape = parse_shape(FAMILY_CONFIGS["deepseek_v3"](**SIZES).to_dict())
    assert shape is not None
    assert shape.cached_bytes(2) == 2 * 2 * 2 * 4 * 10, "two layers, keys and values, four heads as wide as a key"
    assert shape.cached_bytes(2, by_server=True) == 2 * 2 * (6 + 4)
    assert shape.part(2, None).cached_bytes(2) == shape.cached_bytes(2) // 2


def test_a_rank_has_its_part_of_heads_columns_and_tokens():
    part = shape_of({"num_key_value_heads": 2}).part(2, None)
    assert part.layers == (Layers(4, Attention(16, 2, 1, 4), MLP(16, 12)),)
    assert part.vocab_size == 5


def test_no_model_has_layers_of_no_kind():
    sizes = {name: size for name, size in SMALL.items() if name != "intermediate_size"}
    assert parse_shape(sizes) is None
    assert parse_shape(sizes | {"num_experts": 6, "mlp_only_layers": [0]} | MIXTURE) is None
    shape = parse_shape(sizes | {"num_experts": 6} | MIXTURE)
    assert shape is not None
    assert [type(each.mlp) for each in shape.layers] == [Experts]


def test_every_kind_finds_its_layers_alone_and_the_last_ones_take_all_that_is_left():
    for kinds in (MIXERS, MLPS):
        found = [kind.read(SMALL, None) for kind in kinds]
        assert [len(layers) for layers in found] == [4] * len(kinds)
        assert None not in found[-1]
