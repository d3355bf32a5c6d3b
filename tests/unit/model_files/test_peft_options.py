"""Adapters with the options of PEFT: merged here they are what PEFT merges, or they are refused by name."""

import dataclasses

import peft
import pytest
import torch
from tiny_models import make_tiny_model
from transformers import AutoModelForCausalLM

from rallypoint.config import LoRAConfig
from rallypoint.errors import ModelError
from rallypoint.model_files import load_policy, merge_adapters, save_model

pytestmark = pytest.mark.filterwarnings("ignore:::peft")  # it warns of what these tables are about
IDS = torch.tensor([[5, 9, 3, 7, 2, 11]])
EQUAL = [
    {},
    {"r": 3, "lora_alpha": 7, "use_rslora": True},
    {"lora_dropout": 0.3, "inference_mode": True},
    {"fan_in_fan_out": True},  # PEFT turns it off for linear layers
    {"layers_to_transform": [1], "layers_pattern": "layers"},
    {"target_modules": "all-linear", "exclude_modules": ["q_proj"]},
    {"target_modules": r".*\.(q|v)_proj"},
    {"init_lora_weights": "gaussian"},
    {"init_lora_weights": "orthogonal"},
    {"init_lora_weights": False},
    {"modules_to_save": ["norm"]},
    {"modules_to_save": ["k_proj", "input_layernorm"]},
]
EQUAL_IF_NOT_TIED = [
    {"modules_to_save": ["embed_tokens"]},
    {"modules_to_save": ["lm_head"]},
    {"modules_to_save": ["embed_tokens", "lm_head"]},
    {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
]
REFUSED = [
    {"use_dora": True},
    {"bias": "all"},
    {"bias": "lora_only"},
    {"rank_pattern": {"q_proj": 2}},
    {"alpha_pattern": {"layers.1.self_attn.q_proj": 32}},
    {"init_lora_weights": "pissa"},
    {"init_lora_weights": "olora"},
    {"use_qalora": True, "qalora_group_size": 2},
    {"layer_replication": [[0, 2], [1, 2]]},
    {"trainable_token_indices": {"embed_tokens": [3]}},
    {"target_parameters": ["mlp.gate_proj.weight"]},
]
TARGETS = [["embed_tokens"], ["lm_head"], ["q_proj", "lm_head"], ["q_proj", "embed_tokens"]]
OF_OTHERS = {
    # Where an adapter comes from and how it starts; only for other models; by other means than low rank; of PEFT's own
    # with data that is missing here. Those that change what is computed are keys that the file must not have.
    "peft_type", "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "megatron_config",
    "megatron_core", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "velora_config", "runtime_config",
    "alora_invocation_tokens", "monteclora_config", "lora_bias", "use_bdlora", "arrow_config", "kasa_config",
}  # fmt: skip


@pytest.fixture(scope="module")
def is_tied(request):
    return request.param


def with_both_heads(options, *, tied=()):
    """Return each option with a head of its own, and tied: always where that is what it is about, else slow."""
    both = [(is_tied, option) for is_tied in (False, True) for option in options]
    return pytest.mark.parametrize(
        ("is_tied", "option"),
        [
            pytest.param(is_tied, option, marks=pytest.mark.slow if is_tied and option not in tied else ())
            for is_tied, option in both
        ],
        ids=[f"{'tied' if is_tied else 'own head'}-{option}" for is_tied, option in both],
        indirect=["is_tied"],
        scope="module",
    )


@pytest.fixture(scope="module")
def base(tmp_path_factory, is_tied):
    return make_tiny_model(tmp_path_factory.mktemp("base") / "model", architecture="qwen3", tie_embeddings=is_tied)


def save(base, folder, options):
    """Save an adapter with values of its own, as PEFT does."""
    own = {"target_modules": ["q_proj", "down_proj"], "r": 8, "task_type": "CAUSAL_LM"}
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), peft.LoraConfig(**{**own, **options}))
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight.add_(torch.randn(weight.shape, generator=generator) * 0.2)
    model.save_pretrained(folder)


def merged_by_peft(base, folder):
    """Return the logits of the model that PEFT merges the adapter into."""
    adapted = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder / "adapter")
    return adapted.merge_and_unload().eval()(IDS).logits


def merged_here(base, folder):
    """Return the logits of the folder that we merge the adapter into."""
    shard = load_policy(base, dtype="float32", lora=LoRAConfig(path=str(folder / "adapter")))
    save_model(merge_adapters(shard), folder / "merged")
    return AutoModelForCausalLM.from_pretrained(folder / "merged").eval()(IDS).logits


@with_both_heads([*EQUAL, *EQUAL_IF_NOT_TIED], tied=[{}, *EQUAL_IF_NOT_TIED])
def test_an_adapter_is_merged_as_peft_merges_it_or_refused_where_peft_parts_tied_weights(
    base, is_tied, tmp_path, option
):
    save(base, tmp_path / "adapter", option)
    if is_tied and option in EQUAL_IF_NOT_TIED:
        with pytest.raises(ModelError, match=r"(embed_tokens|lm_head).* whole \(modules_to_save\).* merge_and_unload"):
            merged_here(base, tmp_path)
        return
    torch.testing.assert_close(merged_here(base, tmp_path), merged_by_peft(base, tmp_path), rtol=1e-5, atol=1e-5)


@with_both_heads(REFUSED)
def test_an_adapter_that_is_more_than_low_rank_is_refused_by_the_name_of_its_option(base, tmp_path, option):
    save(base, tmp_path / "adapter", option)
    with pytest.raises(ModelError, match=rf"{next(iter(option))}=.* is not supported; merge .* merge_and_unload"):
        merged_here(base, tmp_path)


@with_both_heads(TARGETS, tied=TARGETS)
def test_an_adapter_of_an_embedding_or_a_head_is_refused_by_the_name_of_the_layer(base, tmp_path, option):
    save(base, tmp_path / "adapter", {"target_modules": option})
    with pytest.raises(ModelError, match=rf"it adapts (model\.)?{option[-1]}, .* merge_and_unload"):
        merged_here(base, tmp_path)


def test_every_option_of_peft_is_in_one_of_these_tables():
    tried = {name for options in (*EQUAL, *EQUAL_IF_NOT_TIED, *REFUSED) for name in options}
    assert {field.name for field in dataclasses.fields(peft.LoraConfig)} == tried | OF_OTHERS
