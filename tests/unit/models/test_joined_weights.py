import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from rallypoint.config import LoRAConfig
from rallypoint.data import make_digits_tokenizer
from rallypoint.engine.offload import Sleeper
from rallypoint.model_files import create_model, load_policy, reload
from rallypoint.models import Part, named_weights
from rallypoint.models.layers import joined


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


def pairs_of(model) -> list[list[nn.Module]]:
    """The layers of one input."""
    found = []
    for layer in model.base_model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        found += [[attention.q_proj, attention.k_proj, attention.v_proj], [mlp.gate_proj, mlp.up_proj]]
    return found


def check_loading_and_sleeping(path, whole, shard) -> set[bool]:
    """Compare what a rank has with its part of all when it is loaded, loaded again, and awake again.

    Returns:
        Whether layers of one input lie behind one another, each answer once.
    """

    def check() -> list[bool]:
        for name, tensor in shard.tensors().items():
            if name in whole:
                part = shard.parts[name]
                assert torch.equal(tensor, whole[name][part.within(Part.whole(part.shape))]), name
        lie = []
        for linears in pairs_of(shard.model):
            weights: list[Any] = [linear.weight for linear in linears]
            plain = all(type(weight) is nn.Parameter for weight in weights)
            together = joined(weights) if plain else None
            assert together is None or torch.equal(together, torch.cat(weights))
            lie.append(together is not None)
        return lie

    at_first = check()
    tensors = shard.tensors()
    with torch.no_grad():
        for name in whole.keys() & tensors.keys():
            tensors[name].zero_()
    if not shard.has_adapters:
        reload(path, shard)
    else:
        with torch.no_grad():
            for name in whole.keys() & tensors.keys():
                tensors[name].copy_(whole[name])
    assert check() == at_first
    if not any(isinstance(weight, DTensor) for weight in shard.model.parameters()):
        sleeping = list(shard.model.parameters())
        move(sleeping)
        sleeper = Sleeper()
        sleeper.sleep(sleeping)
        assert not any(weight.untyped_storage().nbytes() for weight in sleeping)
        sleeper.wake()
        assert check() == at_first
    return set(at_first)


def move(weights) -> None:
    """Move weights to memory that can be given back, which memory that a file was read into cannot on CPUs."""
    copies = {}
    for weight in weights:
        storage = weight.untyped_storage()
        if storage.data_ptr() not in copies:
            copies[storage.data_ptr()] = weight.detach().new_empty(storage.nbytes() // weight.itemsize)
            copies[storage.data_ptr()].untyped_storage().copy_(storage)
        same = copies[storage.data_ptr()]
        weight.data = same.as_strided(weight.shape, weight.stride(), weight.storage_offset())


@pytest.mark.parametrize(
    ("sizes", "lie"),
    [({"tp": 2}, {True}), ({"dp_shard": 2}, {False}), ({"dp_shard": 2, "tp": 2}, {False})],
    ids=str,
)
def test_parts_of_joined_weights_are_loaded_and_wake_as_they_were_on_meshes(on_mesh, tmp_path, sizes, lie):
    """Ranks that share matrices have their parts behind one another; those of FSDP lie apart."""
    whole = {name: weight.detach() for name, weight in named_weights(load(tmp_path)).items()}

    def on_rank(mesh):
        return check_loading_and_sleeping(str(tmp_path), whole, load_policy(str(tmp_path), dtype="float32", mesh=mesh))

    assert all(found == lie for found in on_mesh(on_rank, **sizes))


@pytest.mark.parametrize(
    ("targets", "lie"),
    [(["q_proj", "up_proj"], {False}), (["q_proj"], {False, True}), (["o_proj"], {True})],
    ids=str,
)
def test_joined_weights_are_loaded_and_wake_as_they_were_beside_adapters(tmp_path, targets, lie):
    """Layers with an adapter are computed by themselves, and so are those beside them."""
    whole = {name: weight.detach() for name, weight in named_weights(load(tmp_path)).items()}
    lora = LoRAConfig(rank=2, alpha=4, target_modules=targets)
    shard = load_policy(str(tmp_path), dtype="float32", lora=lora)
    assert check_loading_and_sleeping(str(tmp_path), whole, shard) == lie
