"""Adapters on experts: what PEFT computes from the same file, on every mesh, and never a weight but theirs."""

import json

import pytest
import safetensors.torch
import torch
from parity_rank import Case, Models, make_batch, run
from tiny_families import FAMILY_CONFIGS, SIZES, make_family_model
from transformers import AutoModelForCausalLM

from rallypoint.cluster.mesh import Mesh
from rallypoint.config import LoRAConfig, OptimizerConfig
from rallypoint.config.shape import read_shape
from rallypoint.engine import TrainingEngine, policy_outputs
from rallypoint.errors import ModelError
from rallypoint.families import MIXTURES
from rallypoint.model_files import (
    fresh,
    load_critic,
    load_policy,
    merge_adapters,
    open_adapter,
    save_adapter,
    save_model,
)
from rallypoint.model_files.adapters import CONFIG, WEIGHTS
from rallypoint.models import PackedRows, Part, lm_head, named_weights, trained_weights
from rallypoint.models.kinds.expert_adapters import MATRICES
from rallypoint.models.shard import gather
from rallypoint.parallel import DeviceMesh
from rallypoint.parallel.mesh import AXES
from rallypoint.roles.dealing import deal
from rallypoint.types import Metrics

TOKENS, OFFSETS = torch.tensor([3, 9, 4, 11, 0, 7, 7, 2]), torch.tensor([0, 5, 8])
UP, DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
BOTH = LoRAConfig(rank=3, alpha=5.0, rslora=True, target_parameters=(UP, DOWN))
A, B = (f"base_model.model.model.layers.1.mlp.experts.lora_{part}.weight" for part in "AB")


@torch.no_grad()
def excite(shard):
    """Give adapters, whatever part of them is here, values that are not zero."""
    for number, (name, weight) in enumerate(sorted(shard.trained().items())):
        part, generator = shard.parts[name], torch.Generator().manual_seed(number)
        whole = torch.randn(part.shape, generator=generator, dtype=torch.float64) * 0.2
        weight.copy_(whole[part.within(Part.whole(part.shape))])
    return shard


def outputs(shard):
    """Logits of two packed rows."""
    model, rows = shard.model, PackedRows(OFFSETS, torch.device("cpu"))
    with torch.no_grad():
        states = model.base_model(
            input_ids=TOKENS.unsqueeze(0), position_ids=rows.position_ids, use_cache=False, rows=rows
        ).last_hidden_state
        return lm_head(model)(states.squeeze(0))


def in_transformers(model):
    """The same from transformers' own forward pass, a row at a time."""
    with torch.no_grad():
        return torch.cat([model(row.unsqueeze(0), use_cache=False).logits[0] for row in TOKENS.split([5, 3])])


@pytest.mark.parametrize("family", MIXTURES)
def test_a_new_adapter_changes_no_bit_and_a_merged_one_gives_its_logits(tmp_path, family):
    folder = make_family_model(tmp_path / family, family)
    plain, shard = (load_policy(folder, dtype="float64", lora=lora) for lora in (None, BOTH))
    assert torch.equal(outputs(plain), outputs(shard))
    experts = plain.model.base_model.layers[-1].get_submodule(MIXTURES[family].experts)
    assert [name for name, _ in experts.named_parameters() if name in MATRICES] == list(MATRICES), "PEFT nests by it"
    assert set(named_weights(shard.model)) - set(shard.trained()) == set(named_weights(plain.model))
    assert read_shape(folder).num_adapter_parameters(BOTH) == sum(
        w.numel() for w in trained_weights(shard.model).values()
    )
    expected = outputs(excite(shard))
    assert (expected - outputs(plain)).abs().max() > 0.1
    merged = merge_adapters(shard)
    torch.testing.assert_close(outputs(merged), expected, rtol=1e-11, atol=1e-11)
    assert set(named_weights(merged.model)) == set(merged.parts) == set(named_weights(plain.model))


@pytest.mark.parametrize(
    ("family", "targets"), [("qwen3_moe", (UP, DOWN)), ("gpt_oss", (DOWN, UP)), ("gpt_oss", ("down_proj",))], ids=str
)
def test_peft_opens_a_saved_adapter_and_merges_it_to_the_same_weights(tmp_path, family, targets):
    peft = pytest.importorskip("peft")
    folder, lora = make_family_model(tmp_path / family, family), BOTH.model_copy(update={"target_parameters": targets})
    shard = excite(load_policy(folder, dtype="float64", lora=lora))
    save_adapter(shard, tmp_path / "adapter", base=folder)
    path = LoRAConfig(path=str(tmp_path / "adapter"))
    again = load_policy(folder, dtype="float64", lora=path)
    assert torch.equal(outputs(again), outputs(shard))
    assert read_shape(folder).num_adapter_parameters(path) == sum(w.numel() for w in shard.trained().values())
    alone = tmp_path / "alone"
    alone.mkdir()
    tensors = safetensors.torch.load_file(tmp_path / "adapter" / WEIGHTS)
    tensors = {name: tensor for name, tensor in tensors.items() if ".layers.0." in name}
    safetensors.torch.save_file(tensors, alone / WEIGHTS)
    (alone / CONFIG).write_text((tmp_path / "adapter" / CONFIG).read_text())
    of_a_layer = sum(tensor.numel() for tensor in tensors.values())
    assert 0 < of_a_layer == read_shape(folder).num_adapter_parameters(LoRAConfig(path=str(alone)))
    exact = {"attn_implementation": "eager", "experts_implementation": "eager", "dtype": torch.float64}
    theirs = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(folder, **exact), tmp_path / "adapter"
    ).eval()
    # transformers rounds norms and softmaxes to float32, but weights not.
    torch.testing.assert_close(in_transformers(theirs), outputs(shard), rtol=1e-4, atol=1e-4)
    theirs.merge_and_unload().save_pretrained(tmp_path / "merged")
    merged = load_policy(str(tmp_path / "merged"), dtype="float64")
    torch.testing.assert_close(outputs(merged), outputs(shard), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("family", "targets"), [("qwen3_moe", [UP, DOWN]), ("gpt_oss", ["experts.gate_up_proj"])])
def test_an_adapter_made_by_peft_gives_its_logits_here(tmp_path, family, targets):
    peft = pytest.importorskip("peft")
    folder = make_family_model(tmp_path / family, family)
    base = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", experts_implementation="eager", dtype=torch.float64
    )
    options = {"target_modules": ["q_proj"], "target_parameters": targets, "lora_alpha": 7}
    theirs = peft.get_peft_model(base, peft.LoraConfig(r=5, task_type="CAUSAL_LM", **options)).eval()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for weight in theirs.parameters():
            if weight.requires_grad:
                weight.add_(torch.randn(weight.shape, generator=generator) * 0.2)
    theirs.save_pretrained(tmp_path / "adapter")
    ours = load_policy(folder, dtype="float64", lora=LoRAConfig(path=str(tmp_path / "adapter")))
    torch.testing.assert_close(in_transformers(theirs), outputs(ours), rtol=1e-4, atol=1e-4)
    assert sum(w.numel() for w in trained_weights(ours.model).values()) == theirs.get_nb_trainable_parameters()[0]
    expected = outputs(ours)
    theirs.merge_and_unload().save_pretrained(tmp_path / "merged")
    torch.testing.assert_close(
        outputs(load_policy(str(tmp_path / "merged"), dtype="float64")), expected, rtol=1e-10, atol=1e-10
    )


class _Loaded(Models):
    """A model that is there."""

    def __init__(self, shard):
        super().__init__("", shard.mesh)
        self.shard = shard

    def of(self, case):
        del case
        return self.shard


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("qwen3_moe", {"ep": 2, "tp": 2}),
        ("gpt_oss", {"dp_shard": 2, "ep": 2}),
        ("glm4_moe", {"sp": 2, "tp": 2}),
        ("qwen3_5_moe_text", {"dp_shard": 2}),
    ],
    ids=str,
)
def test_ranks_take_the_steps_of_one_and_write_the_file_of_one(on_mesh, tmp_path, family, sizes):
    make_family_model(tmp_path / family, family)
    case, folder = Case("adapted", "packed", "one micro-batch", "actor", "float64", family), str(tmp_path / family)
    batch, grid = make_batch("actor"), Mesh({axis: sizes.get(axis, 1) for axis in AXES})
    parts, written = deal(batch, grid.num_parts, 0.01)[0], LoRAConfig(path=str(tmp_path / "1"))

    def steps(mesh, part):
        shard = load_policy(folder, dtype="float64", mesh=mesh, lora=BOTH)
        begun = {name: tensor.clone() for name, tensor in gather(shard.trained(), shard.parts, mesh)}
        save_adapter(excite(shard), tmp_path / str(mesh.everyone.size), base=folder)
        again = load_policy(folder, dtype="float64", mesh=mesh, lora=written, frozen=True).tensors()
        assert all(torch.equal(again[name], tensor) for name, tensor in shard.trained().items())
        return begun, run(case, _Loaded(shard), part, batch.num_loss_tokens)

    begun, expected = steps(DeviceMesh.solo(), batch)
    found = on_mesh(lambda mesh: steps(mesh, parts[grid.part(mesh.rank)]), **sizes)
    assert all(torch.equal(found[0][0][name], values) for name, values in begun.items())
    one, ours = (tmp_path / str(size) / "adapter_model.safetensors" for size in (1, grid.size))
    assert ours.read_bytes() == one.read_bytes()
    whole = found[0][1] | {"loss": torch.stack([found[rank][1]["loss"] for rank in grid.leaders]).sum()}
    assert len([name for name in expected if "experts.lora" in name and not name.startswith("held/")]) >= 4
    for name, wanted in expected.items():
        if not name.startswith("held/"):
            assert (whole[name] - wanted).abs().max() <= 1e-10 * wanted.abs().max(), name


def test_adapters_of_experts_alone_learn_and_nothing_else_moves(tmp_path):
    folder, batch = make_family_model(tmp_path / "qwen3_moe", "qwen3_moe"), make_batch("actor")
    lora = LoRAConfig(rank=4, target_modules=(), target_parameters=("experts.down_proj",))
    shard = load_policy(folder, dtype="float32", lora=lora)
    frozen = {name: weight.clone() for name, weight in shard.tensors().items() if name not in shard.trained()}
    assert len(shard.trained()) == 2 * 2
    engine = TrainingEngine(shard, optimizer=OptimizerConfig(lr=0.02), max_tokens_per_micro_batch=48)

    def loss(rows, at):
        total = -policy_outputs(shard, rows, at, 1.0).logprobs.sum()
        losses.append(total.item())
        return total, Metrics()

    losses, totals = [], []
    for step in range(1, 9):
        losses.clear()
        engine.train(batch, loss, denominator=batch.num_loss_tokens, step=step, num_steps=8)
        totals.append(sum(losses))
    assert totals[-1] < 0.9 * totals[0]
    assert all(torch.equal(shard.tensors()[name], weight) for name, weight in frozen.items())
    save_adapter(shard, tmp_path / "adapter", base=folder)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["target_modules"], config["target_parameters"]) == ([], [DOWN])


def test_a_critic_takes_the_kind_of_the_actors_adapter(tmp_path):
    folder = make_family_model(tmp_path / "gpt_oss", "gpt_oss")
    save_adapter(load_policy(folder, dtype="float32", lora=BOTH), tmp_path / "adapter", base=folder)
    lora = fresh(LoRAConfig(path=str(tmp_path / "adapter")))
    assert (lora.path, lora.target_parameters) == (None, ("experts.down_proj", "experts.gate_up_proj"))
    assert len([name for name in load_critic(folder, dtype="float32", lora=lora).trained() if "experts" in name]) == 8


def test_layers_are_chosen_by_the_ends_of_their_names(tmp_path):
    folder = make_family_model(tmp_path / "qwen3_moe", "qwen3_moe")
    lora = LoRAConfig(target_modules=(), target_parameters=(f"layers.1.{UP}",))
    shard = excite(load_policy(folder, dtype="float64", lora=lora))
    assert {name.rpartition(".lora_")[0] for name in shard.trained()} == {
        "model.layers.1.mlp.experts.lora.gate_up_proj"
    }
    save_adapter(shard, tmp_path / "adapter", base=folder)
    assert open_adapter(str(tmp_path / "adapter")).lora.target_parameters == (f"model.layers.1.{UP}",)
    again = load_policy(folder, dtype="float64", lora=LoRAConfig(path=str(tmp_path / "adapter")))
    assert torch.equal(outputs(again), outputs(shard))


def test_a_merged_model_is_saved_as_the_hub_has_it(tmp_path):
    folder = make_family_model(tmp_path / "qwen3_moe", "qwen3_moe")
    shard = excite(load_policy(folder, dtype="float64", lora=BOTH))
    expected = outputs(shard)
    save_model(merge_adapters(shard), tmp_path / "merged")
    names = safetensors.torch.load_file(tmp_path / "merged" / "model.safetensors").keys()
    assert names == safetensors.torch.load_file(tmp_path / "qwen3_moe" / "model.safetensors").keys()
    torch.testing.assert_close(
        outputs(load_policy(str(tmp_path / "merged"), dtype="float64")), expected, rtol=1e-11, atol=1e-11
    )


@pytest.mark.parametrize(
    ("family", "wanted", "said"),
    [
        ("qwen3_moe", "mlp.experts.up_proj", f"no matrices of experts in .*; expected {UP} or {DOWN}"),
        ("gpt_oss", "gate_up_proj_bias", f"no matrices of experts in .*; expected {UP} or {DOWN}"),
        ("qwen3", "mlp.down_proj", "in the decoder of Qwen3ForCausalLM; it has no experts; models of type .* have"),
    ],
)
def test_a_target_that_matches_no_experts_is_refused_and_those_that_do_are_named(tmp_path, family, wanted, said):
    AutoModelForCausalLM.from_config(FAMILY_CONFIGS[family](**SIZES)).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=rf"target_parameters: '{wanted}' matches {said}|{said}"):
        load_policy(str(tmp_path), dtype="float32", lora=LoRAConfig(target_parameters=(wanted,)))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda tensors: tensors.update({A: torch.zeros(25, 8)}), "do not describe its adapter: .*experts has A "),
        (lambda tensors: tensors.update({A: torch.zeros(9, 8), B: torch.zeros(16, 9)}), r"\[9, 8\] instead of \[24, 8"),
        (lambda tensors: tensors.pop(B), "do not describe its adapter: "),
    ],
    ids=["no multiple of the rank", "three experts", "no B"],
)
def test_a_damaged_adapter_is_refused_and_what_differs_is_named(tmp_path, change, said):
    folder = make_family_model(tmp_path / "qwen3_moe", "qwen3_moe")
    save_adapter(load_policy(folder, dtype="float32", lora=BOTH), tmp_path / "adapter", base=folder)
    tensors = safetensors.torch.load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    change(tensors)
    safetensors.torch.save_file(tensors, tmp_path / "adapter" / "adapter_model.safetensors")
    with pytest.raises(ModelError, match=said):
        load_policy(folder, dtype="float32", lora=LoRAConfig(path=str(tmp_path / "adapter")))
