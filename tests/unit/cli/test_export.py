"""`rally export`: a folder that other tools open, or one message and nothing."""

import shutil
from pathlib import Path

import pytest
from full_disks import files_end_at
from tiny_models import make_tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from rallypoint import checkpoint
from rallypoint.config import LoRAConfig
from rallypoint.data import make_digits_tokenizer
from rallypoint.errors import ExportError, ModelError
from rallypoint.model_files import load_policy, save_adapter


@pytest.fixture
def adapter(tmp_path, sizes):
    """An adapter as PEFT saves it, without a tokenizer, and its base."""
    make_tiny_model(tmp_path / "base", **sizes)
    model = load_policy(str(tmp_path / "base"), dtype="float32", lora=LoRAConfig(rank=2))
    save_adapter(model, tmp_path / "adapter", base=str(tmp_path / "base"))
    return tmp_path / "adapter"


def refused(result, kind):
    assert isinstance(result.exception, kind), result.output
    return str(result.exception)


@pytest.mark.parametrize("what", ["checkpoint", "run"])
def test_a_checkpoint_becomes_an_ordinary_folder_without_what_training_needs(command, trained, tmp_path, what):
    result = command("export", str(getattr(trained, what)), str(tmp_path / "to" / "model"))
    assert result.exit_code == 0, result.output
    assert f"from_pretrained opens {tmp_path / 'to' / 'model'}" in result.stdout
    names = {path.name for path in (tmp_path / "to" / "model").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= names
    assert not names & {"manifest.json", "training", "critic"}
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "to" / "model")


def test_an_adapter_is_merged_into_its_model_with_its_tokenizer(command, adapter, tmp_path):
    assert command("export", str(adapter), str(tmp_path / "merged")).exit_code == 0
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert AutoTokenizer.from_pretrained(tmp_path / "merged").eos_token == make_digits_tokenizer().eos_token
    assert command("export", str(adapter), str(tmp_path / "alone"), "--adapter").exit_code == 0
    assert {path.name for path in (tmp_path / "alone").iterdir()} == {path.name for path in adapter.iterdir()}


def test_nothing_is_written_over(command, trained, tmp_path):
    (tmp_path / "file").write_text("mine")
    for to, said in ((tmp_path, "is not empty"), (tmp_path / "file", "is a file")):
        assert said in refused(command("export", str(trained.run), str(to)), ExportError)
    assert (tmp_path / "file").read_text() == "mine"
    (tmp_path / "empty").mkdir()
    assert command("export", str(trained.run), str(tmp_path / "empty")).exit_code == 0


def test_what_cannot_be_exported_in_this_form_is_said(command, trained, adapter, tmp_path):
    to = str(tmp_path / "to")
    assert "has no adapter" in refused(command("export", str(trained.run), to, "--adapter"), ExportError)
    assert "nothing to export" in refused(command("export", str(adapter.parent / "base"), to), ExportError)
    assert "no such folder" in refused(command("export", str(tmp_path / "nowhere"), to), ModelError)
    empty = shutil.copytree(trained.run, tmp_path / "run", ignore=shutil.ignore_patterns("checkpoints"))
    assert "no checkpoint yet" in refused(command("export", str(empty), to), ModelError)
    assert not Path(to).exists()


def test_an_adapter_whose_model_is_gone_names_it(command, adapter, tmp_path):
    shutil.rmtree(tmp_path / "base")
    message = refused(command("export", str(adapter), str(tmp_path / "to")), ModelError)
    assert f"an adapter for the model '{tmp_path / 'base'}', and there is no such folder" in message


@pytest.mark.parametrize("what", ["run", "adapter"])
def test_a_disk_that_takes_no_more_is_said_and_leaves_nothing(command, trained, adapter, tmp_path, what):
    source = trained.run if what == "run" else adapter
    with files_end_at(1000):
        result = command("export", str(source), str(tmp_path / "out" / "to"))
    assert "cannot be written: " in str(result.exception)
    assert "File too large" in str(result.exception)
    assert list((tmp_path / "out").iterdir()) == []


def test_a_damaged_checkpoint_is_not_exported(command, trained, tmp_path):
    run = shutil.copytree(trained.run, tmp_path / "run")
    weights = run / "checkpoints" / checkpoint.checkpoint_name(4) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert "expected" in str(command("export", str(run), str(tmp_path / "to")).exception)
    assert not (tmp_path / "to").exists()
