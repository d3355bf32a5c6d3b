"""Hybrids as the hub has them: the language model of one that sees as well, loaded and saved by itself."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from tiny_families import HYBRID, MIXTURE, SIZES, make_family_model, stack_experts
from tiny_models import edit_weights
from transformers import (
    AutoModelForCausalLM,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
)

from rallypoint.config import LoRAConfig
from rallypoint.errors import ModelError
from rallypoint.model_files import (
    TensorFiles,
    load_critic,
    load_policy,
    merge_adapters,
    own_names,
    reads_of,
    save_adapter,
    save_model,
    save_tensors,
)
from rallypoint.models.shard import gather

VISION = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 16}


DENSE = (Qwen3_5Config, Qwen3_5ForConditionalGeneration, {})
MIXED = (
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
    MIXTURE | {"shared_expert_intermediate_size": 12},
)


@pytest.fixture(params=["qwen3_5", "qwen3_5_moe", "qwen3_5_moe as the hub has it"])
def seeing(request, tmp_path):
    """A folder of a model that sees, and what it says of some tokens."""
    torch.manual_seed(0)
    kind, factory, more = DENSE if request.param == "qwen3_5" else MIXED
    text = SIZES | more | HYBRID | {"full_attention_interval": 2, "initializer_range": 0.3}
    model = factory(kind(text_config=text, vision_config=VISION)).eval()
    model.save_pretrained(tmp_path / "seeing")
    if "hub" in request.param:
        stack_experts(tmp_path / "seeing")
        edit_weights(tmp_path / "seeing", lambda tensors: tensors.update({"mtp.norm.weight": torch.ones(16)}))
    tokens = torch.arange(9).unsqueeze(0)
    with torch.no_grad():
        return tmp_path / "seeing", tokens, model(tokens, use_cache=False).logits


@torch.no_grad()
def test_the_language_model_of_one_that_sees_is_trained_and_saved_by_itself(seeing, tmp_path):
    folder, tokens, wanted = seeing
    shard = load_policy(str(folder), dtype="float32")
    assert shard.model.config.model_type == json.loads((folder / "config.json").read_text())["model_type"] + "_text"
    shard.model.set_attn_implementation("eager")
    torch.testing.assert_close(shard.model(tokens, use_cache=False).logits, wanted, rtol=1e-4, atol=1e-5)
    save_model(shard, tmp_path / "saved")
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").eval()
    torch.testing.assert_close(saved(tokens, use_cache=False).logits, wanted, rtol=1e-4, atol=1e-5)


def test_a_critic_is_made_of_it(seeing):
    folder, _, _ = seeing
    assert load_critic(str(folder), dtype="float32").model.score.out_features == 1


@torch.no_grad()
@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3_5_moe_text"])
def test_a_hybrid_is_saved_as_transformers_reads_it(tmp_path, family):
    folder = make_family_model(tmp_path / "model", family)
    save_model(load_policy(folder, dtype="float32"), tmp_path / "saved")
    before, after = (AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (folder, tmp_path / "saved"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@torch.no_grad()
@pytest.mark.parametrize("mesh", [{"tp": 2}, {"ep": 2}, {"dp_shard": 2}, {"ep": 2, "tp": 2}], ids=str)
def test_ranks_read_experts_in_either_form_and_write_one_tensor_for_each_matrix(on_mesh, tmp_path, mesh):
    apart = make_family_model(tmp_path / "apart", "qwen3_5_moe_text")
    expected = dict(AutoModelForCausalLM.from_pretrained(apart).named_parameters())
    stack_experts((tmp_path / "apart").rename(tmp_path / "stacked"))
    make_family_model(tmp_path / "apart", "qwen3_5_moe_text")
    for form in ("apart", "stacked"):
        folder, saved = str(tmp_path / form), tmp_path / f"{form} again"
        on_mesh(lambda rank: save_model(load_policy(folder, dtype="float32", mesh=rank), saved), **mesh)  # noqa: B023
        written = load_file(saved / "model.safetensors")
        assert written.keys() == expected.keys()
        assert all(torch.equal(written[name], weight) for name, weight in expected.items())


def test_experts_in_both_forms_at_once_or_in_half_of_one_are_refused(tmp_path):
    folder = make_family_model(tmp_path / "model", "qwen3_5_moe_text")
    stacked = make_family_model(tmp_path / "stacked", "qwen3_5_moe_text")
    stack_experts(tmp_path / "stacked")
    with safe_open(f"{stacked}/model.safetensors", "pt") as file:
        name = next(name for name in file.keys() if name.endswith(".experts.down_proj"))  # noqa: SIM118
        edit_weights(tmp_path / "model", lambda tensors: tensors.update({name: file.get_tensor(name)}))
    with pytest.raises(ModelError, match=r"not known to the model: model.layers.\d.mlp.experts.down_proj"):
        load_policy(folder, dtype="float32")
    edit_weights(tmp_path / "stacked", lambda tensors: tensors.pop(name))
    with pytest.raises(ModelError, match=r"missing model.layers.\d.mlp.experts.down_proj"):
        load_policy(stacked, dtype="float32")


@torch.no_grad()
@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3_next"])
@pytest.mark.parametrize("mesh", [{"tp": 2}, {"dp_shard": 2}, {"dp_shard": 2, "tp": 2}], ids=str)
def test_weights_and_what_is_kept_of_them_are_in_files_in_one_order_whatever_the_mesh(on_mesh, tmp_path, family, mesh):
    folder = make_family_model(tmp_path / "model", family)
    state = tmp_path / "state.safetensors"

    def write(rank):
        shard = load_policy(folder, dtype="float32", mesh=rank)
        kept = {f"{name}/exp_avg": 2 * tensor for name, tensor in shard.tensors().items()}
        parts = {f"{name}/exp_avg": part for name, part in shard.parts.items()}
        save_tensors(state, kept, parts, shard.mesh, sources=own_names(shard.model))
        save_model(shard, tmp_path / "again")

    on_mesh(write, **mesh)
    before, after = (AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (folder, tmp_path / "again"))
    assert all(torch.equal(after[name], weight) for name, weight in before.items())
    kept = load_file(state)
    assert all(torch.equal(kept[f"{name}/exp_avg"], 2 * weight) for name, weight in before.items())
    shard = load_policy(folder, dtype="float32")
    own = own_names(shard.model)
    with TensorFiles([state]) as files:
        for name, weight in shard.tensors().items():
            into = torch.empty_like(weight)
            files.read(reads_of(own, f"{name}/exp_avg", shard.parts[name], into))
            assert torch.equal(into, 2 * weight), name


@torch.no_grad()
def test_an_adapter_of_a_hybrid_is_written_as_peft_reads_it_and_read_on_any_mesh(on_mesh, tmp_path):
    peft = pytest.importorskip("peft")
    folder = make_family_model(tmp_path / "model", "qwen3_5_text")
    shard = load_policy(folder, dtype="float32", lora=LoRAConfig(rank=2, target_modules=("in_proj_qkv", "q_proj")))
    for name, tensor in shard.trained().items():
        if "lora_B" in name:
            tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(1)))
    save_adapter(shard, tmp_path / "adapter", base=folder)
    tokens = torch.arange(9).unsqueeze(0)
    wanted = AutoModelForCausalLM.from_pretrained(folder).eval()
    wanted = peft.PeftModel.from_pretrained(wanted, str(tmp_path / "adapter")).eval()(tokens, use_cache=False).logits
    expected = {name: tensor.clone() for name, tensor in shard.trained().items()}

    def read(rank):
        found = load_policy(folder, dtype="float32", mesh=rank, lora=LoRAConfig(path=str(tmp_path / "adapter")))
        return dict(gather(found.trained(), found.parts, rank))

    found, *_ = on_mesh(read, tp=2)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    for model in (shard.model, merge_adapters(shard).model):
        model.set_attn_implementation("eager")
        torch.testing.assert_close(model(tokens, use_cache=False).logits, wanted, rtol=1e-4, atol=1e-4)
