"""Rows and models that exist in Python only, and the files that stand for them."""

import json

import numpy as np
import pytest
from tiny_models import make_tiny_model
from transformers import AutoModelForCausalLM

from rallypoint.config import load_config
from rallypoint.data import DataSet, load_dataset, load_tokenizer
from rallypoint.errors import ConfigError, DataError, ModelError, RunFolderError, UnusableCheckpointError
from rallypoint.library.settings import in_python, of_length, overrides_of, renamed
from rallypoint.library.use import generate
from rallypoint.prepare.from_python import data_files, model_path

ROWS = [{"prompt": f"{i} + 1", "answer": str(i + 1), "level": i} for i in range(3)]


class Yields:
    """Rows as a `datasets.Dataset` is: neither a list nor a dict."""

    def __init__(self, rows) -> None:
        self._rows = rows

    def __iter__(self):
        return iter(self._rows)

    def to_dict(self, batch_size=None):
        raise AssertionError("columns are not asked for")


class Frame(Yields):
    """Rows as pandas has them: its names are what it yields."""

    def __iter__(self):
        return iter(self._rows[0])

    def itertuples(self):
        return (tuple(row.values()) for row in self._rows)

    def to_dict(self, orient="dict"):
        assert orient == "records"
        return self._rows


def test_rows_become_a_file_that_any_run_can_read(tmp_path):
    (file,) = data_files(ROWS, tmp_path / "given")
    examples = load_dataset([DataSet(file)]).examples
    assert [example.ground_truth for example in examples] == ["1", "2", "3"]
    assert examples[2].extra_info == {"answer": "3", "level": 2}
    assert examples[0].prompt[0].content == "0 + 1"


def test_equal_rows_are_one_file_and_other_rows_are_another(tmp_path):
    first, again = data_files(ROWS, tmp_path), data_files((dict(row) for row in ROWS), tmp_path)
    assert first == again
    assert data_files(ROWS[:2], tmp_path) != first
    assert len(list(tmp_path.iterdir())) == 2


def test_a_data_set_and_a_data_frame_are_rows(tmp_path):
    assert data_files(Yields(ROWS), tmp_path) == data_files(Frame(ROWS), tmp_path) == data_files(ROWS, tmp_path)


def test_numbers_of_numpy_in_rows_are_numbers(tmp_path):
    row = {"prompt": "a", "answer": np.int64(3), "levels": np.array([0.5, 1.0])}
    (file,) = data_files([row], tmp_path)
    with open(file) as lines:
        assert json.loads(lines.readline())["extra_info"] == {"answer": 3, "levels": [0.5, 1.0]}


def test_rows_without_an_answer_are_prompts_all_the_same(tmp_path):
    (file,) = data_files([{"prompt": "write a poem"}], tmp_path)
    assert load_dataset([DataSet(file)]).examples[0].ground_truth == ""


def test_columns_that_a_data_file_has_stay_as_they_are(tmp_path):
    row = {
        "prompt": [{"role": "user", "content": "7"}],
        "reward_model": {"ground_truth": 7},
        "extra_info": {"index": 1},
    }
    (file,) = data_files([row], tmp_path)
    example = load_dataset([DataSet(file)]).examples[0]
    assert (example.ground_truth, example.extra_info) == (7, {"index": 1})


def test_conversations_and_pairs_are_written_as_they_are(tmp_path):
    row = {"prompt": "1 + 1", "chosen": "2", "rejected": "3"}
    (file,) = data_files([row], tmp_path)
    with open(file) as lines:
        assert json.loads(lines.readline()) == row


def test_paths_are_paths(tmp_path):
    assert data_files("a.jsonl", tmp_path) == ["a.jsonl"]
    assert data_files([tmp_path / "a.jsonl", "b.parquet"], tmp_path) == [str(tmp_path / "a.jsonl"), "b.parquet"]


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        ([], "there is no row"),
        ([1], "found int"),
        ([{"prompt": "a", "picture": b"1"}], r"row 0: .*bytes.*expected texts"),
        ([{"prompt": "a", "level": float("nan")}], "row 0"),
        ([{"prompt": "a"}, "b"], "row 1: .*dicts, found str"),
        ([{"prompt": "a", "extra_info": "hard"}], "row 0: extra_info: expected a dict, found str 'hard'"),
        (3, "found int"),
        ({"prompt": "1 + 1", "answer": "2"}, "such as a list of dicts, found one dict of prompt, answer"),
        ({"question": ["1 + 1"], "answer": ["2"]}, "found one dict of question, answer"),
        ({"train": ROWS, "test": ROWS}, r"found train, test; name a split: data\['train'\]"),
        ({"train": Yields(ROWS)}, r"name a split: data\['train'\]"),
    ],
)
def test_what_is_no_data_says_so_and_leaves_no_file(tmp_path, data, problem):
    with pytest.raises(DataError, match=problem):
        data_files(data, tmp_path / "given")


def test_a_column_that_the_reward_names_and_no_row_has_is_an_error_before_anything_starts(tmp_path):
    with pytest.raises(DataError, match="names 'hardness', and the first row has prompt, answer, level; the response"):
        data_files(ROWS, tmp_path, ["hardness"])


def test_a_model_of_transformers_becomes_a_folder_by_its_content(tmp_path):
    folder = make_tiny_model(tmp_path / "model")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), load_tokenizer(folder)
    saved = model_path((model, tokenizer), tmp_path / "given")
    assert model_path((model, tokenizer), tmp_path / "given") == saved
    again = AutoModelForCausalLM.from_pretrained(saved)
    assert all((one == other).all() for one, other in zip(model.parameters(), again.parameters(), strict=True))
    assert load_tokenizer(saved).encode("12") == tokenizer.encode("12")
    assert len(list((tmp_path / "given").iterdir())) == 1


def test_a_model_without_its_tokenizer_or_the_wrong_way_round_is_refused(tmp_path):
    folder = make_tiny_model(tmp_path / "model")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), load_tokenizer(folder)
    expected = r"model: expected a folder, .* or a pair \(model, tokenizer\); found "
    for given, found in (
        (model, "LlamaForCausalLM alone"),
        ((tokenizer, model), r"\(\w+, LlamaForCausalLM\)"),
        ((str(folder), tokenizer), r"\(str, \w+\)"),
        (None, "NoneType"),
    ):
        with pytest.raises(ModelError, match=expected + found):
            model_path(given, tmp_path / "given")
    assert not (tmp_path / "given").exists()


def test_values_of_python_and_numpy_are_overrides(tmp_path):
    assert overrides_of({"seed": np.int64(3), "trainer.runs_dir": tmp_path}) == [
        "seed=3",
        f'trainer.runs_dir="{tmp_path}"',
    ]
    with pytest.raises(ConfigError, match=r"kl \(rally.train\): expected a number, a text, a list or a dict"):
        overrides_of({"kl": object()})


def test_errors_say_where_python_set_a_key():
    error = renamed(ConfigError(("seed=-1 (command line): expected", "two (command line, grpo.yaml:3)")))
    assert error.problems == ("seed=-1 (rally.train): expected", "two (rally.train, grpo.yaml:3)")


@pytest.mark.parametrize("recipe", ["sft", "dpo", "reward_model"])
def test_steps_go_before_the_epochs_of_a_recipe(recipe):
    overrides = overrides_of({"trainer.num_steps": 2})
    with pytest.raises(ConfigError, match="num_steps=2 has no effect"):
        load_config(recipe, overrides, draft=True)
    trainer = load_config(recipe, [*overrides, *of_length(recipe, overrides)], draft=True).config.trainer
    assert (trainer.num_steps, trainer.num_epochs) == (2, None)


def test_epochs_and_steps_that_are_both_given_stay_as_they_are():
    assert of_length("sft", overrides_of({"trainer": {"num_steps": 2, "num_epochs": 1}})) == []


@pytest.mark.parametrize(
    ("of_the_command", "of_the_library"),
    [
        ("runs/a is the folder of a run: resume it with --resume, or", "resume it with resume=True, or"),
        ("resume it with `rally train runs/a --resume`, or", "resume it with `rally.train('runs/a', resume=True)`, or"),
        ("whole: rally train my runs/a --resume --from-step 3", "rally.train('my runs/a', resume=True, from_step=3)"),
        ("start over with --resume --from-step 0, or", "start over with resume=True, from_step=0, or"),
        ("--from-step is for --resume: it", "from_step is for resume=True: it"),
        ("name it: --reward a.py:f", "name it: reward='a.py:f'"),
        ("lower --max-response-tokens, or", "lower max_response_tokens, or"),
        ("no run of 'a' in runs; start one with `rally train a`", "start one with `rally.train('a', ...)`"),
        ("or give --trust-remote-code to another", "or give trust_remote_code=True to another"),
    ],
)
def test_messages_have_the_words_of_the_library(of_the_command, of_the_library):
    assert of_the_library in in_python(of_the_command)
    assert "--" not in in_python(of_the_command)


def test_one_conversation_is_told_from_a_list_of_prompts():
    with pytest.raises(DataError, match=r"one conversation is \[messages\]"):
        generate("nowhere", [{"role": "user", "content": "2 + 2"}])  # pyright: ignore[reportArgumentType]


def test_an_error_without_words_of_the_command_stays_the_same():
    error = RunFolderError("in use")
    assert renamed(error) is error
    other = renamed(UnusableCheckpointError("go on with rally train a --resume"))
    assert type(other) is UnusableCheckpointError
    assert str(other) == "go on with rally.train('a', resume=True)"
