"""Hybrids as the hub has them: the language model of one that sees as well, loaded and saved by itself."""

import pytest
import torch
from tiny_families import HYBRID, SIZES, make_family_model
from transformers import AutoModelForCausalLM, Qwen3_5Config, Qwen3_5ForConditionalGeneration

from rallypoint.model_files import load_critic, load_policy, save_model

VISION = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 16}


@pytest.fixture
def seeing(tmp_path):
    """A folder of a model that sees, and what it says of some tokens."""
    torch.manual_seed(0)
    text = SIZES | HYBRID | {"full_attention_interval": 2, "initializer_range": 0.3}
    model = Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=text, vision_config=VISION)).eval()
    model.save_pretrained(tmp_path / "seeing")
    tokens = torch.arange(9).unsqueeze(0)
    with torch.no_grad():
        return tmp_path / "seeing", tokens, model(tokens, use_cache=False).logits


@torch.no_grad()
def test_the_language_model_of_one_that_sees_is_trained_and_saved_by_itself(seeing, tmp_path):
    folder, tokens, wanted = seeing
    shard = load_policy(str(folder), dtype="float32")
    assert shard.model.config.model_type == "qwen3_5_text"
    shard.model.set_attn_implementation("eager")
    torch.testing.assert_close(shard.model(tokens, use_cache=False).logits, wanted, rtol=1e-4, atol=1e-5)
    save_model(shard, tmp_path / "saved")
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").eval()
    torch.testing.assert_close(saved(tokens, use_cache=False).logits, wanted, rtol=1e-4, atol=1e-5)


def test_a_critic_is_made_of_it(seeing):
    folder, _, _ = seeing
    assert load_critic(str(folder), dtype="float32").model.score.out_features == 1


@torch.no_grad()
def test_a_hybrid_is_saved_as_transformers_saves_it(tmp_path):
    folder = make_family_model(tmp_path / "model", "qwen3_5_text")
    save_model(load_policy(folder, dtype="float32"), tmp_path / "saved")
    before, after = (AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (folder, tmp_path / "saved"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
