"""Runs and keys by the names that people type."""

import re
from pathlib import Path

import pytest

import rallypoint as rally
from rallypoint.config import load_config
from rallypoint.config.source import find
from rallypoint.errors import ConfigError, RunFolderError
from rallypoint.prepare.preflight import newest_of
from rallypoint.recipes.use import find_trained
from rallypoint.run.folder import create_run


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a run called first, in `runs` of the working directory."""
    monkeypatch.chdir(tmp_path)
    return create_run(load_config("digits", ["trainer.name=first"])).path


def test_a_run_has_the_name_that_is_listed(command, run):
    assert "first" in command("runs").stdout
    assert newest_of("first", ()).absolute() == run
    assert rally.load_run("first").folder == run
    for verb in (["show", "first"], ["eval", "first", "rows.jsonl"], ["chat", "first"]):
        said = str(command(*verb).exception)
        assert "no such folder" not in said
        assert re.search("this run has no checkpoint yet|rollouts/ has no step", said)


def test_a_run_of_a_config_of_ones_own_has_its_name_with_a_date(run):
    dated = run.rename(run.with_name("mine-20260101-120000"))
    assert newest_of("mine", ()).absolute() == dated
    with pytest.raises(RunFolderError, match=r"yours: no recipe, and no run of that name in .*`rally runs` lists"):
        newest_of("yours", ())
    with pytest.raises(Exception, match="no such folder"):
        find_trained("mine-2")


def test_a_folder_that_is_not_there_and_one_that_is_no_run_are_no_lists_of_recipes(run):
    with pytest.raises(ConfigError, match="runs/none: no such folder") as error:
        find("runs/none")
    assert "gsm8k" not in str(error.value)
    with pytest.raises(ConfigError, match="a folder without config"):
        find(str(run.parent))
    with pytest.raises(ConfigError, match="did you mean `grpo`"):
        find("gpro")


def test_a_key_that_is_written_as_an_option_is_led_to_the_key(command):
    said = command("train", "digits", "--rollout.num_prompts=8")
    assert said.exit_code == 2
    assert "write rollout.num_prompts=8" in " ".join(said.stderr.replace("│", " ").split())


@pytest.mark.parametrize("key", ["data.validation", "reward.functions", "rollout.stop", "reward.parameters"])
def test_null_unsets_a_list(key, tmp_path):
    (tmp_path / "mine.yaml").write_text(
        "base: grpo\nmodel: {path: m}\ndata: {train: t.jsonl, validation: v.jsonl}\nrollout: {stop: [x]}\n"
        "reward: {function: r.py:f, parameters: {a: 1}}\n"
    )
    values = load_config(str(tmp_path / "mine.yaml"), [f"{key}=null"]).config.model_dump()
    section, name = key.split(".")
    assert not values[section][name]
    assert (
        sum(bool(values[s][n]) for s, n in (("data", "validation"), ("rollout", "stop"), ("reward", "parameters"))) >= 2
    )
