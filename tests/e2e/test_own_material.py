"""The user's own model, data and reward function: three keys, and nothing of ours touched."""

import json
import shutil
import signal

import pytest
import safetensors.torch
import torch
import yaml
from metrics_file import read_metrics
from tiny_models import make_tiny_model
from tiny_runs import Runs
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer

from rallypoint import load_run
from rallypoint.errors import RewardError

INLINE = ("cluster.runtime=inline", "cluster.pools={main: [1]}", "reward.num_processes=1")

REWARDS = """
import math
import re

def half(data_source, solution_str, ground_truth, extra_info=None):
    return sum(a == b for a, b in zip(solution_str, ground_truth)) / 3

def with_numbers(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(solution_str == ground_truth), "length": len(solution_str)}

def a_token(data_source, solution_str, ground_truth, extra_info=None):
    tokens = re.findall(r"<[a-z]+>|.", solution_str)
    return [float(a == b) for a, b in zip(tokens, ground_truth.ljust(len(tokens)))]

def picky(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str[:1] in "01234":
        raise KeyError("cannot read this")
    return math.nan if solution_str[:1] in "56" else 1.0

def usual(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str.split("####")[1].strip() == ground_truth)

def broken(data_source, solution_str, ground_truth, extra_info=None):
    raise RuntimeError("the grader is offline")
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The folder of a model that a run has made."""
    return Runs(tmp_path_factory.mktemp("made")).run("made", "trainer.num_steps=1", *INLINE[:2]).path / "model"


@pytest.fixture
def own(tmp_path, runs, model):
    """A folder as a user has it: a jsonl file, a reward file; and a model."""
    rows = [
        {
            "prompt": [{"role": "user", "content": f"{n:02}"}],
            "reward_model": {"ground_truth": "".join(sorted(f"{n:03}"))},
        }
        for n in range(0, 1000, 7)
    ]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "rewards.py").write_text(REWARDS)

    def run(name, function, *more, recipe="ppo"):
        keys = (
            f"model.path={model}",
            f"data.train={tmp_path / 'train.jsonl'}",
            f"reward.function={tmp_path / 'rewards.py'}:{function}",
            "data.max_prompt_tokens=5",
        )
        tiny = [
            o for o in runs.overrides(name, f"recipe={recipe}") if not o.startswith(("model.create", "data.generate"))
        ]
        return runs.run_with(recipe, [*tiny, *keys, *INLINE, *more])

    return run


@pytest.mark.parametrize(
    ("recipe", "function"),
    [
        ("ppo", "half"),
        ("grpo", "with_numbers"),
        ("ppo", "a_token"),
        pytest.param("grpo", "half", marks=pytest.mark.slow),
        pytest.param("ppo", "with_numbers", marks=pytest.mark.slow),
        pytest.param("grpo", "a_token", marks=pytest.mark.slow),
    ],
)
def test_a_number_a_dict_and_a_list_of_scores_are_rewards(own, recipe, function):
    run = own("own", function, recipe=recipe)
    rewards = [record for record in read_metrics(run.metrics) if "reward/mean" in record]
    assert len(rewards) == 4
    assert all(record["reward/failed"] == 0 for record in rewards)
    assert ("reward/length" in rewards[0]) == (function == "with_numbers")


def test_a_checkpoint_opens_in_transformers_as_it_is(own):
    newest = max(own("own", "half").checkpoints.iterdir())
    assert AutoModelForCausalLM.from_pretrained(newest).config.num_hidden_layers == 1
    assert AutoModelForTokenClassification.from_pretrained(newest / "critic").config.num_labels == 1
    assert AutoTokenizer.from_pretrained(newest).chat_template


STILL = ("critic.optimizer.lr=1e-12", "trainer.num_steps=1")
"""Too little to move a weight, so that a critic is saved as it was read."""


def critic_of(run) -> dict:
    return safetensors.torch.load_file(max(run.checkpoints.iterdir()) / "critic" / "model.safetensors")


def test_a_critic_starts_from_a_checkpoint_of_its_own(own):
    before = own("before", "half")
    path = max(before.checkpoints.iterdir()) / "critic"
    found, expected = critic_of(own("own", "half", f"critic.path={path}", *STILL)), critic_of(before)
    assert found.keys() == expected.keys()
    assert all(torch.allclose(found[name], wanted, rtol=0, atol=1e-9) for name, wanted in expected.items())
    other = critic_of(own("other", "half", *STILL))  # from the initial policy, with a head of zeros
    assert other["score.weight"].abs().max() < 1e-9
    assert expected["score.weight"].abs().max() > 1e-3


def test_a_critic_of_another_shape_than_the_actor_learns_and_goes_on_from_its_checkpoint(own, runs, tmp_path):
    path = make_tiny_model(tmp_path / "critic", hidden_size=24, num_layers=2)
    keys = (f"critic.path={path}", "checkpoint={every_steps: 2, keep: 9}")
    run = own("wider", "half", *keys)
    whole = critic_of(run)
    assert whole["score.weight"].shape == (1, 24)
    assert whole["score.weight"].any()
    last = max(run.checkpoints.iterdir())
    last.rename(tmp_path / "last")
    resumed = critic_of(runs.resume("wider"))
    assert all(torch.equal(resumed[name], wanted) for name, wanted in whole.items())


def test_rollouts_that_the_reward_function_fails_on_are_left_out_and_named(own):
    run = own("own", "picky")
    records = [record for record in read_metrics(run.metrics) if "reward/mean" in record]
    assert all(record["reward/mean"] == 1.0 for record in records)
    assert sum(record["reward/failed"] for record in records) > 0
    log = (run.logs / "train.log").read_text()
    assert "train.jsonl:" in log
    assert "KeyError: 'cannot read this'" in log


@pytest.mark.parametrize(("fate", "said"), [("drop", "were dropped"), ("truncate", "were cut at their beginning")])
def test_long_prompts_are_left_out_or_cut_and_counted(own, fate, said):
    run = own("long", "half", "data.max_prompt_tokens=4", f"data.on_too_long={fate}", "trainer.num_steps=1")
    counts = read_metrics(run.metrics)[0]
    assert counts["data/num_dropped" if fate == "drop" else "data/num_truncated"] == 128
    assert counts["data/num_prompts"] == (15 if fate == "drop" else 143)
    assert f"128 prompts are longer than 4 tokens and {said}: train.jsonl:16" in (run.logs / "train.log").read_text()


def test_a_mixture_that_is_read_as_the_run_goes_goes_on_exactly_where_it_was_killed(own, runs, weights_of, tmp_path):
    more = [{"question": f"{n:02}", "answer": f"{n:03}"} for n in range(40)]
    (tmp_path / "more.jsonl").write_text("\n".join(map(json.dumps, more)))
    columns = "columns: {prompt: question, ground_truth: answer}"
    parts = (
        f"{{path: {tmp_path}/train.jsonl, weight: 3, stream_rows: 16}}, "
        f"{{path: {tmp_path}/more.jsonl, weight: 1, stream_rows: 16, {columns}}}"
    )
    run = own("stream", "half", f"data.train=[{parts}]", "checkpoint={every_steps: 1, keep: 9}")
    whole, records = weights_of(run), [one for one in read_metrics(run.metrics) if "reward/mean/more" in one]
    assert all(3 * one["rollout/num_prompts/more"] == one["rollout/num_prompts/train"] for one in records), records
    assert len(records) == 4
    for step in sorted(run.checkpoints.iterdir())[1:]:
        shutil.rmtree(step)
    assert weights_of(runs.resume("stream")) == whole


@pytest.mark.parametrize(("function", "raised"), [("broken", "the grader is offline"), ("usual", "IndexError")])
def test_a_run_of_which_most_rollouts_fail_ends_with_advice_and_the_whole_traceback(own, function, raised):
    with pytest.raises(RewardError, match=raised) as stopped:
        own("own", function)
    said = str(stopped.value)
    assert "rollouts more failed than rollout.max_failed=0.5 allows" in said
    assert "return 0 for it instead of raising" in said
    assert "Traceback (most recent call last):\n  File " in said


def test_a_killed_run_shows_the_time_of_its_start_in_its_prompts_also_when_it_goes_on(runs, tmp_path):
    model = make_tiny_model(tmp_path / "model", num_layers=1)
    template = tmp_path / "model" / "chat_template.jinja"
    template.write_text("{{- strftime_now('%H%M%S') -}}" + template.read_text())
    (tmp_path / "train.jsonl").write_text(
        "\n".join(json.dumps({"prompt": f"{n}", "ground_truth": ""}) for n in range(9))
    )
    (tmp_path / "rewards.py").write_text(REWARDS)
    tiny = [o for o in runs.overrides("clock", "recipe=grpo") if not o.startswith(("model.create", "data.generate"))]
    keys = (f"model.path={model}", f"data={{train: {tmp_path}/train.jsonl, max_prompt_tokens: 9}}", *INLINE)
    keys += (f"reward.function={tmp_path}/rewards.py:with_numbers", "checkpoint.every_steps=2")
    process = runs.start("train", "grpo", *tiny, *keys, kill_before="step_000004")
    process.communicate(timeout=120)
    assert process.returncode == -signal.SIGKILL
    run = runs.resume("clock")
    moment = yaml.safe_load((run.path / "config.yaml").read_text())["data"]["template"]["strftime_now"]
    tokenizer = AutoTokenizer.from_pretrained(model)
    for step in range(1, 5):
        ids = load_run(run.path).rollouts(step)[0]["prompt_ids"]
        assert tokenizer.decode(ids).startswith(f"{moment[-8:].replace(':', '')}<user>"), step
