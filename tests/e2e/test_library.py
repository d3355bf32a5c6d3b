"""`import rallypoint as rally`: training from rows and closures, runs as values, recipes of a script's own."""

import asyncio
import dataclasses
import importlib
import sys
from pathlib import Path

import pytest
import torch
from forks import run_forked
from tiny_models import make_tiny_model
from tiny_runs import weights_of
from transformers import AutoModelForCausalLM, PreTrainedModel

import rallypoint as rally
from rallypoint.config import RECIPES
from rallypoint.data import load_tokenizer
from rallypoint.display import Silent
from rallypoint.errors import ConfigError, DataError, ResumeError, RewardError, RunFolderError
from rallypoint.page import write_report
from rallypoint.recipes import ending
from rallypoint.recipes.grpo import GRPO
from rallypoint.run.folder import RunFolder
from rallypoint.types import Last, Metrics

ROWS = [{"prompt": f"{i % 10}{i * 7 % 10}", "answer": str(i % 10)} for i in range(32)]
INLINE = {"cluster.runtime": "inline", "data.max_prompt_tokens": 16, "checkpoint.keep": 9, "reward.num_processes": 1}


def _sent_whole():
    """Return a function that reward processes get as it is, so that none has to import this file and torch."""

    def reward(completion: str, answer: str) -> float:
        return completion.count(answer) / 4

    return reward


reward = _sent_whole()


@pytest.fixture
def train(tmp_path):
    """Four small steps in this process, unless a test says otherwise."""
    make_tiny_model(tmp_path / "model")

    def run(recipe="grpo", *, config=None, **more):
        usual = {
            "model": tmp_path / "model",
            "data": ROWS,
            "reward": reward,
            "num_steps": 4,
            "lr": 1e-3,
            "num_prompts": 4,
            "group_size": 4,
            "max_response_tokens": 4,
            "runs_dir": tmp_path / "runs",
            "name": "run",
            "display": False,
        }
        return rally.train(recipe, config={**INLINE, **(config or {})}, **(usual | more))

    return run


def weights(run: rally.Run) -> dict[str, str]:
    return weights_of(RunFolder(run.folder))


def test_rows_and_a_closure_train_a_model_and_the_run_is_a_value(train, tmp_path, monkeypatch):
    monkeypatch.setattr(ending, "write_report", write_report)
    scale = 0.25
    heard: list[rally.Step] = []
    run = train(
        reward=lambda completion, answer: scale * completion.count(answer), callbacks=heard.append, validation=ROWS[:4]
    )
    assert run.finished
    assert [step.number for step in heard] == [1, 2, 3, 4]
    assert {"reward/mean", "time_s/learn", "validation/score"} <= heard[-1].metrics.keys()
    assert [record["step"] for record in run.metrics] == [0, 1, 2, 3, 4]
    assert run.best.score == max(r["validation/score"] for r in run.metrics if "validation/score" in r)
    assert run.config.reward.function == "@lambda"
    assert run.curve().path.is_file()
    assert 'id="data"' in (run.folder / "report.html").read_text()
    assert run.view()._repr_html_().startswith("<iframe")
    assert {"prompt", "response"} <= run.rollouts(1)[0].keys()
    model, tokenizer = run.load()
    assert isinstance(model, PreTrainedModel)
    assert len(rally.generate(run, ["12", "34", "12"], max_response_tokens=3)) == 3
    assert rally.generate((model, tokenizer), "12", max_response_tokens=9) == rally.generate(
        run.folder, "12", max_response_tokens=9
    )
    scored = rally.evaluate(run, ROWS[:4], reward=lambda completion: float(len(completion)), num_samples=2)
    assert len(scored.scores) == 8
    length = {"one": lambda completion: float(len(completion)), "two": lambda completion: 2.0}
    both = rally.evaluate(run, ROWS[:4], reward=length, num_samples=2)
    assert both.scores == tuple(score + 2.0 for score in scored.scores)
    with pytest.raises(RewardError, match=r"give it again: rally.evaluate\(run, rows, reward=lambda\)"):
        rally.evaluate(run, ROWS[:4])
    assert rally.load_run(run.folder).num_steps == 4
    assert "4 of 4 steps" in repr(run)


def test_a_callback_stops_a_run_and_resuming_it_ends_with_the_bits_of_one_that_was_not_stopped(train, tmp_path):
    whole = train(name="whole", num_steps=2)
    part = train(num_steps=2, callbacks=lambda step: step.stop() if step.number == 1 else None)
    assert (part.num_steps, part.finished, list(part.checkpoints)) == (1, False, [1])
    assert rally.train(part, reward=reward, resume=True, display=False).finished
    assert weights(part) == weights(whole)


FAKE_WANDB = """
calls = []

def init(**settings):
    calls.append(("init", settings["id"], settings["resume"]))
    return Run()

class Run:
    def log(self, scalars, *, step):
        if "reward/mean" in scalars:
            calls.append(("step", step))

    def finish(self, *, exit_code):
        calls.append(("finish", exit_code))

class Table:
    def __init__(self, **_): ...

class Image:
    def __init__(self, _): ...
"""


def test_a_tracker_hears_each_step_once_over_all_starts_of_a_run_and_how_each_ended(train, tmp_path, monkeypatch):
    package = tmp_path / "packages" / "wandb"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(FAKE_WANDB)
    monkeypatch.syspath_prepend(package.parent)
    monkeypatch.setitem(sys.modules, "wandb", None)  # what is imported below is taken back, too
    del sys.modules["wandb"]

    def fail(step: rally.Step) -> None:
        raise OSError(f"at {step.number}")

    run = train(
        num_steps=3,
        callbacks=lambda step: step.stop() if step.number == 1 else None,
        config={"tracking": ["wandb"], "validation.every_steps": 9},
    )
    with pytest.raises(OSError, match="at 2"):  # step 2 is done, but not saved
        rally.train(run, reward=reward, resume=True, display=False, callbacks=fail)
    assert rally.train(run, reward=reward, resume=True, display=False).finished
    calls = importlib.import_module("wandb").calls
    assert len({call[1:] for call in calls if call[0] == "init"}) == 1, "all starts are one run there"
    assert [call for call in calls if call[0] != "init"] == [
        ("step", 1),
        ("finish", 255),
        ("step", 2),
        ("finish", 1),
        ("step", 3),
        ("finish", 0),
    ]


def test_in_a_running_event_loop_the_run_has_a_thread_and_the_same_bits(train):
    async def cell() -> rally.Run:
        return train(name="in_a_loop", num_steps=2)

    assert weights(asyncio.run(cell())) == weights(train(num_steps=2))


def test_a_model_of_transformers_and_its_folder_train_to_the_same_bits(train, tmp_path):
    folder = tmp_path / "model"
    pair = AutoModelForCausalLM.from_pretrained(folder), load_tokenizer(folder)
    assert weights(train(model=pair, name="pair", num_steps=2)) == weights(train(num_steps=2))


def test_several_functions_are_added_up_and_measured_each(train):
    run = train(reward={"right": reward, "short": lambda completion: -len(completion) / 10}, num_steps=1)
    assert {"reward/right/mean", "reward/short/mean"} <= run.metrics[-1].keys()


def test_what_is_wrong_is_said_as_the_command_says_it_and_leaves_no_run(train, tmp_path):
    with pytest.raises(ConfigError) as raised:
        train(config={"num_generations": 8, "rollout.top_p": 2.0})
    assert "did you mean rollout.group_size=8?" in str(raised.value)
    assert "rollout.top_p=2.0 (rally.train)" in str(raised.value)
    with pytest.raises(ConfigError, match=r"did you mean kl.coef=0.04\?"):
        train(beta=0.04)
    with pytest.raises(DataError, match="names 'hardness'"):
        train(reward=lambda completion, hardness: 0.0)
    with pytest.raises(DataError, match="column 'prompt' is missing; 'question' may be it"):
        train(data=[{"question": "1", "answer": "2"}])
    with pytest.raises(RunFolderError, match="not the folder of a run"):
        rally.load_run(tmp_path)
    assert not (tmp_path / "runs" / "run").exists()


def test_a_run_that_is_resumed_with_other_rows_is_refused(train):
    run = train(num_steps=1)
    with pytest.raises(ResumeError, match=r"data.train"):
        rally.train(run, data=ROWS[:-1], reward=reward, resume=True, num_steps=2, display=False)
    with pytest.raises(ConfigError, match=r"was given to rally.train in Python and is not kept"):
        rally.train(run, resume=True, display=False)
    with pytest.raises(ConfigError, match=r"is the folder of a run: resume it with resume=True, or name a recipe"):
        rally.train(run.folder, reward=reward, display=False)
    with pytest.raises(RunFolderError, match=r"resume it with `rally.train\('.*/run', resume=True\)`, or choose"):
        train(num_steps=1)


def test_a_callback_that_raises_ends_the_run_with_its_own_error(train):
    def callback(step: rally.Step) -> None:
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        train(callbacks=callback)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Twice(GRPO):
    """A recipe with a step of its own."""

    async def train_step(self, step: int) -> Metrics:
        found = await super().train_step(step)
        return Metrics({**found, "mine/step": Last(float(2 * step))})


def test_a_recipe_with_a_step_of_its_own_runs_without_touching_the_package(train):
    run = train(Twice, num_steps=2)
    assert [record.get("mine/step") for record in run.metrics] == [None, 2.0, 4.0]
    assert run.config.recipe == "Twice"
    del RECIPES["Twice"]  # other tests of this process list them


def test_a_class_that_is_no_recipe_is_refused(train):
    with pytest.raises(ConfigError, match="not derived from a recipe that is declared"):
        train(torch.nn.Module)


SCRIPT = """
import sys
import rallypoint as rally
from rallypoint.recipes.grpo import GRPO
from rallypoint.types import Last, Metrics

class Mine(GRPO):
    async def train_step(self, step):
        return Metrics({**await super().train_step(step), "mine/step": Last(float(step))})

limit = 4
def reward(completion, answer):
    return completion.count(answer) / limit

folder = sys.argv[1]
rows = [{"prompt": "12", "answer": "1"}, {"prompt": "34", "answer": "3"}]
run = rally.train(Mine, model=folder + "/model", data=rows,
                  reward=reward, num_steps=2, lr=1e-3, num_prompts=2, group_size=2, max_response_tokens=4,
                  runs_dir=folder + "/runs", name="script", config={"data.max_prompt_tokens": 16})
assert run.finished, run
print("mine", run.metrics[-1]["mine/step"])
"""


@pytest.mark.timeout(240)
def test_a_script_with_a_recipe_and_a_reward_of_its_own_runs_on_ray(tmp_path: Path):
    make_tiny_model(tmp_path / "model")
    (tmp_path / "script.py").write_text(SCRIPT)
    program = "import runpy; runpy.run_path('script.py', run_name='__main__')"
    done = run_forked("-c", program, str(tmp_path), cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "mine 2.0"


def test_a_display_of_the_callers_is_used(train):
    assert train(num_steps=1, display=Silent()).finished


def test_what_a_run_has_trained_is_the_model_of_the_next_one(train, tmp_path):
    """Sft, dpo, then grpo, and no folder is named."""
    shown = [{"prompt": row["prompt"], "completion": row["answer"]} for row in ROWS]
    pairs = [{"prompt": row["prompt"], "chosen": row["answer"], "rejected": f"{row['answer']}1"} for row in ROWS]
    config = {"cluster.runtime": "inline", "data.max_row_tokens": 16, "data.num_examples": 8}
    usual = {"num_steps": 1, "lr": 1e-3, "runs_dir": tmp_path / "runs", "display": False, "config": config}
    tuned = rally.train("sft", model=tmp_path / "model", data=shown, name="tuned", **usual)
    preferring = rally.train("dpo", model=tuned, data=pairs, name="preferring", **usual)
    sampled = train(model=preferring, name="sampled", num_steps=1)
    for before, after in ((tuned, preferring), (preferring, sampled)):
        assert str(after.config.model.path) == str(before.checkpoints[1])
