"""Models cut over ranks against the whole model: outputs, gradients, and what every rank has of a weight."""

import copy
import itertools

import pytest
import torch
from grids import thinned
from safetensors.torch import load_file
from tiny_families import FAMILY_CONFIGS, MIXTURE, SIZES
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from rallypoint.engine import critic_values, policy_outputs
from rallypoint.engine.forward import trained_positions
from rallypoint.errors import ModelError
from rallypoint.families import FAMILIES
from rallypoint.model_files import load_policy, save_model
from rallypoint.model_files.load import TokenClassifiers
from rallypoint.model_files.load_checks import check_agreement
from rallypoint.models import ModelShard
from rallypoint.models.attention import ATTENTION
from rallypoint.models.head import lm_head
from rallypoint.models.kinds.experts import EXPERTS, replace_routers
from rallypoint.models.kinds.linear_attention import replace_linear_attentions
from rallypoint.models.norm import replace_norms
from rallypoint.models.part import Part
from rallypoint.models.tensor_parallel import cut_model, family_of
from rallypoint.parallel import DeviceMesh
from rallypoint.types import Sequences

CONFIGS = {
    **FAMILY_CONFIGS,
    "llama, tied": lambda **sizes: LlamaConfig(**sizes, tie_word_embeddings=True),
    "llama, with biases": lambda **sizes: LlamaConfig(**sizes, attention_bias=True, mlp_bias=True),
    "qwen3, tied": lambda **sizes: Qwen3Config(**sizes, head_dim=8, tie_word_embeddings=True),
    "qwen3_moe, one layer dense": lambda **sizes: Qwen3MoeConfig(**sizes, **MIXTURE, mlp_only_layers=[1]),
}
TOLERANCES = {torch.float64: {"rtol": 1e-12, "atol": 1e-12}, torch.float32: {"rtol": 1e-5, "atol": 2e-5}}


def make_whole(config, dtype=torch.float64, factory=AutoModelForCausalLM):
    """Build a model with all weights random, norms and biases too."""
    model = factory.from_config(config, attn_implementation=ATTENTION, experts_implementation=EXPERTS).to(dtype)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * (0.3 if weight.dim() > 1 else 0.1))
            weight += 1.0 if weight.dim() == 1 else 0.0
    replace_norms(model)  # transformers' own round to float32, and so do its routers
    replace_routers(model)
    replace_linear_attentions(model)  # transformers' own have no rows
    return model.eval()


def make_batch(lengths=(5, 1, 12, 7)):
    generator = torch.Generator().manual_seed(1)
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    loss_mask = torch.ones(int(offsets[-1]), dtype=torch.bool)
    loss_mask[offsets[:-1]] = False
    return Sequences(
        offsets=offsets,
        tokens=torch.randint(SIZES["vocab_size"], (int(offsets[-1]),), generator=generator),
        loss_mask=loss_mask,
        prompt_index=torch.arange(len(lengths)),
        sample_index=torch.zeros(len(lengths), dtype=torch.int64),
    )


def policy_pass(model, mesh=None):
    """Return logprobs and entropies, after a backward pass of a sum in which each has a weight of its own."""
    batch = make_batch()
    found = policy_outputs(ModelShard.whole(model, mesh), batch, trained_positions(batch), 0.8)
    weigh = torch.linspace(-1, 1, len(found.logprobs), dtype=found.logprobs.dtype)
    (found.logprobs @ weigh + found.entropy @ weigh.flip(0)).backward()
    return found.logprobs.detach(), found.entropy.detach()


def critic_pass(model):
    batch = make_batch()
    values = critic_values(ModelShard.whole(model), batch, trained_positions(batch))
    values.square().sum().backward()
    return (values.detach(),)


def gradients_of(model, cut, tp):
    """Return the gradient of each weight, as the ranks have it once they added up what needs it."""
    found = {}
    for name, weight in model.named_parameters():
        found[name] = torch.zeros_like(weight) if weight.grad is None else weight.grad
        if name in cut.summed:
            tp.all_reduce_sum([found[name]])
    return found


def assert_cut_equals_whole(on_mesh, whole, one_pass, num_ranks, tolerance):
    """Compare every rank's outputs and gradients, and what all of them have of each weight."""

    def on_rank(mesh):
        model = copy.deepcopy(whole)
        cut = cut_model(model, family_of(model.config.model_type), mesh.tp)
        outputs = one_pass(model)
        return outputs, cut.parts, gradients_of(model, cut, mesh.tp)

    assert_equal_to_whole(on_mesh(on_rank, tp=num_ranks), whole, one_pass(whole), tolerance)


def assert_equal_to_whole(found, whole, expected, tolerance):
    for outputs, parts, gradients in found:
        for actual, wanted in zip(outputs, expected, strict=True):
            torch.testing.assert_close(actual, wanted, **tolerance)
        for name, weight in whole.named_parameters():
            wanted = weight.grad[parts[name].within(Part.whole(weight.shape))]
            scale = float(weight.grad.abs().max())
            error = (gradients[name] - wanted).abs().max()
            assert error <= tolerance["rtol"] * scale, (name, float(error / scale))


IN_FLOAT32 = {"llama, tied", "qwen3_moe", "qwen3_5_text"}
"""One of each kind of layers; the others differ in names and sizes, which float64 shows."""


@pytest.mark.parametrize(
    ("name", "dtype"),
    thinned(
        itertools.product(CONFIGS, TOLERANCES),
        *itertools.product(CONFIGS, [torch.float64]),
        *itertools.product(CONFIGS.keys() & IN_FLOAT32, [torch.float32]),
    ),
    ids=str,
)
def test_two_ranks_have_the_numbers_and_gradients_of_one(on_mesh, name, dtype):
    whole = make_whole(CONFIGS[name](**SIZES), dtype)
    assert_cut_equals_whole(on_mesh, whole, policy_pass, 2, TOLERANCES[dtype])


@pytest.mark.parametrize("name", ["llama, tied", "qwen3_moe"])
def test_four_ranks_have_the_numbers_and_gradients_of_one(on_mesh, name):
    sizes = SIZES | {"num_key_value_heads": 4}
    assert_cut_equals_whole(on_mesh, make_whole(CONFIGS[name](**sizes)), policy_pass, 4, TOLERANCES[torch.float64])


@pytest.mark.parametrize("name", FAMILY_CONFIGS)
def test_a_critic_has_the_values_and_gradients_of_one_rank(on_mesh, name):
    whole = make_whole(CONFIGS[name](**SIZES, num_labels=1), factory=TokenClassifiers)
    assert_cut_equals_whole(on_mesh, whole, critic_pass, 2, TOLERANCES[torch.float64])


@pytest.mark.parametrize("name", ["llama, tied", "mistral", "qwen3_moe"])
def test_ranks_that_share_tokens_and_matrices_have_the_numbers_and_gradients_of_one(on_mesh, name):
    whole = make_whole(CONFIGS[name](**SIZES))

    def on_rank(mesh):
        model = copy.deepcopy(whole)
        cut = cut_model(model, family_of(model.config.model_type), mesh.tp)
        outputs = policy_pass(model, mesh)
        gradients = gradients_of(model, cut, mesh.tp)
        mesh.sp.all_reduce_sum(list(gradients.values()))
        return outputs, cut.parts, gradients

    found = on_mesh(on_rank, sp=2, tp=2)
    assert_equal_to_whole(found, whole, policy_pass(whole), TOLERANCES[torch.float64])


def test_ranks_have_the_same_bits_of_what_they_compute_together(on_mesh):
    def on_rank(mesh):
        model = make_whole(CONFIGS["qwen3"](**SIZES), torch.float32)
        cut = cut_model(model, family_of("qwen3"), mesh.tp)
        return *policy_pass(model), *(
            g for name, g in gradients_of(model, cut, mesh.tp).items() if cut.parts[name].is_whole
        )

    first, second = on_mesh(on_rank, tp=2)
    assert all(torch.equal(mine, other) for mine, other in zip(first, second, strict=True))


@pytest.mark.parametrize("make_config", CONFIGS.values(), ids=CONFIGS.keys())
def test_the_parts_of_all_ranks_are_the_whole_model_again(on_mesh, make_config):
    whole = make_whole(make_config(**SIZES))

    def on_rank(mesh):
        model = copy.deepcopy(whole)
        return cut_model(model, family_of(model.config.model_type), mesh.tp).parts, dict(model.named_parameters())

    ranks = on_mesh(on_rank, tp=2)
    for name, weight in whole.named_parameters():
        assembled = torch.full_like(weight, float("nan"))
        for parts, weights in ranks:
            assembled[parts[name].within(Part.whole(weight.shape))] = weights[name].detach()
        assert torch.equal(assembled, weight), name
    held = [sum(weight.numel() for weight in weights.values()) for _, weights in ranks]
    assert max(held) < 0.6 * sum(weight.numel() for weight in whole.parameters())


def test_a_model_without_memory_is_cut_like_one_with(on_mesh):
    config = CONFIGS["qwen3_moe"](**SIZES)

    full_of_rank = [make_whole(config) for _ in range(2)]

    def on_rank(mesh):
        with torch.device("meta"):
            empty = AutoModelForCausalLM.from_config(config)
        full = full_of_rank[mesh.tp.rank]
        parts = [cut_model(model, family_of("qwen3_moe"), mesh.tp) for model in (empty, full)]
        shapes = [{name: weight.shape for name, weight in model.named_parameters()} for model in (empty, full)]
        return parts, shapes, {weight.device.type for weight in empty.parameters()}

    for parts, shapes, devices in on_mesh(on_rank, tp=2):
        assert parts[0] == parts[1]
        assert shapes[0] == shapes[1] == {name: part.sizes for name, part in parts[0].parts.items()}
        assert devices == {"meta"}


@pytest.mark.parametrize("name", ["llama, tied", "llama, with biases", "gemma2", "qwen3_moe, one layer dense"])
def test_a_folder_is_loaded_in_parts_and_saved_whole(on_mesh, tmp_path, name):
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(CONFIGS[name](**SIZES)).save_pretrained(tmp_path / "whole")
    expected = policy_pass(load_policy(str(tmp_path / "whole"), dtype="float32").model)

    def on_rank(mesh):
        shard = load_policy(str(tmp_path / "whole"), dtype="float32", mesh=mesh)
        save_model(shard, tmp_path / "again")
        return policy_pass(shard.model)

    for outputs in on_mesh(on_rank, tp=2):
        for actual, wanted in zip(outputs, expected, strict=True):
            torch.testing.assert_close(actual, wanted, **TOLERANCES[torch.float32])
    before, after = (load_file(tmp_path / folder / "model.safetensors") for folder in ("whole", "again"))
    assert before.keys() == after.keys()
    assert all(torch.equal(weight, after[name]) for name, weight in before.items())


def test_one_rank_keeps_the_model_as_it_is():
    model = make_whole(CONFIGS["llama"](**SIZES))
    before = dict(model.named_parameters())
    cut = cut_model(model, family_of("llama"), DeviceMesh.solo().tp)
    assert all(weight is before[name] for name, weight in model.named_parameters())
    assert all(part.is_whole for part in cut.parts.values())
    assert not cut.summed


def test_a_cut_model_agrees_with_its_own_code(on_mesh):
    def on_rank(mesh):
        model = make_whole(CONFIGS["qwen3_moe"](**SIZES), torch.float32)
        cut_model(model, family_of("qwen3_moe"), mesh.tp)
        check_agreement("here", model, lm_head(model))

    on_mesh(on_rank, tp=2)


def test_weights_of_one_rank_that_are_not_finite_are_named_by_all(on_mesh, tmp_path):
    model = make_whole(CONFIGS["llama"](**SIZES), torch.float32)
    model.get_parameter("model.layers.0.mlp.down_proj.weight").data[0, -1] = float("nan")  # which the last rank has
    model.save_pretrained(tmp_path)

    def on_rank(mesh):
        with pytest.raises(ModelError) as raised:
            load_policy(str(tmp_path), dtype="float32", mesh=mesh)
        return str(raised.value)

    for said in on_mesh(on_rank, tp=2):
        assert "its weights are not finite (NaN or infinite) in model.layers.0.mlp.down_proj.weight; copy" in said


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("llama", {"num_key_value_heads": 1}, "tp=2 does not divide 1 key/value heads; choose 1"),
        ("llama", {"intermediate_size": 25}, "tp=2 does not divide 25 outputs of gate_proj; choose 1, 5 or 25"),
        ("qwen3_moe", {"num_experts": 9}, "tp=2 does not divide 9 experts; choose 1, 3 or 9"),
    ],
)
def test_a_size_that_does_not_divide_is_named(on_mesh, name, changes, message):
    sizes = SIZES | {key: value for key, value in changes.items() if key in SIZES}
    config = CONFIGS[name](**sizes)
    for key, value in changes.items():
        setattr(config, key, value)

    def on_rank(mesh):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        with pytest.raises(ModelError, match=message):
            cut_model(model, family_of(config.model_type), mesh.tp)

    on_mesh(on_rank, tp=2)


def test_a_weight_that_the_plan_does_not_know_is_named(on_mesh):
    def on_rank(mesh):
        model = make_whole(CONFIGS["llama"](**SIZES))
        model.model.layers[1].mlp.gamma = torch.nn.Linear(2, 2)
        with pytest.raises(ModelError, match=r"gamma\.weight, gamma\.bias of LlamaMLP cannot be cut"):
            cut_model(model, family_of("llama"), mesh.tp)

    on_mesh(on_rank, tp=2)


def test_a_family_without_a_plan_is_refused_with_those_that_have_one():
    with pytest.raises(ModelError, match=f"type 'cohere' cannot be cut.*those of type {', '.join(FAMILIES)} can"):
        family_of("cohere")
