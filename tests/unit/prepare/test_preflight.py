"""What is looked at before anything is started; the wrong configs themselves are in tests/unit/config."""

import os
from pathlib import Path

import pytest

from rallypoint.prepare.model_folders import is_hub_name
from rallypoint.prepare.preflight import load_checked

REWARD = "import a_module_that_is_not_there\nraise SystemExit('this must not be run')\n"


@pytest.fixture
def own(tmp_path: Path) -> list[str]:
    (tmp_path / "train.jsonl").write_text('{"prompt": "1", "ground_truth": "1"}\n')
    function = "def f(data_source, solution_str, ground_truth, extra_info=None):\n    return 0.0\n"
    (tmp_path / "rewards.py").write_text(REWARD + function)
    return [f"data.train={tmp_path}/train.jsonl", f"reward.function={tmp_path}/rewards.py:f"]


def test_the_users_code_is_read_and_not_run(own: list[str]):
    assert load_checked("ppo", [*own, "model.path=Some/Model"]).config.model.path == "Some/Model"


def test_a_model_on_the_hub_is_left_to_the_run_and_a_path_is_not(own: list[str]):
    with pytest.raises(ValueError, match="no such folder"):
        load_checked("ppo", [*own, "model.path=./Some/Model"])


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ('{"model_type": "llama", "hidden_size": -1, "vocab_size": "20"}', "hidden_size=-1, vocab_size='20'; expected"),
        ('{"model_type": "llama", "num_hidden_layers": 0}', "num_hidden_layers=0; expected whole numbers"),
        ('{"model_type":' * 50_000, "config.json is not valid JSON .*recursion"),
        (None, "config.json is missing"),
    ],
    ids=["sizes", "layers", "nested", "pipe"],
)
def test_a_config_json_that_describes_no_model_is_refused_by_name(own, tmp_path, content, problem):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").touch()
    if content is None:
        os.mkfifo(tmp_path / "model" / "config.json")
    else:
        (tmp_path / "model" / "config.json").write_text(content)
    with pytest.raises(ValueError, match=problem):
        load_checked("ppo", [*own, f"model.path={tmp_path}/model"])


@pytest.mark.parametrize(
    ("path", "is_name"),
    [("Qwen/Qwen3-0.6B", True), ("model", False), ("a/b/c", False), ("/a/b", False), ("~/b", False), ("../b", False)],
)
def test_names_on_the_hub_are_told_from_paths(path: str, is_name: bool):
    assert is_hub_name(path) is is_name


def test_a_folder_that_exists_makes_a_path_of_what_looks_like_a_name(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert is_hub_name("models/mine")
    (tmp_path / "models").mkdir()
    assert not is_hub_name("models/mine")


def test_an_engine_that_is_not_installed_is_refused_with_the_command_that_installs_it(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("RALLYPOINT_ENGINES", str(tmp_path))
    with pytest.raises(ValueError, match=r"rollout.engine='vllm'.*not installed.*: rally engine install vllm"):
        load_checked("digits", ["rollout.engine=vllm"])


@pytest.mark.parametrize("task", ["sort", "sequence", "sum"])
def test_the_least_limits_of_each_task_are_accepted_and_one_less_is_not(task: str):
    num_digits = 4
    prompt = {"sort": num_digits, "sequence": 8, "sum": 2 * num_digits + 1}[task] + 2
    answer = num_digits + (task == "sum")
    base = [f"data.generate={{task: {task}, num_digits: {num_digits}, num_validation_prompts: 20}}"]
    limits = {"data.max_prompt_tokens": prompt, "rollout.max_response_tokens": answer}
    load_checked("digits", [*base, *(f"{key}={limit}" for key, limit in limits.items())])
    for key in limits:
        less = {**limits, key: limits[key] - 1}
        with pytest.raises(ValueError, match=rf"{key}={less[key]} cannot hold"):
            load_checked("digits", [*base, *(f"{key}={limit}" for key, limit in less.items())])


def test_a_runs_dir_that_cannot_be_written_is_refused_and_one_that_can_is_left_as_it_was(tmp_path: Path):
    with pytest.raises(ValueError, match=r"trainer.runs_dir='/proc/self/runs': nothing can be written to /proc/self"):
        load_checked("digits", ["trainer.runs_dir=/proc/self/runs"])
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"lies below .*, which is a file; expected a folder"):
        load_checked("digits", [f"trainer.runs_dir={tmp_path}/file/runs"])
    load_checked("digits", [f"trainer.runs_dir={tmp_path}/new/runs"])
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
