"""examples/own_model as a user runs it: its own scripts, then the command line, from a copy of the folder."""

import contextlib
import json
import re
import runpy
import shutil
from pathlib import Path

import pytest
import yaml
from forks import ForkedRally
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer

from rallypoint.environments.sandbox import SandboxError, open_sandbox

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_model"
FEW = ("trainer.num_steps=2", "rollout.num_prompts=16", "validation.every_steps=1", "cluster.pools={main: [1]}")


def in_folder(folder, script):
    """Run a script there, as a program, in this process: a new one would import transformers once more."""
    with contextlib.chdir(folder):
        runpy.run_path(script, run_name="__main__")


def rally(folder, *arguments, deadline_s=120):
    """Run the command line there, and return what it printed."""
    process = ForkedRally([*arguments], cwd=folder)
    printed, _ = process.communicate(timeout=deadline_s)
    assert process.returncode == 0, f"{arguments}: exit status {process.returncode}\n{printed}"
    return printed


def rows_of(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.fixture(scope="module")
def own_model(tmp_path_factory):
    """A copy of the example with its data and its model made."""
    folder = tmp_path_factory.mktemp("example") / "own_model"
    folder.mkdir()
    for file in EXAMPLE.iterdir():
        if file.suffix in {".py", ".yaml"}:
            shutil.copy(file, folder)
    for script in ("make_data.py", "make_model.py"):
        in_folder(folder, script)
    return folder


# On Ray, test_interruptions.py trains from the command line, and test_library.py with a user's own functions.
@pytest.mark.parametrize(
    ("recipe", "runtime"), [pytest.param("ppo", "ray", marks=pytest.mark.slow), ("ppo", "inline"), ("grpo", "inline")]
)
def test_the_example_trains_from_the_command_line_and_leaves_a_model_that_transformers_opens(
    own_model, recipe, runtime
):
    keys = (*FEW, f"cluster.runtime={runtime}", f"trainer.name={recipe}")
    rally(own_model, "train", f"{recipe}.yaml", *keys)
    run = own_model / "runs" / recipe
    scores = [row["validation/score"] for row in rows_of(run / "metrics.jsonl") if "validation/score" in row]
    assert len(scores) == 3
    newest = run / "checkpoints" / "step_000002"
    tokenizer, policy = AutoTokenizer.from_pretrained(newest), AutoModelForCausalLM.from_pretrained(newest)
    assert policy.config.vocab_size == len(tokenizer)
    if recipe == "ppo":
        assert AutoModelForTokenClassification.from_pretrained(newest / "critic").config.num_labels == 1


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("recipe", ["ppo", "grpo"])
def test_ones_own_is_learned_and_evaluated_by_what_it_was_trained_with(own_model, recipe):
    rally(own_model, "train", f"{recipe}.yaml", f"trainer.name=whole-{recipe}", deadline_s=900)
    run = own_model / "runs" / f"whole-{recipe}"
    scores = [row["validation/score"] for row in rows_of(run / "metrics.jsonl") if "validation/score" in row]
    assert scores[-1] > scores[0] + 0.5
    printed = rally(own_model, "eval", str(run), "validation.jsonl")
    assert "64 prompts" in printed, printed


def test_no_word_of_the_examples_validation_set_is_trained_on(own_model):
    train, validation = (
        {row["prompt"][0]["content"] for row in rows_of(own_model / f"{name}.jsonl")}
        for name in ("train", "validation")
    )
    assert (len(train), len(validation), train & validation) == (448, 64, set())


def test_the_examples_reward_gives_each_letter_in_its_place_a_share():
    compute_score = runpy.run_path(str(EXAMPLE / "rewards.py"))["compute_score"]
    answers = {"cba": 1.0, "cb": 2 / 3, "abc": 1 / 3, "cbacba": 0.5, "": 0.0}
    assert {answer: compute_score("reverse", answer, "cba") for answer in answers} == answers


def test_the_example_needs_six_lines_of_python_and_fifteen_of_yaml():
    lines = {name: (EXAMPLE / name).read_text().splitlines() for name in ("rewards.py", "ppo.yaml", "grpo.yaml")}
    assert len(lines["rewards.py"]) <= 6
    assert len(lines["ppo.yaml"]) <= 15
    assert len(lines["grpo.yaml"]) <= 15


def test_the_examples_two_configs_differ_only_in_the_recipe_and_the_critic():
    ppo, grpo = (yaml.safe_load((EXAMPLE / f"{name}.yaml").read_text()) for name in ("ppo", "grpo"))
    assert (ppo.pop("base"), grpo.pop("base")) == ("ppo", "grpo")
    del ppo["critic"]
    assert ppo == grpo


def test_the_example_of_programs_trains_through_a_sandbox_and_says_which(tmp_path):
    try:
        sandbox = open_sandbox()
    except SandboxError as error:
        pytest.skip(str(error))
    for file in (EXAMPLE.parent / "code").iterdir():
        shutil.copy(file, tmp_path)
    in_folder(tmp_path, "make.py")
    keys = ("cluster.runtime=inline", "trainer.num_steps=1", "rollout.group_size=4", "trainer.name=code")
    printed = rally(tmp_path, "train", "grpo.yaml", *keys)
    assert f"model-written code runs in a sandbox: {sandbox.name}" in " ".join(printed.split())
    rows = rows_of(tmp_path / "runs" / "code" / "metrics.jsonl")
    assert [row["reward/num_scored"] for row in rows if "reward/num_scored" in row] == [16]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_programs_are_learned(tmp_path):
    try:
        open_sandbox()
    except SandboxError as error:
        pytest.skip(str(error))
    rewards = [
        row["reward/mean"] for row in played(made(tmp_path, "code", "make.py"), "grpo", "whole") if "reward/mean" in row
    ]
    assert rewards[-1] > rewards[0] + 0.4


QUESTIONS = {
    "A shelf holds 4 rows of 6 books. How many books are on it?": "4 rows of 6 are <<4*6=24>>24 books.\n#### 24",
    "Ana had $9 and spent a third. What is left?": "A third is $<<9/3=3>>3.\nLeft are $<<9-3=6>>6.\n#### 6",
    "A farm sells 1,200 eggs a week. How many in 5 weeks?": "They are 5*1200=<<5*1200=6000>>6000 eggs.\n#### 6,000",
}
"""Rows as GSM8K has them."""


def test_gsm8k_as_it_is_on_the_hub_trains_with_three_lines_for_its_columns(tmp_path):
    pytest.importorskip("math_verify")
    for file in (EXAMPLE.parent / "gsm8k").glob("*.*"):
        shutil.copy(file, tmp_path)
    rows = [{"question": question, "answer": answer} for question, answer in QUESTIONS.items()]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    in_folder(tmp_path, "make_model.py")
    one = "reward.num_processes=1"  # each imports math_verify
    checked = rally(tmp_path, "check-reward", "grpo.yaml", one, "--max-rows=3")
    assert re.search(r"right +3 +1\.1 ", checked), checked
    keys = ("cluster.runtime=inline", "trainer.num_steps=1", "rollout={num_prompts: 3, group_size: 4}")
    rally(tmp_path, "train", "grpo.yaml", *keys, one, "trainer.name=gsm8k")
    found = [row for row in rows_of(tmp_path / "runs" / "gsm8k" / "metrics.jsonl") if "reward/mean" in row]
    assert [(row["reward/num_scored"], row["reward/failed"]) for row in found] == [(12, 0)]


def made(folder, example, *scripts):
    """Return a folder with the files of an example, after its scripts were run there."""
    for file in (EXAMPLE.parent / example).iterdir():
        if file.suffix in {".py", ".yaml"}:
            shutil.copy(file, folder)
    for script in scripts:
        in_folder(folder, script)
    return folder


@pytest.fixture(scope="module")
def games(tmp_path_factory):
    return made(tmp_path_factory.mktemp("games"), "games", "make_data.py", "make_model.py")


def played(folder, config, name, *keys):
    rally(folder, "train", f"{config}.yaml", f"trainer.name={name}", "cluster.runtime=inline", *keys, deadline_s=900)
    return rows_of(folder / "runs" / name / "metrics.jsonl")


@pytest.mark.parametrize("game", ["guess", pytest.param("lake", marks=pytest.mark.slow), "wordle"])
def test_the_games_train_on_what_was_said_turn_by_turn(games, game):
    few = ("rollout.num_prompts=10", "rollout.group_size=2", "actor.num_mini_batches=1", "critic.num_mini_batches=1")
    few += ("validation.max_prompts=10",)
    begin = ("model.path=speller",) if game == "wordle" else ()
    rows = played(games, game, f"{game}-1", *few, *begin, "trainer.num_steps=1")
    (trained,) = [row for row in rows if "actor/loss" in row]
    assert trained["rollout/num_turns"] > 1
    if game != "wordle":  # whose answers have letters as long as nobody has started it
        assert trained["rollout/num_turns"] > 2
        assert 1 < trained["rollout/turn_length"] <= 2


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("game", "gain"), [("guess", 0.5), ("lake", 0.5), ("wordle", 0.2)])
def test_the_games_are_learned(games, game, gain):
    if game == "wordle":
        played(games, "wordle-start", "wordle-start")
    scores = [row["validation/score"] for row in played(games, game, game) if "validation/score" in row]
    assert scores[-1] > scores[0] + gain


@pytest.fixture(scope="module")
def tools(tmp_path_factory):
    return made(tmp_path_factory.mktemp("tools"), "tools", "make.py")


@pytest.mark.parametrize("config", ["search", "agent"])
def test_the_tools_and_the_agent_train_for_a_step(tools, config):
    few = ("rollout.num_prompts=4", "rollout.group_size=4", "validation.max_prompts=4", "trainer.num_steps=1")
    rows = played(tools, config, f"{config}-1", *few, "model.path=model")
    assert [row["step"] for row in rows if "actor/loss" in row] == [1]


@pytest.fixture(scope="module")
def started(tools):
    """The model that the four runs begin with."""
    played(tools, "start", "start")
    return tools


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("config", ["calculator", "python", "search", "agent"])
def test_the_tools_are_learned(started, config):
    if config == "python":
        try:
            open_sandbox()
        except SandboxError as error:
            pytest.skip(str(error))
    rows = played(started, config, config)
    scores = [row["validation/score"] for row in rows if "validation/score" in row]
    assert scores[-1] > scores[0] + 0.3
    if config != "agent":  # who calls by itself
        assert [row["rollout/tool_calls"] for row in rows if "rollout/tool_calls" in row][-1] > 0.8
