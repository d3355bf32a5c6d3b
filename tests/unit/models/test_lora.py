"""Adapters against the formula, against merged models, and in PEFT's format."""

import dataclasses
import json
import math
import shutil

import pytest
import safetensors.torch
import torch
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from rallypoint.config import LoRAConfig
from rallypoint.errors import ModelError
from rallypoint.model_files import (
    fresh,
    load_critic,
    load_policy,
    merge_adapters,
    open_adapter,
    read_adapter,
    save_adapter,
)
from rallypoint.models import PackedRows, lm_head, named_weights, trained_weights, twin, value_head
from rallypoint.models.lora import LoRALinear, adapted_layers

TOKENS, OFFSETS = torch.tensor([3, 9, 4, 11, 0, 7, 7, 2]), torch.tensor([0, 5, 8])
LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def adapted(folder, *, dtype="float32", critic=False, **lora):
    """A model with adapters whose update is not zero, as one rank's shard."""
    config = LoRAConfig(rank=3, **lora)
    shard = (load_critic if critic else load_policy)(folder, dtype=dtype, lora=config, seed=5)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in trained_weights(shard.model).values():
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.2)
    return shard


def outputs(shard, head=lm_head):
    """Logits (or values) of two packed rows."""
    model = shard.model
    rows = PackedRows(OFFSETS, torch.device("cpu"))
    with torch.no_grad():
        states = model.base_model(
            input_ids=TOKENS.unsqueeze(0), position_ids=rows.position_ids, use_cache=False, rows=rows
        ).last_hidden_state
        return head(model)(states.squeeze(0))


def in_transformers(model):
    """The same from transformers' own forward pass, a row at a time."""
    with torch.no_grad():
        return torch.cat([model(row.unsqueeze(0), use_cache=False).logits[0] for row in TOKENS.split([5, 3])])


@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_an_adapted_layer_computes_the_formula_and_gradients_for_the_update_alone(bias, rslora):
    torch.manual_seed(0)
    base = torch.nn.Linear(6, 5, bias=bias, dtype=torch.float64)
    layer = LoRALinear(base, rank=4, alpha=3.0, rslora=rslora)
    with torch.no_grad():
        a, b = (torch.randn_like(part.weight) for part in (layer.lora_A, layer.lora_B))
        layer.lora_A.weight.copy_(a)
        layer.lora_B.weight.copy_(b)
    weight = base.weight + 3.0 / (2.0 if rslora else 4.0) * b @ a
    states, seen = torch.randn(7, 6, dtype=torch.float64), torch.randn(7, 5, dtype=torch.float64)
    torch.testing.assert_close(layer(states), states @ weight.T + (base.bias if bias else 0.0))
    (layer(states) * seen).sum().backward()
    gradient = layer.scaling * seen.T @ states  # of B A
    torch.testing.assert_close(layer.lora_A.weight.grad, b.T @ gradient)
    torch.testing.assert_close(layer.lora_B.weight.grad, gradient @ a.T)
    assert base.weight.grad is None
    assert not bias or base.bias.grad is None


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_new_adapter_changes_no_bit_of_any_logit_and_no_name_of_any_weight(make_folder, dtype, architecture):
    folder = make_folder(architecture)
    plain, shard = load_policy(folder, dtype=dtype), load_policy(folder, dtype=dtype, lora=LoRAConfig())
    assert torch.equal(outputs(plain), outputs(shard))
    before, now = named_weights(plain.model), named_weights(shard.model)
    assert all(torch.equal(weight, now[name]) for name, weight in before.items())
    assert set(now) - set(before) == set(trained_weights(shard.model))
    assert len(trained_weights(shard.model)) == 2 * len(LAYERS) * 2
    assert {weight.dtype for weight in now.values()} == {getattr(torch, dtype)}


def test_all_layers_of_the_decoder_are_adapted_but_neither_head_nor_embedding(make_folder):
    for load in (load_policy, load_critic):
        model = load(make_folder(), dtype="float32", lora=LoRAConfig()).model
        assert [name.rpartition(".")[2] for name in adapted_layers(model)] == list(LAYERS) * 2


@pytest.mark.parametrize(
    ("wanted", "num_layers"), [(("q_proj", "v_proj"), 4), (("layers.1.mlp.up_proj",), 1), (("self_attn.o_proj",), 2)]
)
def test_layers_are_chosen_by_the_ends_of_their_names(make_folder, tmp_path, wanted, num_layers):
    shard = adapted(make_folder(), target_modules=wanted)
    assert len(adapted_layers(shard.model)) == num_layers
    assert all(name.endswith(wanted) for name in adapted_layers(shard.model))
    save_adapter(shard, tmp_path, base=make_folder())
    again = load_policy(make_folder(), dtype="float32", lora=LoRAConfig(path=str(tmp_path)))
    assert torch.equal(outputs(shard), outputs(again))


def test_first_values_depend_on_the_seed_and_the_name_of_the_layer_only(make_folder):
    def of(seed, **lora):
        return trained_weights(load_policy(make_folder(), dtype="float32", lora=LoRAConfig(**lora), seed=seed).model)

    first, other, few = of(0), of(1), of(0, target_modules=("v_proj",))
    assert few
    assert all(torch.equal(weight, first[name]) for name, weight in few.items())
    same = [name for name in first if torch.equal(first[name], other[name])]
    assert same == [name for name in first if name.endswith("lora_B.weight")]
    values = torch.cat([w.flatten() * math.sqrt(w.shape[1]) for name, w in first.items() if "lora_A" in name])
    assert values.abs().max() <= 1
    assert values.std().item() == pytest.approx(3**-0.5, rel=0.05)


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_a_merged_model_gives_the_logits_of_its_adapters(make_folder, architecture):
    shard = adapted(make_folder(architecture), dtype="float64", rslora=True)
    expected, names = outputs(shard), set(named_weights(shard.model)) - set(trained_weights(shard.model))
    merged = merge_adapters(shard)
    torch.testing.assert_close(outputs(merged), expected, rtol=1e-11, atol=1e-11)
    assert set(named_weights(merged.model)) == set(merged.parts) == names


def test_merging_is_computed_in_float32_whatever_the_type_of_the_weights(make_folder):
    shard = adapted(make_folder(), dtype="bfloat16", target_modules=("up_proj",))
    layer = shard.model.get_submodule("model.layers.1.mlp.up_proj")
    weight, a, b = (tensor.float() for tensor in (layer.weight, layer.lora_A.weight, layer.lora_B.weight))
    merged = merge_adapters(shard).model.get_submodule("model.layers.1.mlp.up_proj")
    assert torch.equal(merged.weight, (weight + 32 / 3 * b @ a).bfloat16())


def test_a_twin_shares_what_is_frozen_and_stays_when_the_adapters_are_trained(make_folder):
    shard = adapted(make_folder())
    expected, copied = outputs(shard), dataclasses.replace(shard, model=twin(shard.model))
    with torch.no_grad():
        for weight in trained_weights(shard.model).values():
            weight.add_(1.0)
    assert torch.equal(outputs(copied), expected)
    assert not torch.equal(outputs(shard), expected)
    pairs = [(weight, named_weights(copied.model)[name]) for name, weight in named_weights(shard.model).items()]
    assert all((mine is its) is not mine.requires_grad for mine, its in pairs)


@pytest.mark.parametrize("critic", [False, True], ids=["policy", "critic"])
def test_a_saved_adapter_comes_back_bit_for_bit(make_folder, tmp_path, critic):
    shard = adapted(make_folder(), critic=critic, dtype="bfloat16")
    save_adapter(shard, tmp_path, base=make_folder())
    load = load_critic if critic else load_policy
    again = load(make_folder(), dtype="bfloat16", lora=LoRAConfig(path=str(tmp_path))).model
    assert all(torch.equal(weight, named_weights(again)[name]) for name, weight in named_weights(shard.model).items())
    assert set(trained_weights(again)) == set(trained_weights(shard.model))
    assert ("score.weight" in trained_weights(shard.model)) is critic
    assert open_adapter(str(tmp_path)).base == make_folder()


@pytest.mark.parametrize("rslora", [False, True])
def test_peft_opens_a_saved_policy_and_gives_its_logits(make_folder, tmp_path, rslora):
    peft = pytest.importorskip("peft")
    shard = adapted(make_folder("qwen3"), rslora=rslora)
    save_adapter(shard, tmp_path, base=make_folder("qwen3"))
    base = AutoModelForCausalLM.from_pretrained(make_folder("qwen3"), attn_implementation="eager")
    theirs = peft.PeftModel.from_pretrained(base, tmp_path)
    torch.testing.assert_close(outputs(shard), in_transformers(theirs), rtol=1e-4, atol=1e-4)
    # transformers alone opens it as well, with peft installed: the folder names its base.
    torch.testing.assert_close(
        outputs(shard), in_transformers(AutoModelForCausalLM.from_pretrained(tmp_path)), rtol=1e-4, atol=1e-4
    )


def test_peft_opens_a_saved_critic_with_its_head(make_folder, tmp_path):
    peft = pytest.importorskip("peft")
    shard = adapted(make_folder(), critic=True)
    save_adapter(shard, tmp_path, base=make_folder())
    base = AutoModelForTokenClassification.from_pretrained(make_folder(), num_labels=1, attn_implementation="eager")
    theirs = peft.PeftModel.from_pretrained(base, tmp_path).eval()
    torch.testing.assert_close(outputs(shard, value_head), in_transformers(theirs), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": "all-linear"},
        {"target_modules": ["q_proj", "down_proj"], "use_rslora": True, "lora_alpha": 3, "lora_dropout": 0.1},
        {"target_modules": r".*layers\.1\..*(up|k)_proj", "init_lora_weights": "gaussian"},
        {"target_modules": ["v_proj"], "layers_to_transform": [0], "modules_to_save": ["lm_head"]},
    ],
    ids=["all", "some", "regex", "head"],
)
def test_an_adapter_made_by_peft_gives_its_logits_here(make_folder, tmp_path, options):
    peft = pytest.importorskip("peft")
    base = AutoModelForCausalLM.from_pretrained(make_folder(), attn_implementation="eager")
    theirs = peft.get_peft_model(base, peft.LoraConfig(r=5, task_type="CAUSAL_LM", **options)).eval()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for weight in theirs.parameters():
            if weight.requires_grad:
                weight.add_(torch.randn(weight.shape, generator=generator) * 0.2)
    theirs.save_pretrained(tmp_path)
    ours = load_policy(make_folder(), dtype="float32", lora=LoRAConfig(path=str(tmp_path)))
    torch.testing.assert_close(outputs(ours), in_transformers(theirs), rtol=1e-4, atol=1e-4)
    assert sum(w.numel() for w in trained_weights(ours.model).values()) == theirs.get_nb_trainable_parameters()[0]


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ("q_porj", r"'q_porj' matches no linear layer .* did you mean .*q_proj"),
        ("lm_head", "'lm_head' matches no linear layer in the decoder of LlamaForCausalLM"),
        ("input_layernorm", "'input_layernorm' matches no"),
        ("proj", "'proj' matches no"),
    ],
)
def test_a_target_that_matches_nothing_is_refused_and_the_nearest_are_named(make_folder, wanted, said):
    with pytest.raises(ModelError, match=said):
        load_policy(make_folder(), dtype="float32", lora=LoRAConfig(target_modules=("v_proj", wanted)))


@pytest.fixture
def saved(make_folder, tmp_path):
    save_adapter(adapted(make_folder()), tmp_path / "adapter", base=make_folder())
    return tmp_path / "adapter"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"use_dora": True}, r"use_dora=True is not supported; merge the adapter .* merge_and_unload"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern="),
        ({"bias": "all"}, "bias='all' is not supported"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa' is not supported"),
        ({"a_key_of_next_year": 1}, "a_key_of_next_year=1 is not supported"),
        ({"peft_type": "IA3"}, "expected an object with peft_type LORA"),
        ({"r": 4}, r"r=4, lora_alpha=32 does not describe its adapter: model\.layers\.0\..* has another rank"),
        ({"lora_alpha": None}, "lora_alpha=None does not describe"),
    ],
)
def test_an_adapter_that_would_be_computed_wrongly_is_refused(saved, make_folder, changes, said):
    config = json.loads((saved / "adapter_config.json").read_text())
    (saved / "adapter_config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ModelError, match=said):
        load_policy(make_folder(), dtype="float32", lora=LoRAConfig(path=str(saved)))


def rewrite(folder, change):
    tensors = safetensors.torch.load_file(folder / "adapter_model.safetensors")
    change(tensors)
    safetensors.torch.save_file(tensors, folder / "adapter_model.safetensors")


A, B = (f"base_model.model.model.layers.1.self_attn.q_proj.lora_{part}.weight" for part in "AB")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda tensors: tensors.pop(A), rf"unknown {B}"),
        (lambda tensors: tensors.update({A: torch.zeros(3, 17)}), r"q_proj\.lora_A\.weight: \[3, 17\] instead of \[3"),
        (
            lambda tensors: tensors.update({A.replace("layers.1", "layers.7"): torch.zeros(3, 16)}),
            r"model\.layers\.7\.self_attn\.q_proj has another rank",
        ),
        (lambda tensors: tensors.update({"base_model.model.score.weight": torch.zeros(1, 16)}), "has no score"),
        (lambda tensors: tensors.clear(), "0 adapted layers"),
    ],
    ids=["missing", "shape", "layer", "critic", "empty"],
)
def test_an_adapter_of_another_model_is_refused_and_what_differs_is_named(saved, make_folder, change, said):
    rewrite(saved, change)
    with pytest.raises(ModelError, match=said):
        load_policy(make_folder(), dtype="float32", lora=LoRAConfig(path=str(saved)))


def test_a_torn_or_missing_file_is_named(saved, make_folder, tmp_path):
    weights = saved / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(ModelError, match=r"adapter_model\.safetensors"):
        open_adapter(str(saved))
    with pytest.raises(ModelError, match=r"adapter_model\.safetensors"):
        read_adapter(adapted(make_folder()), saved)
    shutil.rmtree(saved)
    with pytest.raises(ModelError, match=r"adapter_config\.json"):
        open_adapter(str(saved))


def test_a_critic_takes_the_kind_of_the_actors_adapter_but_values_of_its_own(saved, make_folder):
    lora = fresh(LoRAConfig(path=str(saved)))
    assert (lora.rank, lora.path, set(lora.target_modules)) == (3, None, set(LAYERS))
    critic = load_critic(make_folder(), dtype="float32", lora=lora)
    assert outputs(critic, value_head).abs().max() == 0
    assert len(trained_weights(critic.model)) == 2 * len(LAYERS) * 2 + 2
