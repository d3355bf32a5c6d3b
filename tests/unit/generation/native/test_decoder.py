import copy

import pytest
import torch
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from rallypoint.errors import ModelError
from rallypoint.generation.native.decoder import PlainDecoder, check_decoder
from rallypoint.model_files import load_policy


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_tokens_come_out_as_from_the_models_own_code(make_policy, architecture, kv_heads):
    model = copy.deepcopy(make_policy(architecture, kv_heads)).double()
    assert PlainDecoder.fits(model)
    with torch.no_grad():
        check_decoder(model, PlainDecoder(model))


def test_arithmetic_that_differs_from_the_models_own_is_an_error(make_policy):
    model = copy.deepcopy(make_policy())
    decoder = PlainDecoder(model)
    layer = model.base_model.layers[1].mlp
    layer.down_proj = nn.Linear(32, 16, bias=False)  # the decoder goes on with the old one
    with torch.no_grad(), pytest.raises(ModelError, match="LlamaForCausalLM decoded token by token differs"):
        check_decoder(model, decoder)


def test_what_does_more_than_its_class_says_goes_through_its_own_code(make_policy):
    class Adapted(nn.Linear):
        pass

    adapted, hooked = copy.deepcopy(make_policy()), copy.deepcopy(make_policy())
    adapted.base_model.layers[0].mlp.up_proj = Adapted(16, 32, bias=False)
    hooked.base_model.layers[0].register_forward_hook(lambda *_: None)
    assert not PlainDecoder.fits(adapted)
    assert not PlainDecoder.fits(hooked)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_move_after_the_first_token_are_found_where_they_are(make_policy, dtype):
    model = copy.deepcopy(make_policy()).to(dtype)
    decoder = PlainDecoder(model)
    with torch.no_grad():
        check_decoder(model, decoder)
        for layer in model.base_model.layers:
            attention, mlp = layer.self_attn, layer.mlp
            for linears in ([attention.q_proj, attention.k_proj, attention.v_proj], [mlp.gate_proj, mlp.up_proj]):
                rows = [len(linear.weight) for linear in linears]
                together = torch.randn(sum(rows), 16, dtype=dtype) * 0.3
                for linear, part in zip(linears, together.split(rows), strict=True):
                    linear.weight.data = part
        check_decoder(model, decoder)
        model.base_model.layers[0].mlp.up_proj.weight.data = torch.randn(32, 16, dtype=dtype) * 0.3
        check_decoder(model, decoder)


def test_layers_with_biases_come_out_as_from_the_models_own_code(tmp_path):
    sizes = {"vocab_size": 20, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    config = Qwen2Config(**sizes, num_attention_heads=4, num_key_value_heads=2)
    model = Qwen2ForCausalLM(config)
    weights = dict(model.named_parameters())
    assert "model.layers.0.self_attn.q_proj.bias" in weights
    with torch.no_grad():
        for name, weight in weights.items():
            weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(len(name))) * 0.3)
    model.save_pretrained(tmp_path)
    loaded = load_policy(str(tmp_path), dtype="float64").model
    assert PlainDecoder.fits(loaded)
    decoder = PlainDecoder(loaded)
    with torch.no_grad():
        check_decoder(loaded, decoder)
        change_all(loaded)
        check_decoder(loaded, decoder)


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_weights_that_change_where_they_are_are_those_that_decode(make_policy, architecture):
    model = copy.deepcopy(make_policy(architecture)).double()
    decoder = PlainDecoder(model)
    change_all(model)
    with torch.no_grad():
        check_decoder(model, decoder)


def change_all(model):
    """Change every weight and bias in place, as an optimizer's step and a published version do."""
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.1)


def test_rotations_that_change_with_the_length_of_a_row_go_through_the_models_own_code(make_policy):
    model = copy.deepcopy(make_policy())
    model.base_model.rotary_emb.rope_type = "longrope"
    assert not PlainDecoder.fits(model)
