"""Replaced layers in the place of transformers' own: the same numbers, weights and names, with rows and without."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from rallypoint.models.attention import ATTENTION, PackedRows
from rallypoint.models.kinds.mlp import GatedMLP
from rallypoint.models.layers import replace_layers


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_a_model_says_the_same_and_keeps_the_names_of_its_weights(make_folder, architecture):
    model = AutoModelForCausalLM.from_pretrained(make_folder(architecture), dtype=torch.float32).eval()
    tokens = torch.arange(9).unsqueeze(0)
    names, weights = zip(*model.named_parameters(), strict=True)
    with torch.no_grad():
        before = model(tokens).logits
        replace_layers(model)
        without_rows = model(tokens).logits
        model.set_attn_implementation(ATTENTION)
        rows = PackedRows(torch.tensor([0, 9]), torch.device("cpu"))
        with_rows = model(tokens, position_ids=rows.position_ids, use_cache=False, rows=rows).logits
    assert tuple(name for name, _ in model.named_parameters()) == names
    assert all(one is other for one, other in zip(model.parameters(), weights, strict=True))
    for after in (without_rows, with_rows):
        torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-5)
    kinds = [type(module).__name__ for module in model.modules()]
    assert sum(kind.endswith("AttentionOnRows") for kind in kinds) == kinds.count("GatedMLP") == len(model.model.layers)


def test_another_activation_than_silu_is_left_to_the_model(make_folder):
    model = AutoModelForCausalLM.from_pretrained(make_folder("llama"), hidden_act="gelu")
    replace_layers(model)
    assert not any(isinstance(module, GatedMLP) for module in model.modules())
