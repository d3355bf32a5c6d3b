import pytest
import torch
from tiny_models import TINY
from transformers import (
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    LlamaConfig,
    LlamaForCausalLM,
)

from rallypoint.model_files import load_critic, load_policy, save_model
from rallypoint.models import PackedRows, lm_head, named_weights, value_head

TOKENS = torch.tensor([3, 9, 4, 11, 0])


def through(model, head):
    rows = PackedRows(torch.tensor([0, len(TOKENS)]), torch.device("cpu"))
    with torch.no_grad():
        output = model.base_model(
            input_ids=TOKENS.unsqueeze(0), position_ids=rows.position_ids, use_cache=False, rows=rows
        )
        return head(model)(output.last_hidden_state.squeeze(0))


def in_transformers(factory, folder):
    model = factory.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.no_grad():
        return model(TOKENS.unsqueeze(0)).logits.squeeze(0)


@pytest.mark.parametrize("tie_embeddings", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_a_saved_policy_opens_unconverted_in_transformers(make_folder, tmp_path, architecture, tie_embeddings):
    shard = load_policy(make_folder(architecture, tie_embeddings=tie_embeddings), dtype="float32")
    policy = shard.model
    with torch.no_grad():
        for weight in policy.parameters():
            weight.mul_(1.1)
    save_model(shard, tmp_path / "saved")
    logits = in_transformers(AutoModelForCausalLM, tmp_path / "saved")
    torch.testing.assert_close(through(policy, lm_head), logits, rtol=1e-4, atol=1e-4)
    again = load_policy(str(tmp_path / "saved"), dtype="float32").model
    assert all(torch.equal(weight, named_weights(again)[name]) for name, weight in named_weights(policy).items())
    assert ("lm_head.weight" in named_weights(policy)) is not tie_embeddings
    assert "rallypoint" not in (tmp_path / "saved" / "config.json").read_text()


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_a_saved_critic_opens_unconverted_in_transformers_and_keeps_its_head(make_folder, tmp_path, architecture):
    shard = load_critic(make_folder(architecture), dtype="float32")
    critic = shard.model
    with torch.no_grad():
        value_head(critic).weight.normal_()
        value_head(critic).bias.fill_(0.5)
    save_model(shard, tmp_path / "critic")
    values = in_transformers(AutoModelForTokenClassification, tmp_path / "critic")
    torch.testing.assert_close(through(critic, value_head), values, rtol=1e-4, atol=1e-4)
    again = load_critic(str(tmp_path / "critic"), dtype="float32").model
    assert all(torch.equal(weight, named_weights(again)[name]) for name, weight in named_weights(critic).items())


def test_saving_leaves_the_model_as_usable_as_before(make_folder, tmp_path):
    shard = load_policy(make_folder(), dtype="float32")
    before = through(shard.model, lm_head)
    save_model(shard, tmp_path / "saved")
    assert torch.equal(through(shard.model, lm_head), before)


def test_a_critic_from_a_policy_starts_with_the_policys_backbone_and_with_values_of_zero(make_folder):
    critic = load_critic(make_folder(), dtype="float32").model
    policy = named_weights(load_policy(make_folder(), dtype="float32").model)
    assert through(critic, value_head).abs().max() == 0
    shared = [name for name in named_weights(critic) if not name.startswith("score.")]
    assert shared
    assert all(torch.equal(named_weights(critic)[name], policy[name]) for name in shared)


@pytest.mark.parametrize("load", [load_policy, load_critic])
@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_models_load_in_other_types_too(make_folder, load, dtype):
    model, same = load(make_folder(), dtype=dtype).model, load(make_folder(), dtype="float32").model
    assert {weight.dtype for weight in model.parameters()} == {getattr(torch, dtype)} == {model.config.dtype}
    for name, weight in same.named_parameters():
        assert torch.equal(model.get_parameter(name), weight.to(model.dtype))


def test_the_same_seed_creates_the_same_model(make_folder, tmp_path):
    weights = [named_weights(load_policy(make_folder(seed=seed), dtype="float32").model) for seed in (0, 1)]
    assert not torch.equal(weights[0]["lm_head.weight"], weights[1]["lm_head.weight"])


def test_buffers_that_no_file_holds_are_those_of_transformers(tmp_path):
    ropes = (
        {"rope_type": "default", "rope_theta": 1e4},
        {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
        {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 16},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
            "rope_theta": 5e5,
        },
    )
    for number, rope in enumerate(ropes):
        folder = tmp_path / str(number)
        LlamaForCausalLM(LlamaConfig(**TINY, rope_parameters=rope)).save_pretrained(folder)
        ours = dict(load_policy(str(folder), dtype="bfloat16").model.named_buffers())
        theirs = dict(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).named_buffers())
        assert set(ours) == set(theirs)
        assert all(buffer.dtype == theirs[name].dtype for name, buffer in ours.items())
        assert all(torch.equal(buffer, theirs[name]) for name, buffer in ours.items())
