import copy

import pytest
import torch
from torch import nn

from rallypoint.errors import ModelError
from rallypoint.generation.decoder import PlainDecoder, check_decoder


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
