"""The model and the data that a run makes for itself: made once, listed with digests, compared at every start."""

from pathlib import Path

import pytest
from recorded_syncs import recorded_syncs

from rallypoint.checkpoint import writing
from rallypoint.config import RunConfig, load_config
from rallypoint.errors import CheckpointError, DataError
from rallypoint.prepare.made import made_data, made_model
from rallypoint.run.folder import RunFolder, create_run
from rallypoint.run.record import made_inputs

TINY = (
    "model.create={hidden_size: 16, num_layers: 1, num_heads: 2, num_key_value_heads: 1, intermediate_size: 32}",
    "data.generate={num_digits: 3, num_train_prompts: 64, num_validation_prompts: 16}",
    "trainer.name=mine",
)


def config_of(tmp_path: Path, *overrides: str) -> RunConfig:
    return load_config("digits", [*TINY, f"trainer.runs_dir={tmp_path}", *overrides]).config


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return create_run(load_config("digits", [*TINY, f"trainer.runs_dir={tmp_path}"]))


def stamps(run: RunFolder) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for folder in (run.model, run.data) for path in folder.iterdir()}


def test_both_are_flushed_to_the_disk_before_they_have_their_names_and_then_their_names(run: RunFolder, tmp_path: Path):
    for folder, make in ((run.model, made_model), (run.data, made_data)):
        with recorded_syncs() as flushed:
            make(config_of(tmp_path), run)
        partial = folder.with_name(f".{folder.name}.partial")
        expected = [partial / path.name for path in folder.iterdir()] + [partial]
        begin = len(flushed) - len(expected) - 1
        assert sorted(flushed[begin:-1]) == sorted(expected)
        assert flushed[-1] == folder.parent


def test_both_are_made_once_and_all_that_is_in_them_is_listed(run: RunFolder, tmp_path: Path):
    config = config_of(tmp_path)
    assert made_inputs(run) == {}
    assert made_model(config, run) == run.model
    assert made_data(config, run) == (run.data / "train.parquet", run.data / "validation.parquet")
    before, listed = stamps(run), made_inputs(run)
    assert {*listed["model.create"], "made.json"} == {path.name for path in run.model.iterdir()}
    assert sorted(listed["data.generate"]) == ["train.parquet", "validation.parquet"]
    made_model(config, run)
    made_data(config, run)
    assert (stamps(run), made_inputs(run)) == (before, listed)


@pytest.mark.parametrize("name", ["model/model.safetensors", "model/tokenizer.json", "data/train.parquet"])
def test_a_changed_bit_is_found_and_what_was_removed_is_made_again_as_it_was(run: RunFolder, tmp_path: Path, name: str):
    config, file = config_of(tmp_path), run.path / name
    made_model(config, run)
    made_data(config, run)
    listed, whole = made_inputs(run), bytearray(file.read_bytes())
    file.write_bytes(bytes([*whole[:-1], whole[-1] ^ 1]))
    with pytest.raises(CheckpointError, match=rf"{file.name}: its content has changed.*remove {file.parent}"):
        made_data(config, run) if name.startswith("data") else made_model(config, run)
    for path in file.parent.iterdir():
        path.unlink()
    file.parent.rmdir()
    made_model(config, run)
    made_data(config, run)
    assert made_inputs(run) == listed


def test_another_config_makes_them_anew_unless_a_checkpoint_belongs_to_them(run: RunFolder, tmp_path: Path):
    config = config_of(tmp_path)
    made_model(config, run)
    first = made_inputs(run)
    made_model(config_of(tmp_path, "seed=1"), run)
    assert made_inputs(run) != first
    made_model(config, run)
    with writing(run.checkpoints, 1):
        pass
    made_model(config_of(tmp_path, "seed=1"), run)
    assert made_inputs(run) == first
    (run.model / "made.json").unlink()
    with pytest.raises(CheckpointError, match=r"made\.json: missing or damaged; remove .*/model"):
        made_model(config, run)


def test_a_task_that_has_too_few_prompts_leaves_no_folder(run: RunFolder, tmp_path: Path):
    few = config_of(tmp_path, "data.generate={task: sum, num_digits: 2, num_validation_prompts: 1000000}")
    with pytest.raises(DataError, match=r"data\.generate: num_validation_prompts"):
        made_data(few, run)
    assert not run.data.exists()
