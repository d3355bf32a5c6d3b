"""Model folders as they come: what may be otherwise in them, and what is refused, with the file and the remedy."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
from full_disks import files_end_at
from tiny_models import TINY, edit_config, edit_weights, make_tiny_model
from transformers import (
    BertConfig,
    BertLMHeadModel,
    CohereConfig,
    CohereForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForTokenClassification,
    Qwen2Config,
    Qwen2ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from rallypoint.errors import DiskError, ModelError
from rallypoint.model_files import load_critic, load_policy, save_model
from rallypoint.models import lm_head


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000, but the files hold 21 tensors"),
        (
            {"vocab_size": 10**12},
            r"wrong shape model\.embed_tokens\.weight: .*expected \[1000000000000, 16\]",
        ),
        ({"hidden_size": "wide"}, "transformers cannot load it: .*hidden_size"),
        ({"num_attention_heads": 0}, "transformers cannot load it"),
        (
            {"hidden_act": "no_such_act"},
            "config.json says hidden_act='no_such_act', which .* correct it, or: pip install",
        ),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": -1.0}},
            r"/model: config.json makes inv_freq.* NaN or infinite; correct its rope_parameters .*-1\.0",
        ),
    ],
    ids=str,
)
def test_sizes_that_are_none_are_refused_before_they_cost_anything(folder, changes, problem):
    edit_config(folder, **changes)
    with pytest.raises(ModelError, match=problem):
        load_policy(str(folder), dtype="float32")


@pytest.mark.parametrize("kept", [0.0, 0.001, 0.5, 0.999])
def test_a_truncated_file_is_refused(folder, kept):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[: int(kept * file.stat().st_size)])
    with pytest.raises(ModelError, match=r"model\.safetensors: (expected .* bytes.*found|its safetensors header)"):
        load_policy(str(folder), dtype="float32")


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_missing_file_is_refused(folder, name):
    (folder / name).unlink()
    with pytest.raises(ModelError, match=re.escape(str(folder))):
        load_policy(str(folder), dtype="float32")


@pytest.mark.parametrize("content", ["{", "[]", '{"model_type": "no_such_family"}'])
def test_a_config_that_cannot_be_read_is_refused(folder, content):
    (folder / "config.json").write_text(content)
    for load in (lambda p: load_policy(p, dtype="float32"), lambda p: load_critic(p, dtype="float32")):
        with pytest.raises(ModelError, match=re.escape(str(folder))):
            load(str(folder))


def test_a_folder_with_pickled_weights_only_is_refused(folder):
    torch.save(safetensors.torch.load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"found pytorch_model\.bin, but pickled weights are not loaded; save"):
        load_policy(str(folder), dtype="float32")


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json"])
@pytest.mark.parametrize(("make", "what"), [(Path.mkdir, "a folder"), (os.mkfifo, "a pipe")], ids=["folder", "pipe"])
def test_weights_that_are_no_file_are_called_what_they_are(folder, name, make, what):
    (folder / "model.safetensors").unlink()
    make(folder / name)
    with pytest.raises(ModelError, match=rf"model/{re.escape(name)}: expected a file, found {what}.*; put the file"):
        load_policy(str(folder), dtype="float32")


def test_a_folder_that_does_not_exist_is_called_by_its_name(tmp_path):
    with pytest.raises(ModelError, match=r"nowhere: there is no such folder"):
        load_policy(str(tmp_path / "nowhere"), dtype="float32")


def test_weights_that_are_not_finite_are_refused(folder):
    edit_weights(folder, lambda weights: weights["model.norm.weight"].fill_(float("nan")))
    with pytest.raises(
        ModelError, match=r"its weights are not finite \(NaN or infinite\) in model\.norm\.weight; copy"
    ):
        load_policy(str(folder), dtype="float32")


def test_a_weight_that_no_token_of_the_comparison_touches_is_looked_at_too(folder):
    edit_weights(folder, lambda weights: weights["model.embed_tokens.weight"][-1].fill_(float("nan")))
    with pytest.raises(ModelError, match=r"not finite \(NaN or infinite\) in model\.embed_tokens\.weight; copy"):
        load_policy(str(folder), dtype="float32")


@pytest.mark.parametrize("tie_embeddings", [False, True], ids=["untied", "tied"])
def test_a_critic_is_refused_as_a_policy(make_folder, tmp_path, tie_embeddings):
    critic = load_critic(make_folder(tie_embeddings=tie_embeddings), dtype="float32")
    save_model(critic, tmp_path / "critic")
    with pytest.raises(ModelError, match=r"critic or reward model \(LlamaForTokenClassification\)"):
        load_policy(str(tmp_path / "critic"), dtype="float32")


def test_a_critic_that_lost_its_head_is_refused_rather_than_given_another(make_folder, tmp_path):
    save_model(load_critic(make_folder(), dtype="float32"), tmp_path / "critic")
    edit_weights(tmp_path / "critic", lambda weights: weights.pop("score.weight"))
    with pytest.raises(ModelError, match=r"missing score\.weight"):
        load_critic(str(tmp_path / "critic"), dtype="float32")


def test_a_classifier_with_several_labels_is_refused_as_a_critic(tmp_path):
    LlamaForTokenClassification(LlamaConfig(**TINY, num_labels=3)).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"wrong shape .*score\.weight"):
        load_critic(str(tmp_path), dtype="float32")


UNSUPPORTED = {
    "some layers are of another kind": (
        Qwen2ForCausalLM,
        Qwen2Config(**TINY, layer_types=["full_attention", "chunked_attention"]),
        "chunked_attention",
    ),
    "logits are scaled": (CohereForCausalLM, CohereConfig(**TINY), "differs from its own code"),
    "attention in both directions": (
        BertLMHeadModel,
        BertConfig(**{k: v for k, v in TINY.items() if k != "num_key_value_heads"}),
        "differs from its own code",
    ),
    "rotary angles depend on the longest row": (
        LlamaForCausalLM,
        LlamaConfig(**TINY, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}),
        "longest row",
    ),
}


@pytest.mark.parametrize(("kind", "config", "message"), UNSUPPORTED.values(), ids=UNSUPPORTED.keys())
def test_a_family_that_packed_rows_would_compute_wrongly_is_refused(tmp_path, kind, config, message):
    kind(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=message):
        load_policy(str(tmp_path), dtype="float32")


def test_a_family_whose_token_classifier_names_its_head_otherwise_cannot_be_a_critic(tmp_path):
    GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=9)).save_pretrained(tmp_path)
    said = r"^/.*: GPT2ForTokenClassification has no `score` head.*; set critic\.path to .*, or recipe=grpo"
    with pytest.raises(ModelError, match=said):
        load_critic(str(tmp_path), dtype="float32")


def test_padding_beyond_the_vocabulary_is_named_with_its_key(folder):
    edit_config(folder, pad_token_id=999)
    for load in (load_policy, load_critic):
        with pytest.raises(ModelError, match=r"^/.*config\.json says pad_token_id=999, but vocab_size=\d+: set pad_"):
            load(str(folder), dtype="float32")


def test_what_is_no_causal_language_model_is_refused_by_its_type_and_with_those_that_are(tmp_path):
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    T5ForConditionalGeneration(T5Config(vocab_size=24, **sizes)).save_pretrained(tmp_path)
    with pytest.raises(ModelError) as raised:
        load_policy(str(tmp_path), dtype="float32")
    assert str(raised.value).startswith(
        f"{tmp_path}: models of type 't5' are not causal language models in transformers"
    )
    assert "llama" in str(raised.value)
    assert len(str(raised.value)) < 600


def test_frequencies_of_old_checkpoints_are_ignored(folder):
    edit_weights(
        folder, lambda weights: weights.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)})
    )
    load_policy(str(folder), dtype="float32")


@pytest.mark.parametrize("kept", ["lm_head.weight", "model.embed_tokens.weight", "both"])
def test_a_tied_weight_may_stand_in_the_file_under_any_of_its_names(make_folder, tmp_path, kept):
    source = make_folder(tie_embeddings=True)
    shutil.copytree(source, tmp_path / "model")

    def rename(weights):
        names = ("lm_head.weight", "model.embed_tokens.weight") if kept == "both" else (kept,)
        weight = weights.pop("model.embed_tokens.weight")
        weights.update({name: weight.clone() for name in names})

    edit_weights(tmp_path / "model", rename)
    model, same = (load_policy(str(path), dtype="float32").model for path in (tmp_path / "model", source))
    assert torch.equal(model.get_parameter("lm_head.weight"), same.get_parameter("lm_head.weight"))
    assert lm_head(model).weight is model.get_input_embeddings().weight


def test_two_tensors_that_should_be_one_but_differ_are_refused(make_folder, tmp_path):
    shutil.copytree(make_folder(tie_embeddings=True), tmp_path / "model")

    def split(weights):
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + 1

    edit_weights(tmp_path / "model", split)
    with pytest.raises(ModelError, match="but they differ: set tie_word_embeddings to false"):
        load_policy(str(tmp_path / "model"), dtype="float32")


@pytest.fixture
def in_files(folder):
    """A folder of a policy in several files."""
    save_model(load_policy(str(folder), dtype="float32"), folder / "files", max_file_bytes=6_000)
    return folder / "files"


def test_a_file_that_the_index_names_and_that_is_missing_is_named(in_files):
    for number in (2, 4):
        (in_files / f"model-0000{number}-of-00005.safetensors").unlink()
    with pytest.raises(ModelError, match=r"names 5 files, of which 2 are missing: model-00002-of-.*, model-00004-of-"):
        load_policy(str(in_files), dtype="float32")


def test_files_of_another_save_than_the_index_are_refused(in_files):
    first, last = (in_files / f"model-0000{number}-of-00005.safetensors" for number in (1, 5))
    shutil.move(first, in_files / "kept")
    shutil.move(last, first)
    shutil.move(in_files / "kept", last)
    with pytest.raises(ModelError, match=r"index\.json and its files do not belong together: .* is not in model-00001"):
        load_policy(str(in_files), dtype="float32")


@pytest.mark.parametrize(
    "content",
    ["{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": "../b.safetensors"}}', '{"weight_map": {"a": 5}}'],
)
def test_an_index_that_cannot_be_used_is_refused(in_files, content):
    (in_files / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ModelError, match=r"model\.safetensors\.index\.json: (cannot be read|expected names)"):
        load_policy(str(in_files), dtype="float32")


def test_defaults_for_sampling_travel_with_the_model(folder, tmp_path):
    (folder / "generation_config.json").write_text('{"temperature": 0.6, "do_sample": true, "eos_token_id": [1, 2]}')
    save_model(load_policy(str(folder), dtype="float32"), tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "generation_config.json").read_text())
    assert (saved["temperature"], saved["eos_token_id"]) == (0.6, [1, 2])


FROM_CACHE = """
import sys
from rallypoint.errors import ModelError
from rallypoint.model_files import load_policy
for name in ("someone/single", "someone/files"):
    print(sum(weight.numel() for weight in load_policy(name, dtype="float32").model.parameters()))
try:
    load_policy("someone/nothing", dtype="float32")
except ModelError as error:
    print(error)
"""


def test_a_name_on_the_hub_is_found_in_the_cache_as_transformers_finds_it(folder, in_files, tmp_path):
    for name, source in (("single", folder), ("files", in_files)):
        kept = tmp_path / "home" / "hub" / f"models--someone--{name}"
        shutil.copytree(source, kept / "snapshots" / "abc", ignore=shutil.ignore_patterns("files"))
        (kept / "refs").mkdir()
        (kept / "refs" / "main").write_text("abc")
    environment = os.environ | {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", FROM_CACHE]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    single, files, error = done.stdout.split("\n", 2)
    assert int(single) == int(files) > 0
    assert error.startswith("someone/nothing: ")


@pytest.mark.skipif(sys.platform == "win32", reason="has no limits of this kind")
def test_a_new_model_that_the_disk_does_not_take_names_its_file(tmp_path):
    """safetensors has an error of its own for it, which is no `OSError`."""
    with pytest.raises(DiskError) as caught, files_end_at(5000):
        make_tiny_model(tmp_path)
    assert str(caught.value) == f"{tmp_path / 'model.safetensors'} cannot be written: File too large"
