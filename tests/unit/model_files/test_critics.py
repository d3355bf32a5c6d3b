"""Critics of every family, and of one that is not in the table: loaded, saved, and opened again, here and elsewhere."""

import pytest
import torch
from tiny_families import FAMILY_CONFIGS, SIZES, make_family_model
from transformers import AutoModel, AutoModelForTokenClassification, CohereConfig, CohereForCausalLM

from rallypoint.model_files import load_critic, save_model
from rallypoint.models import PackedRows, named_weights, value_head

TOKENS = torch.tensor([5, 9, 4, 11, 2, 7, 1])
WITHOUT_A_CLASS_IN_TRANSFORMERS = {"gemma3_text", "cohere", "glm4_moe", "qwen3_5_text", "qwen3_5_moe_text"}


@pytest.fixture(params=[*FAMILY_CONFIGS, "cohere"])
def critic(request, tmp_path):
    """A critic whose head has been trained, and the name of its family."""
    if request.param == "cohere":
        CohereForCausalLM(CohereConfig(**SIZES)).save_pretrained(tmp_path / "policy")
    else:
        make_family_model(tmp_path / "policy", request.param)
    shard = load_critic(str(tmp_path / "policy"), dtype="float32")
    assert not values_of(shard.model).any()
    with torch.no_grad():
        value_head(shard.model).weight.copy_(torch.linspace(-1, 1, SIZES["hidden_size"]))
        value_head(shard.model).bias.fill_(0.5)
    return shard, request.param


@torch.no_grad()
def values_of(model):
    rows = PackedRows(torch.tensor([0, len(TOKENS)]), torch.device("cpu"))
    output = model.base_model(TOKENS.unsqueeze(0), position_ids=rows.position_ids, use_cache=False, rows=rows)
    return value_head(model)(output.last_hidden_state.squeeze(0))


def test_a_saved_critic_is_loaded_with_its_head_and_values_as_they_were(critic, tmp_path):
    shard, _ = critic
    save_model(shard, tmp_path / "critic")
    again = load_critic(str(tmp_path / "critic"), dtype="float32").model
    assert torch.equal(values_of(again), values_of(shard.model))
    assert named_weights(again).keys() == named_weights(shard.model).keys()


def test_a_saved_critic_opens_in_transformers_or_its_backbone_does_where_that_has_no_class(critic, tmp_path):
    shard, family = critic
    save_model(shard, tmp_path / "critic")
    if family in WITHOUT_A_CLASS_IN_TRANSFORMERS:
        backbone = AutoModel.from_pretrained(tmp_path / "critic", attn_implementation="eager").eval()
        with torch.no_grad():
            values = value_head(shard.model)(backbone(TOKENS.unsqueeze(0)).last_hidden_state.squeeze(0))
    else:
        model = AutoModelForTokenClassification.from_pretrained(tmp_path / "critic", attn_implementation="eager").eval()
        with torch.no_grad():
            values = model(TOKENS.unsqueeze(0)).logits.squeeze(0)
    torch.testing.assert_close(values_of(shard.model), values, rtol=1e-4, atol=1e-4)
