"""Weights that takers read from where they are."""

import gc
import mmap
import os
import sys

import pytest
import torch
from tiny_models import make_tiny_model

from rallypoint.config import LoRAConfig
from rallypoint.errors import WeightsMismatchError
from rallypoint.model_files import load_policy
from rallypoint.models import Part, trained_weights
from rallypoint.models.layers import joined
from rallypoint.observability.memory import resident_bytes
from rallypoint.weights import HEADER_BYTES, Exposed, Held, Manifest, Receiver, share_trained
from rallypoint.weights.endpoints import seal
from rallypoint.weights.shared import share

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory without a name is Linux's")

CPU = torch.device("cpu")


def held_of(tensors):
    return {name: Held(tensor.dtype, Part.whole(tensor.shape)) for name, tensor in tensors.items()}


def shared(tensors):
    """The memory, and what is exposed of it."""
    memory = share(tensors.values())
    assert memory is not None
    return memory, memory.exposed(held_of(tensors), tensors)


def opened(exposed):
    """What another process has."""
    return Exposed.opened(exposed.told(exposed.starts), exposed.starts, exposed.descriptor)


def seen(exposed, name, like):
    """A tensor as another process sees it."""
    other = opened(exposed)
    start = other.starts[name]
    return torch.from_numpy(other.data[start : start + like.nbytes].copy()).view(like.dtype).view(like.shape)


@pytest.mark.parametrize("lora", [False, True], ids=["all weights", "adapters"])
def test_weights_keep_their_numbers_and_neighbours_and_what_trains_them_is_seen_elsewhere(tmp_path, lora):
    path = make_tiny_model(tmp_path)
    model = load_policy(path, dtype="float32", lora=LoRAConfig(rank=3, alpha=5) if lora else None).model
    weights = trained_weights(model)
    before = {name: weight.detach().clone() for name, weight in weights.items()}
    memory = share_trained(model)
    assert memory is not None
    exposed = memory.exposed(held_of(weights), weights)
    assert exposed.starts.keys() == weights.keys() == trained_weights(model).keys()
    attention = model.base_model.layers[0].self_attn
    if not lora:
        assert joined([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]) is not None
    for name, weight in weights.items():
        assert weight.requires_grad
        assert weight.is_leaf
        assert torch.equal(weight, before[name])
        assert torch.equal(seen(exposed, name, weight), before[name])
    optimizer = torch.optim.AdamW(weights.values(), lr=0.1)
    for weight in weights.values():
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert not all(torch.equal(weight, before[name]) for name, weight in weights.items())
    assert all(torch.equal(seen(exposed, name, weight), weight) for name, weight in weights.items())


def test_a_weight_that_changes_in_place_does_not_count_as_a_change_of_its_neighbours(tmp_path):
    model = load_policy(make_tiny_model(tmp_path), dtype="float32").model
    weights = trained_weights(model)
    share_trained(model)
    first, *others = weights.values()
    versions = [weight._version for weight in others]
    with torch.no_grad():
        first.add_(1.0)
    assert [weight._version for weight in others] == versions


def test_tied_weights_stay_one(tmp_path):
    model = load_policy(make_tiny_model(tmp_path, tie_embeddings=True), dtype="float32").model
    share_trained(model)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()


@pytest.mark.parametrize("num_rows", [32, 33], ids=["even", "uneven"])
def test_what_a_rank_has_of_a_sharded_model_is_seen_elsewhere_and_gathered_from_there(on_mesh, tmp_path, num_rows):
    """Of what does not divide evenly torch moves the smaller parts again: those take the other way."""
    path = make_tiny_model(tmp_path, intermediate_size=num_rows)
    whole = {name: weight.detach() for name, weight in load_policy(path, dtype="float32").model.named_parameters()}

    def train(mesh):
        shard = load_policy(path, dtype="float32", mesh=mesh)
        memory = share_trained(shard.model)
        assert memory is not None
        with torch.no_grad():
            for weight in shard.sharding.weights.values():
                weight.add_(1.0)
        tensors = shard.trained()
        held = {name: Held(tensor.dtype, shard.parts[name]) for name, tensor in tensors.items()}
        exposed = memory.exposed(held, tensors)
        assert all(torch.equal(seen(exposed, name, tensors[name]), tensors[name]) for name in exposed.starts)
        with torch.no_grad():
            gathered = shard.sharding.run(lambda: shard.model.get_output_embeddings().weight.clone())
        assert torch.equal(gathered, whole["lm_head.weight"] + 1.0)
        return {name for name in tensors if name not in exposed.starts}

    moved = {f"model.layers.{layer}.mlp.{name}_proj.weight" for layer in (0, 1) for name in ("gate", "up")}
    assert on_mesh(train, dp_shard=2) == [set(), moved if num_rows == 33 else set()]


def test_what_is_published_in_another_type_or_not_end_to_end_or_moved_again_is_not_exposed():
    tensors = {name: torch.ones(4, 6) for name in ("plain", "rounded", "turned", "moved")}
    memory, _ = shared(tensors)
    tensors |= {"turned": tensors["turned"].T, "moved": tensors["moved"].clone()}
    held = held_of(tensors) | {"rounded": Held(torch.bfloat16, Part.whole((4, 6)))}
    assert memory.exposed(held, tensors).starts.keys() == {"plain"}


def test_a_bit_that_flips_after_the_checksums_were_taken_is_refused_and_does_not_reach_the_model():
    tensors = {"first": torch.randn(40), "second": torch.randn(30)}
    _, exposed = shared(tensors)
    manifest = Manifest.of([held_of(tensors)])
    header, runs = torch.zeros(HEADER_BYTES, dtype=torch.uint8), exposed.runs(manifest.buckets[0])
    assert runs is not None
    seal(header, 0, 7, runs)
    tensors["second"][3] *= -1
    model = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    sink = Receiver(manifest, model, 7)
    sink.unpack(0, header, opened(exposed).runs(manifest.buckets[0]))
    with pytest.raises(WeightsMismatchError, match="version 7 was not loaded: second was damaged on its way"):
        sink.finish()
    assert not model["second"].any()


def test_who_reads_what_is_exposed_cannot_write_it():
    memory, exposed = shared({"w": torch.ones(3)})
    with pytest.raises(ValueError, match="read-only"):
        opened(exposed).data[0] = 1
    with pytest.raises(PermissionError):
        mmap.mmap(exposed.descriptor, memory.num_bytes)
    with pytest.raises(PermissionError):
        os.pwrite(exposed.descriptor, b"1", 0)


def test_what_is_not_exposed_has_no_place_elsewhere():
    _, exposed = shared({"w": torch.ones(3), "v": torch.ones(5)})
    names = ["v", "another", "w"]
    assert Exposed.opened(exposed.told(names), names, exposed.descriptor).starts == exposed.starts


def test_what_a_process_shares_of_its_own_counts_as_its_memory_until_it_is_gone():
    before, tensor = resident_bytes(CPU), torch.ones(2**24)
    memory, exposed = shared({"w": tensor})
    assert resident_bytes(CPU) - before == pytest.approx(tensor.nbytes, rel=0.1)
    del memory, exposed, tensor
    gc.collect()
    assert resident_bytes(CPU) - before < 2**24
