"""Hybrids as the hub has them: the language model of one that sees as well, loaded and saved by itself."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from tiny_families import HYBRID, MIXTURE, SIZES, make_family_model
from tiny_models import edit_weights
from transformers import (
    AutoModelForCausalLM,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
)

from rallypoint.errors import ModelError
from rallypoint.model_files import load_critic, load_policy, save_model

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


def stack_experts(folder):
    """Have a folder's file hold the experts of each layer in two tensors, as transformers has them in memory."""

    def stack(tensors):
        for layer in {name.split(".experts.")[0] for name in tensors if ".experts." in name}:
            each = range(MIXTURE["num_experts"])
            gates, ups, downs = (
                torch.stack([tensors.pop(f"{layer}.experts.{expert}.{matrix}_proj.weight") for expert in each])
                for matrix in ("gate", "up", "down")
            )
            tensors[f"{layer}.experts.gate_up_proj"] = torch.cat([gates, ups], 1)
            tensors[f"{layer}.experts.down_proj"] = downs

    edit_weights(folder, stack)


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
    expected = {name: weight.clone() for name, weight in load_policy(apart, dtype="float32").tensors().items()}
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
