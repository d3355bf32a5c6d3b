"""Reward models of every family through the door of the loader, against transformers' own scores of padded rows."""

import json

import pytest
import safetensors.torch
import torch
from tiny_families import FAMILY_CONFIGS, SIZES
from tiny_models import TINY, edit_config
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    GraniteConfig,
    LlamaConfig,
    Qwen2Config,
)

from rallypoint.config import LoRAConfig
from rallypoint.engine import TrainingEngine, reward_scores, scored_tokens
from rallypoint.errors import ModelError, RowTooLongError
from rallypoint.families import FAMILIES
from rallypoint.model_files import load_new_reward_model, load_reward_model, merge_adapters, save_adapter, save_model
from rallypoint.model_files.load_checks import check_agreement
from rallypoint.models import ModelShard
from rallypoint.recipes.use import find_trained
from rallypoint.types import Sequences

NOT_IN_TRANSFORMERS = {"glm4_moe", "qwen3_5_moe_text"}
CONFIGS = {
    family: make(**SIZES, num_labels=1, initializer_range=0.3)
    for family, make in FAMILY_CONFIGS.items()
    if family not in NOT_IN_TRANSFORMERS
}
PADDING = SIZES["pad_token_id"]


def save(config, folder):
    """Write a model with random weights, the head's among them."""
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    return str(folder)


@pytest.fixture(params=CONFIGS, scope="module")
def folder(request, tmp_path_factory):
    return save(CONFIGS[request.param], tmp_path_factory.mktemp("reward"))


@pytest.fixture
def llama(tmp_path):
    save(CONFIGS["llama"], tmp_path)
    return tmp_path


def make_rows():
    """Rows of two groups, which begin alike; two are the same; one ends with what is padding to the model."""
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(4, 23, (length,), generator=generator) for length in (7, 3)]
    lengths = (4, 1, 20, 9, 1)
    answers = [torch.randint(4, 23, (length,), generator=generator) for length in lengths]
    rows = [torch.cat([prompts[at // 3], answer]) for at, answer in enumerate(answers)]
    rows.append(rows[3])
    rows[1] = torch.cat([rows[1], torch.tensor([PADDING])])
    return rows


def batch_of(rows):
    lengths = torch.tensor([len(row) for row in rows])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    mask = torch.ones(int(offsets[-1]), dtype=torch.bool)
    mask[offsets[:-1]] = False
    return Sequences(
        offsets=offsets,
        tokens=torch.cat(rows),
        loss_mask=mask,
        prompt_index=torch.arange(len(rows)) // 3,
        sample_index=torch.arange(len(rows)) % 3,
    )


def our_scores(shard: ModelShard, rows, cap=1000):
    engine = TrainingEngine(shard, optimizer=None, max_tokens_per_micro_batch=cap)
    batch = scored_tokens(batch_of(rows), shard.model.config.pad_token_id)
    assert batch.num_loss_tokens == len(rows)
    values = engine.evaluate(batch, lambda part, at: reward_scores(shard, part, at)).values
    return values[batch.loss_mask]


@torch.no_grad()
def their_scores(folder, rows):
    """Scores of one padded batch by transformers' own code, which looks for the last token that is no padding."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, attn_implementation="eager").eval()
    longest = max(map(len, rows))
    ids = torch.stack([torch.nn.functional.pad(row, (0, longest - len(row)), value=PADDING) for row in rows])
    mask = torch.arange(longest) < torch.tensor([[len(row)] for row in rows])
    return model(input_ids=ids, attention_mask=mask, use_cache=False).logits.squeeze(-1)


@pytest.mark.parametrize("cap", [1000, 27], ids=["one micro-batch", "many"])
def test_scores_are_those_of_transformers_on_padded_rows(folder, cap):
    rows = make_rows()
    found, wanted = our_scores(load_reward_model(folder, dtype="float32"), rows, cap), their_scores(folder, rows)
    assert wanted.std() > 0.05, "rows must be told apart"
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_adapters_that_are_merged_score_as_before(llama, tmp_path):
    rows, base = make_rows(), str(llama)
    trained = load_new_reward_model(base, dtype="float32", lora=LoRAConfig(rank=3, alpha=6))
    for weight in trained.trained().values():
        weight.normal_(std=0.3, generator=torch.Generator().manual_seed(1))
    wanted = our_scores(trained, rows)
    save_adapter(trained, tmp_path / "adapter", base=base)
    again = find_trained(str(tmp_path / "adapter")).load()
    torch.testing.assert_close(our_scores(again, rows), wanted, rtol=0, atol=0)
    assert (wanted - our_scores(load_reward_model(base, dtype="float32"), rows)).abs().max() > 0.1
    save_model(merge_adapters(again), tmp_path / "merged")
    merged = our_scores(load_reward_model(str(tmp_path / "merged"), dtype="float32"), rows)
    torch.testing.assert_close(merged, wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(their_scores(str(tmp_path / "merged"), rows), wanted, rtol=1e-4, atol=1e-5)


def test_every_family_is_tested():
    assert {config.model_type for config in CONFIGS.values()} | NOT_IN_TRANSFORMERS == set(FAMILIES)


def test_rows_are_scored_at_their_last_token_where_the_model_has_no_padding(llama):
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps({**config, "pad_token_id": None}))
    shard, row = load_reward_model(str(llama), dtype="float32"), torch.tensor([5, 6, 0, 0])
    model = AutoModelForSequenceClassification.from_pretrained(llama).eval()
    with torch.no_grad():
        wanted = model(input_ids=row.unsqueeze(0)).logits.flatten()
    torch.testing.assert_close(our_scores(shard, [row]), wanted, rtol=1e-5, atol=1e-5)


def test_scores_in_bfloat16_are_those_of_float32_but_for_rounding(llama):
    rows = make_rows()
    found = our_scores(load_reward_model(str(llama), dtype="bfloat16"), rows)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, their_scores(llama, rows), rtol=0.1, atol=0.1)


def test_no_pass_has_more_tokens_than_the_cap_and_a_row_over_it_is_named(llama):
    shard, seen = load_reward_model(str(llama), dtype="bfloat16"), []
    shard.model.get_input_embeddings().register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].numel()))
    our_scores(shard, make_rows(), cap=27)
    assert max(seen) <= 27
    with pytest.raises(RowTooLongError, match="row 2 has 27 tokens, but a micro-batch may hold 26"):
        our_scores(shard, make_rows(), cap=26)


def test_a_language_model_is_no_reward_model(tmp_path):
    AutoModelForCausalLM.from_config(LlamaConfig(**TINY)).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"holds a LlamaForCausalLM, expected a reward model: .* with one label"):
        load_reward_model(str(tmp_path), dtype="float32")


def test_a_classifier_with_two_labels_is_refused(tmp_path):
    save(LlamaConfig(**TINY, num_labels=2), tmp_path)
    with pytest.raises(ModelError, match="a classifier with 2 labels, expected a reward model, which has one"):
        load_reward_model(str(tmp_path), dtype="float32")


def test_a_head_that_is_missing_is_named_and_never_made_up(llama):
    weights = safetensors.torch.load_file(llama / "model.safetensors")
    del weights["score.weight"]
    safetensors.torch.save_file(weights, llama / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"describes a LlamaForSequenceClassification:\n  - missing score\.weight\n"):
        load_reward_model(str(llama), dtype="float32")


def test_a_head_under_another_name_is_refused(tmp_path):
    sizes = {name: size for name, size in SIZES.items() if name != "num_key_value_heads"}
    save(BertConfig(**sizes, num_labels=1), tmp_path)
    with pytest.raises(
        ModelError, match=r"^/.*: BertForSequenceClassification has no `score` head.*; set reward\.path to"
    ):
        load_reward_model(str(tmp_path), dtype="float32")


def test_a_type_without_a_sequence_classifier_is_refused_as_a_reward_model(tmp_path):
    AutoModelForCausalLM.from_config(GraniteConfig(**TINY, num_labels=1)).save_pretrained(tmp_path)
    edit_config(tmp_path, architectures=["GraniteForSequenceClassification"])
    with pytest.raises(ModelError, match=r"no sequence classifier for models of type 'granite'.*; set reward\.path to"):
        load_reward_model(str(tmp_path), dtype="float32")


@pytest.mark.parametrize("num_heads", [10, pytest.param(50, marks=pytest.mark.slow)])
def test_scores_that_are_near_zero_by_chance_are_no_reason_to_refuse_a_model_in_bfloat16(tmp_path, num_heads):
    config = Qwen2Config(**SIZES | {"hidden_size": 128, "num_hidden_layers": 16}, num_labels=1, initializer_range=0.1)
    model = load_reward_model(save(config, tmp_path), dtype="bfloat16").model
    for seed in range(num_heads):
        with torch.no_grad():
            model.score.weight.normal_(generator=torch.Generator().manual_seed(seed))
        check_agreement(f"seed {seed}", model, model.score)


def test_scores_of_a_model_in_bfloat16_are_not_rounded_to_it(llama):
    scores = our_scores(load_reward_model(str(llama), dtype="bfloat16"), make_rows())
    assert not torch.equal(scores, scores.bfloat16().float())
