"""Which run `--resume` means, with which config, and whose code that may run."""

import shutil
from pathlib import Path

import pytest

from rallypoint.config import load_config
from rallypoint.errors import ConfigError, RunFolderError
from rallypoint.prepare.preflight import find_wanted, load_named
from rallypoint.run.folder import RunFolder, create_run

FILE = "base: digits\nactor: {num_mini_batches: 2}\ntrainer: {name: mine, num_steps: 50}\n"
REWARD = "def f(data_source, solution_str, ground_truth, extra_info): return 0.0\n"


@pytest.fixture
def here(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "mine.yaml").write_text(FILE)
    (tmp_path / "rewards.py").write_text(REWARD)
    return tmp_path


def start(*overrides: str, recipe: str = "mine.yaml") -> RunFolder:
    return create_run(load_config(recipe, overrides))


def wanted(recipe: str | Path, *overrides: str):
    said: list[str] = []
    loaded, folder = find_wanted(str(recipe), overrides, say=said.append)
    return loaded.config, folder, said


def test_the_run_of_a_recipe_takes_the_file_as_it_is_now_and_the_command_line_of_its_start(here: Path):
    run = start("seed=7", "rollout.num_prompts=32")
    (here / "mine.yaml").write_text(FILE.replace("50", "80").replace("num_mini_batches: 2", "num_mini_batches: 8"))
    config, folder, said = wanted("mine.yaml", "rollout.num_prompts=16")
    assert folder.path == run.path
    assert (config.trainer.num_steps, config.actor.num_mini_batches) == (80, 8)
    assert (config.seed, config.rollout.num_prompts) == (7, 16)
    assert said == ["mine: as on the command line of its start: seed=7"]


def test_a_run_keeps_the_processes_that_were_chosen_for_the_machine_that_it_began_on(here: Path):
    (here / "mine.yaml").write_text(f"{FILE}cluster: {{pools: null}}\n")
    elsewhere = {"cluster.pools": {"main": (5,)}, "cluster.num_cpus_per_process": 3}
    run = create_run(load_config("mine.yaml", choose=lambda _, __: elsewhere))
    for recipe in ("mine.yaml", run.path):
        cluster = wanted(recipe)[0].cluster
        assert (cluster.pools, cluster.num_cpus_per_process) == ({"main": (5,)}, 3)
    assert wanted("mine.yaml", "cluster.pools={main: [2]}")[0].cluster.pools == {"main": (2,)}


def test_the_folder_of_a_run_takes_its_own_config_and_the_command_line(here: Path):
    run = start("seed=7")
    (here / "mine.yaml").write_text(FILE.replace("50", "80"))
    config, _, said = wanted(run.path, "trainer.num_steps=60")
    assert (config.trainer.num_steps, config.seed, said) == (60, 7, [])


def test_what_a_recipe_requires_may_have_been_said_at_the_start(here: Path):
    (here / "model").mkdir()
    (here / "model" / "config.json").write_text('{"model_type": "llama"}')
    (here / "model" / "a.safetensors").write_text("")
    (here / "t.jsonl").write_text('{"prompt": "1", "ground_truth": "1"}\n')
    own = ("model.path=model", "data.train=t.jsonl", "reward.function=rewards.py:f", "trainer.name=grpo")
    run = start(*own, recipe="grpo")
    config, folder, _ = wanted("grpo")
    assert (folder.path, config.model.path) == (run.path, f"{here}/model")


def test_a_run_that_was_never_started_is_said(here: Path):
    with pytest.raises(RunFolderError, match="no run of 'mine'"):
        wanted("mine.yaml")


def own_reward(here: Path, *overrides: str) -> RunFolder:
    return start("data.generate=null", "model.create=null", *own_material(here), *overrides)


def own_material(here: Path) -> tuple[str, ...]:
    (here / "model").mkdir()
    (here / "model" / "config.json").write_text('{"model_type": "llama"}')
    (here / "model" / "a.safetensors").write_text("")
    (here / "t.jsonl").write_text('{"prompt": "1", "ground_truth": "1"}\n')
    return "model.path=model", "data.train=t.jsonl", "reward.function=rewards.py:f"


def test_a_run_of_ones_own_goes_on_with_its_code_without_fuss_also_when_it_was_moved(here: Path):
    run = own_reward(here, "model.trust_remote_code=true")
    moved = shutil.move(run.path, here / "elsewhere")
    for where in (moved,):
        config, _, _ = wanted(where)
        assert config.reward.function == f"{here}/rewards.py:f"
        assert config.model.trust_remote_code


def test_code_that_a_foreign_run_folder_names_is_not_run_unless_it_is_named(here: Path, monkeypatch):
    run = own_reward(here, "model.trust_remote_code=true", "cluster.address=10.0.0.7:6379")
    monkeypatch.setenv("XDG_STATE_HOME", str(here / "of another user"))
    with pytest.raises(ConfigError) as raised:
        wanted(run.path)
    said = str(raised.value)
    assert f"reward.function ({here}/rewards.py:f) is code that {run.path} names" in said
    assert "and you did not start that run on this machine" in said
    assert "name it yourself: model.trust_remote_code=true" in said
    assert "cluster.address (10.0.0.7:6379)" in said
    named = (f"reward.function={here}/rewards.py:f", "model.trust_remote_code=true", "cluster.address=10.0.0.7:6379")
    with pytest.raises(ConfigError, match="you did not start that run"):
        load_named(str(run.path), named[:2])
    assert load_named("mine.yaml", []).config.recipe == "ppo"
    config, _, _ = wanted(run.path, *named)
    assert config.reward.function == f"{here}/rewards.py:f"


@pytest.mark.parametrize("change", ["reward", "model", "signature"])
def test_a_signature_is_for_the_very_code_that_was_named(here: Path, change):
    run = own_reward(here, "model.trust_remote_code=true")
    text = run.config.read_text()
    if change == "reward":
        (here / "evil.py").write_text(REWARD)
        run.config.write_text(text.replace("rewards.py", "evil.py"))
    elif change == "model":
        shutil.copytree(here / "model", here / "evil")
        run.config.write_text(text.replace(f"{here}/model", f"{here}/evil"))
    else:
        run.journal.unlink()
    with pytest.raises(ConfigError, match="you did not start that run on this machine"):
        wanted(run.path)


def test_code_that_only_the_start_of_a_foreign_run_named_is_not_taken_over_for_a_recipe_of_ones_own(
    here: Path, monkeypatch
):
    own_reward(here)
    monkeypatch.setenv("XDG_STATE_HOME", str(here / "of another user"))
    with pytest.raises(ConfigError, match=r"reward.function .* is code that"):
        wanted("mine.yaml", "reward.path=null")
    text = f"{FILE}reward: {{function: rewards.py:f}}\ndata: {{generate: null, train: t.jsonl}}\n"
    (here / "mine.yaml").write_text(text + "model: {create: null, path: model}\n")
    shutil.rmtree(here / "runs")
    start()
    assert wanted("mine.yaml")[0].reward.function == "rewards.py:f"


def test_the_key_is_for_this_user_only_and_made_only_for_who_needs_one(here: Path):
    start()
    assert not (here / "state").exists()
    shutil.rmtree(here / "runs")
    own_reward(here)
    key = here / "state" / "rallypoint" / "key"
    assert (key.stat().st_mode & 0o777, len(key.read_bytes())) == (0o600, 32)
    assert [path.name for path in key.parent.iterdir()] == ["key"]
