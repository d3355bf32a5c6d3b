import copy
from typing import Any

import numpy as np
import torch
from torch import nn

from rallypoint.data import make_digits_tokenizer
from rallypoint.models import create_model, load_policy, named_weights
from rallypoint.models.joined import joined


def load(folder) -> Any:
    create_model(
        folder,
        make_digits_tokenizer(),
        architecture="llama",
        hidden_size=16,
        num_layers=2,
        num_heads=4,
        num_key_value_heads=2,
        intermediate_size=32,
        tie_embeddings=True,
        initializer_range=0.3,
        max_positions=64,
        seed=0,
    )
    return load_policy(str(folder), dtype="float32").model


def test_weights_of_layers_of_one_input_are_loaded_behind_one_another(tmp_path):
    model = load(tmp_path)
    for layer in model.base_model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for linears in ([attention.q_proj, attention.k_proj, attention.v_proj], [mlp.gate_proj, mlp.up_proj]):
            weights = [linear.weight for linear in linears]
            together = joined(weights)
            assert together is not None
            assert torch.equal(together, torch.cat(weights))
            assert all(type(weight) is nn.Parameter and weight.is_leaf and weight.requires_grad for weight in weights)


def test_a_weight_that_changes_in_place_changes_nothing_but_itself_and_the_view_of_all(tmp_path):
    model = load(tmp_path)
    attention = model.base_model.layers[0].self_attn
    weights = [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]
    together, before = joined(weights), {name: weight.clone() for name, weight in named_weights(model).items()}
    versions = [weight._version for weight in weights]
    with torch.no_grad():
        weights[1].add_(1.0)
    assert [weight._version - old for weight, old in zip(weights, versions, strict=True)] == [0, 1, 0]
    assert together is not None
    assert torch.equal(together, torch.cat(weights))
    changed = [name for name, weight in named_weights(model).items() if not torch.equal(weight, before[name])]
    assert changed == ["model.layers.0.self_attn.k_proj.weight"]


def test_copied_weights_lie_apart_and_are_not_joined(tmp_path):
    mlp = copy.deepcopy(load(tmp_path)).base_model.layers[0].mlp
    assert joined([mlp.gate_proj.weight, mlp.up_proj.weight]) is None
    assert joined([mlp.up_proj.weight, mlp.gate_proj.weight]) is None


def test_tensors_that_are_neighbours_by_chance_are_not_joined():
    numbers = np.arange(8.0)
    first, second = (torch.from_numpy(part).view(2, 2) for part in (numbers[:4], numbers[4:]))
    assert first.data_ptr() + first.nbytes == second.data_ptr()
    assert joined([first, second]) is None
    assert joined([first, second.float()]) is None
