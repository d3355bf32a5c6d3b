"""`--help`, `rally recipes`, `rally config` and `--dry-run`: everything that only prints."""

import itertools
import json
import os
import re
import subprocess
import sys

import pytest
from grids import thinned
from tiny_models import edit_weights, make_tiny_model, make_tiny_reward_model

from rallypoint import __version__, checkpoint
from rallypoint.cluster.capacity import num_cores
from rallypoint.config import RunConfig, leaves, load_config, shipped_recipes, values_of
from rallypoint.config.load import expected
from rallypoint.errors import ConfigError
from rallypoint.run.folder import anchored, create_run
from rallypoint.run.record import Record

WIDTH = 80
ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


def lines_of(result) -> list[str]:
    assert result.exit_code == 0, result.output
    return ESCAPES.sub("", result.stdout).splitlines()


@pytest.mark.parametrize("name", [None, "train", "config", "recipes", "eval", "chat"])
def test_every_command_has_help_that_fits_a_terminal(command, name):
    lines = lines_of(command(*filter(None, [name]), "--help"))
    assert "Usage: rally" in "\n".join(lines)
    assert max(map(len, lines)) <= WIDTH
    assert lines_of(command(*filter(None, [name]), "-h")) == lines


def test_the_version_is_printed(command):
    assert lines_of(command("--version")) == [f"rallypoint {__version__}"]


def test_recipes_lists_what_ships_with_what_it_is_for(command):
    lines = lines_of(command("recipes"))
    assert max(map(len, lines)) <= WIDTH
    for name in shipped_recipes():
        assert sum(line.split(" ")[0] == name for line in lines) == 1


@pytest.mark.parametrize("explain", [(), ("--explain",)])
def test_config_prints_every_key_once_whole_and_with_its_origin(command, explain, tmp_path):
    long = str(tmp_path / ("long" * 30))
    lines = lines_of(command("config", "digits", "seed=41", f"trainer.runs_dir={long}", *explain))
    loaded = load_config("digits", ["seed=41", f"trainer.runs_dir={long}"])
    by_key = {line.split()[0]: line for line in lines if not line.startswith(" ")}
    assert [line.split()[0] for line in lines if not line.startswith(" ")] == list(by_key)
    assert list(by_key) == [key for key, _ in values_of(loaded.config)]
    assert by_key["seed"].split()[1:4] == ["41", "command", "line"]
    assert long in by_key["trainer.runs_dir"]
    assert "default" in by_key["rollout.placement.pool"]
    assert re.search(r"digits\.yaml:\d+", by_key["reward.function"])
    assert "not read: kl=null" in lines_by_key(command("config", "digits", "kl=null"))["reference.placement.pool"]
    assert "advantage.token_discount" not in by_key
    assert "…" not in "".join(lines)


def lines_by_key(result) -> dict[str, str]:
    return {line.split()[0]: line for line in lines_of(result) if not line.startswith(" ")}


def explained(lines: list[str]) -> dict[str, list[str]]:
    """What stands below each key."""
    below: dict[str, list[str]] = {}
    for line in lines:
        if not line.startswith(" "):
            below[line.split()[0]] = []
        else:
            below[list(below)[-1]].append(line)
    return below


def meaning(lines: list[str]) -> str:
    return " ".join(line.strip() for line in lines)


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_meanings_are_broken_between_words_only_whatever_the_width(command, columns):
    found = explained(lines_of(command("config", "digits", "--explain", columns=columns)))
    known = leaves(RunConfig)
    for key, below in found.items():
        assert max(map(len, below)) <= columns, key
        if key in known:
            assert meaning(below) == f"{known[key].description} Expected {expected(known[key])}."
    assert "a whole number of at least 1 (steps)" in meaning(found["trainer.num_steps"])
    assert "Off; model.lora={} switches it on, with the keys rank," in meaning(found["model.lora"])


WHOLE = {"digits", "digits-grpo", "gsm8k-grpo", "gsm8k-ppo", "math-dapo", "math-lora", "math-opd", "code"}
WHOLE |= {"moe-grpo", "hybrid-grpo", "tool-math", "search", "games"}
"""Recipes with a model, data and a reward of their own."""


@pytest.mark.parametrize(
    ("recipe", "explain"),
    thinned(
        itertools.product(shipped_recipes(), [(), ("--explain",)]),
        *((recipe, ()) for recipe in shipped_recipes()),
        *((recipe, ("--explain",)) for recipe in ("digits", "grpo", "opd")),
    ),
)
def test_what_a_recipe_leaves_to_its_user_is_shown_as_required(command, recipe, explain):
    lines = lines_of(command("config", recipe, *explain))
    required = [line.split()[0] for line in lines if re.search(r" required +not set yet$", line)]
    left = [] if recipe in WHOLE else ["model.path", "data.train", "reward.function"]
    left = left[:2] if recipe in ("sft", "reward_model", "dpo", "opd") else left
    left = [*left, "teacher.path"] if recipe == "opd" else left
    assert required == left


def test_a_draft_with_something_wrong_in_it_is_refused_all_the_same(command):
    said = command("config", "grpo", "rollout.group_size=1").exception
    assert len(said.problems) == 1
    assert "a group of one" in said.problems[0]


def test_config_shows_what_is_off_and_text_as_it_is_written(command):
    lines = lines_of(command("config", "digits", "kl=null", "trainer.name=a b"))
    assert any(re.fullmatch(r"kl +null +command line", line) for line in lines)
    assert any(re.fullmatch(r"trainer.name +a b +command line", line) for line in lines)


def test_markup_in_a_value_is_printed_and_not_obeyed(command):
    assert any("[bold]x" in line for line in lines_of(command("config", "digits", "trainer.name='[bold]x'")))


def test_output_can_be_piped_into_a_reader_that_stops(process, tmp_path):
    shell = f"{sys.executable} -m rallypoint.cli.main config digits --explain | head -n 1"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert done.stdout.startswith("recipe")
    assert done.stderr == ""


EXAMPLE = (
    "recipe=ppo", "rollout={num_prompts: 5, group_size: 3, max_response_tokens: 8}", "data.max_prompt_tokens=8",
    "data.generate={num_digits: 6}", "actor={num_epochs: 2, num_mini_batches: 4}", "critic.num_mini_batches=1",
    "cluster.pools={main: [2, 1]}", "engine.max_tokens_per_micro_batch=31", "trainer.num_steps=40", "kl={coef: 1e-3}",
)  # fmt: skip


def test_the_plan_of_a_run_fits_a_terminal_and_has_its_numbers(command):
    lines = lines_of(command("train", "digits", *EXAMPLE, "cluster.address=auto", "--dry-run"))
    text = "\n".join(lines)
    assert max(map(len, lines)) <= WIDTH
    assert "published weights: shared (rollouts are sampled from the actor's own)" in text
    assert "…" not in text
    assert "digits: one of 40 steps" in text
    assert "5 prompts x 3 = 15 rows" in text
    assert "at most 15 x (8 + 8) = 240" in text
    assert re.search(r"actor update +8 optimizer steps of at most 4 rows; on each of 3 ranks\n +at most 2 micro", text)
    assert re.search(r"critic update +1 optimizer step of at most 15 rows", text)
    header = next(line for line in lines if "reference" in line)
    assert header.split() == ["actor", "rollout", "reference", "critic"]
    for part in ("pool", "ranks", "weights", "gradients", "optimizer", "activations", "cache", "total"):
        assert sum(line.split()[:1] == [part] for line in lines) >= 1
    assert "pool main [2, 1]:" in text
    assert "Nothing was started" in text


ONCE = "actor.num_mini_batches=1"
NOTED = {
    "grpo": (["loss.clip_high=0.28"], "no effect of loss.clip_high: with one optimizer step a batch every ratio is 1"),
    "sapo": (["loss.name=sapo", ONCE], "no effect of loss.name=sapo: with one optimizer step"),
    "gspo": ([ONCE, "loss.dual_clip=3"], "no effect of loss.name=gspo, loss.dual_clip: with one optimizer step"),
    "of the sampler": (["loss.name=cispo", "loss.anchor=rollout"], None),
    "several": (["loss.clip_high=0.28", "actor.num_epochs=2"], None),
    "as they are": ([], None),
    "by tokens": (["loss.name=gmpo", "actor.num_epochs=2", "aggregation=token"], "loss.name=gmpo has aggregation=seq"),
}


@pytest.mark.parametrize("which", NOTED)
def test_the_plan_says_which_settings_of_a_loss_have_no_effect(command, which):
    overrides, said = NOTED[which]
    recipe = which if which in shipped_recipes() else "grpo"
    made = ("model.create={}", "data.generate={}", "reward.function=digits")
    lines = lines_of(command("train", recipe, *made, *overrides, "--dry-run"))
    assert ("policy loss" in " ".join(lines)) == (said is not None)
    assert (said or "") in re.sub(r"\s+", " ", " ".join(lines))


def test_the_plan_says_nothing_of_a_loss_that_is_not_read(command, tmp_path):
    (tmp_path / "mine.yaml").write_text("base: opd\nteacher: {hint: 'It is {ground_truth}.'}\nloss: {clip_high: 0.3}\n")
    made = ("model.create={}", "data.generate={}", "reward.function=digits")
    for loss, is_read in (("reverse", False), ("policy_gradient", True)):
        lines = lines_of(command("train", str(tmp_path / "mine.yaml"), *made, f"teacher.loss={loss}", "--dry-run"))
        assert ("policy loss" in " ".join(lines)) == is_read


@pytest.mark.parametrize("wanted", ["1", str(num_cores())])
def test_the_plan_says_how_cores_that_would_be_idle_are_used(command, wanted):
    one_process = ("train", "digits", "cluster.pools={main: [1]}", "--dry-run")
    text = "\n".join(lines_of(command(*one_process, f"cluster.num_cpus_per_process={wanted}")))
    assert (f"cores: 1 of {num_cores()} here" in text) == (int(wanted) < num_cores())
    assert ("cluster.pools=null uses them" in text) == (int(wanted) < num_cores())


def test_a_run_of_ones_own_uses_all_cores_without_being_told(command, tmp_path):
    (tmp_path / "mine.yaml").write_text(
        "base: grpo\nmodel: {create: {}}\ndata: {generate: {}, max_prompt_tokens: 16}\nreward: {function: digits}\n"
    )
    text = "\n".join(lines_of(command("train", str(tmp_path / "mine.yaml"), "--dry-run")))
    assert f"chosen for the {num_cores()} core" in text
    assert "are used; cluster.pools=null" not in text
    shown = "\n".join(lines_of(command("config", str(tmp_path / "mine.yaml"))))
    assert re.search(r"cluster\.pools +null +automatic", shown)


# test_hub.py asks a hub that is not there, and test_recipes_plans.py plans a model whose sizes are not known.
@pytest.mark.slow
def test_the_plan_of_a_model_on_the_hub_says_what_is_not_known_and_then_what_to_do_without_a_network(process, tmp_path):
    (tmp_path / "rewards.py").write_text("def f(data_source, solution_str, ground_truth, extra_info=None): ...")
    (tmp_path / "train.jsonl").write_text('{"prompt": "1", "ground_truth": "1"}')
    own = ("model.path=Some/Model", f"data.train={tmp_path}/train.jsonl", f"reward.function={tmp_path}/rewards.py:f")
    done = process("train", "ppo", *own, "--dry-run", HF_ENDPOINT="http://127.0.0.1:1", no_proxy="127.0.0.1")
    assert "unknown until it is loaded" in done.stdout
    assert re.search(r"weights +\? +\? +\? +\?", done.stdout)
    assert done.returncode == 2
    assert done.stderr.startswith("error: Some/Model: the hub at http://127.0.0.1:1 (HF_ENDPOINT) cannot be reached")
    assert "Retrying" not in done.stderr


def test_a_plan_for_weights_that_could_not_be_loaded_is_an_error(command, tmp_path):
    for name in ("policy", "critic"):
        make_tiny_model(tmp_path / name)
    own = ("model.create=null", f"model.path={tmp_path}/policy", f"critic.path={tmp_path}/critic")
    assert "Nothing was started" in "\n".join(lines_of(command("train", "digits", *own, "--dry-run")))
    edit_weights(tmp_path / "critic", lambda weights: weights.pop("model.norm.weight"))
    said = str(command("train", "digits", *own, "--dry-run").exception)
    assert said.startswith(f"{tmp_path}/critic: the weights do not fit config.json")
    assert "missing model.norm.weight" in said
    weights = tmp_path / "policy" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert "it is cut off: copy or download" in str(command("train", "digits", *own, "--dry-run").exception)


def test_a_reward_model_that_could_not_be_loaded_is_found_beside_a_policy_that_is_made(command, tmp_path):
    own = ("recipe=grpo", "advantage.token_discount=null", f"reward.path={tmp_path}/scorer")
    make_tiny_reward_model(tmp_path / "scorer", max_position_embeddings=8)
    said = str(command("train", "digits", *own, "--dry-run").exception)
    assert "reward.path" in said
    make_tiny_reward_model(tmp_path / "scorer")
    assert "Nothing was started" in "\n".join(lines_of(command("train", "digits", *own, "--dry-run")))
    edit_weights(tmp_path / "scorer", lambda weights: weights.pop("score.weight"))
    assert "missing score.weight" in str(command("train", "digits", *own, "--dry-run").exception)


def test_an_episode_is_examined_also_where_the_recipe_makes_its_data(command, tmp_path):
    (tmp_path / "mine.py").write_text("async def good(prompt, client): ...\ndef plain(prompt, client): ...\n")
    dry = ("train", "digits", "--dry-run")
    lines = lines_of(command(*dry, f"rollout.episode={tmp_path}/mine.py:good"))
    assert any(line.endswith("which could be imported") and "episode" in line for line in lines)
    assert "plain, which is not async" in str(command(*dry, f"rollout.episode={tmp_path}/mine.py:plain").exception)


SNIPPET = """
import json, sys
from typer.testing import CliRunner
from rallypoint.cli.main import app
for line in sys.argv[1:]:
    result = CliRunner().invoke(app, line.split(" "))
    heavy = [name for name in ("torch", "ray", "transformers", "matplotlib") if name in sys.modules]
    print(json.dumps([line, result.exit_code, heavy]))
"""


def test_what_only_prints_starts_nothing_makes_nothing_and_imports_nothing_heavy(tmp_path):
    lines = ("--help", "recipes", "config digits --explain", "train digits --dry-run", "eval --help")
    done = subprocess.run(
        [sys.executable, "-c", SNIPPET, *lines], capture_output=True, text=True, cwd=tmp_path, check=True
    )
    assert [json.loads(said) for said in done.stdout.splitlines()] == [[line, 0, []] for line in lines]
    assert os.listdir(tmp_path) == []


def test_a_run_that_could_not_begin_is_refused_alike_by_a_dry_run_and_leaves_no_folder(command, tmp_path):
    make_tiny_model(tmp_path / "model")
    (tmp_path / "train.jsonl").write_text('{"prompt": "1x", "ground_truth": "1"}')
    (tmp_path / "rewards.py").write_text("def f(data_source, solution_str, ground_truth, extra_info=None): ...")
    arguments = (
        "train", "grpo", f"model.path={tmp_path}/model", f"data.train={tmp_path}/train.jsonl",
        f"reward.function={tmp_path}/rewards.py:f", "data.max_prompt_tokens=32", "rollout.max_response_tokens=8",
        f"trainer.runs_dir={tmp_path}/runs",
    )  # fmt: skip
    for more in ((), ("--dry-run",)):
        result = command(*arguments, *more)
        assert "train.jsonl:1: the tokenizer knows no token for 'x'" in str(result.exception)
        assert "--resume" not in result.output
    assert not (tmp_path / "runs").exists()


def test_a_dry_run_refuses_a_loss_of_ones_own_that_breaks_a_rule_also_where_the_run_makes_its_data(command, tmp_path):
    (tmp_path / "mine.py").write_text("def total(tokens):\n    return tokens.logprobs.sum()\n")
    done = command("train", "digits", "--dry-run", f"loss.function={tmp_path}/mine.py:total")
    assert isinstance(done.exception, ConfigError)
    assert "one number for each token, found shape []" in str(done.exception)


def test_a_dry_run_of_a_resume_says_where_it_goes_on_and_refuses_what_the_resume_would(command, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    folder = create_run(load_config("digits", [f"trainer.runs_dir={tmp_path}", "trainer.name=mine"]))
    with checkpoint.writing(folder.checkpoints, 20) as written:
        (written / "training").mkdir()
        Record.of(anchored(load_config(str(folder.path)).config), folder).write(written)
    asked = ("train", str(folder.path), "--resume", "--dry-run", "cluster.pools={main: [1]}")
    lines = lines_of(command(*asked, "actor.optimizer.lr=0.5"))
    assert "  goes on after step 20 of 120" in lines, lines
    assert any("the weights are others from here on: actor.optimizer.lr=0.5" in line for line in lines), lines
    assert "seed=7 (was 0): the order of prompts" in str(command(*asked, "seed=7").exception)
    assert "no checkpoint of step 3" in str(command(*asked, "--from-step", "3").exception)
