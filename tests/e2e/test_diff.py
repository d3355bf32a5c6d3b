"""`rally diff` names the place of a planted difference: the step, the rollout, and what differs there."""

import json

import pytest
from tiny_models import edit_weights, make_tiny_model
from tiny_runs import Runs
from typer.testing import CliRunner

from rallypoint.cli.main import app
from rallypoint.run.comparison import compare_runs

REWARD = """
def plain(data_source, solution_str, ground_truth, extra_info=None):
    return len(solution_str) % 3 / 3

def once(data_source, solution_str, ground_truth, extra_info=None):
    return plain(data_source, solution_str, ground_truth) + (ground_truth == "11")
"""
INLINE = ("cluster.runtime=inline", "cluster.pools={main: [1]}", "reward.num_processes=1")


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """A model, data of 24 prompts of which each step takes 8, and rewards."""
    folder = tmp_path_factory.mktemp("own")
    make_tiny_model(folder / "model")
    (folder / "rewards.py").write_text(REWARD)
    rows = [{"prompt": f"{n:02}", "ground_truth": str(n)} for n in range(24)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def start(runs, own, name, *more, data="train.jsonl", function="plain", model="model"):
    keys = (
        f"model.path={own / model}",
        f"data.train={own / data}",
        f"reward.function={own / 'rewards.py'}:{function}",
        "data.max_prompt_tokens=8",
        "data.shuffle=false",
        "trainer.num_steps=2",
    )
    tiny = [o for o in runs.overrides(name, "recipe=grpo") if not o.startswith(("model.create", "data.generate"))]
    return runs.run_with("grpo", [*tiny, *keys, *INLINE, *more]).path


@pytest.fixture(scope="module")
def first(tmp_path_factory, own):
    return start(Runs(tmp_path_factory.mktemp("runs")), own, "first")


def compared(first, other):
    found = compare_runs(first, other)
    return found, "" if found.first is None else f"{found.first.step} {found.first.what}"


def test_the_same_run_again_is_equal_and_a_resumed_one_is(runs, own, first):
    flat = "actor.optimizer.warmup_ratio=0"  # a schedule follows trainer.num_steps
    again = start(runs, own, "again", "trainer.num_steps=1", flat, "checkpoint.every_steps=1")
    found, _ = compared(first, start(runs, own, "other", "checkpoint.every_steps=1"))
    assert (found.first, found.config, found.num_compared) == (None, [], 2)
    assert {one.key for one in found.free} == {"trainer.name", "trainer.runs_dir", "checkpoint.every_steps"}
    runs.resume("again", "trainer.num_steps=2")
    whole = start(runs, own, "whole", flat)
    found, _ = compared(again, whole)
    assert (found.first, found.num_compared) == (None, 2), "a resume goes on with the same bits"
    result = CliRunner().invoke(app, ["diff", str(again), str(whole)])
    assert (result.exit_code, result.stdout.splitlines()[-1]) == (0, "equal in the 2 steps that both have done")


PLANTS = {
    "another seed": ({}, ("seed=1",), "1 tokens"),
    "another order": ({}, ("data.shuffle=true",), "1 prompts"),
    "another temperature": ({}, ("rollout.temperature=1.5",), "1 tokens"),
    "a row that was changed": ({"data": "changed.jsonl"}, (), "2 prompts"),
    "a reward that differs once": ({"function": "once"}, (), "2 scores"),
    "another advantage": ({}, ("advantage.whiten=true",), "1 advantages"),
    "another cap of micro-batches": ({}, ("engine.max_tokens_per_micro_batch=32",), "1 actor/grad_norm"),
    "another learning rate": ({}, ("actor.optimizer.lr=4e-3",), "1 actor/grad_norm"),
    "another number of epochs": ({}, ("actor.num_epochs=2",), "1 actor/grad_norm"),
    "a bit of the model": ({"model": "flipped"}, (), "0 published weights"),
}
ONE_UPDATE = "actor.num_mini_batches=1"


def test_weights_that_part_where_all_before_is_equal_are_named_where_they_are_published(runs, own):
    """With one update a step, its gradients do not depend on its learning rate, but what is published does."""
    one = start(runs, own, "one", ONE_UPDATE, "actor.optimizer.warmup_ratio=0")
    other = start(runs, own, "other", ONE_UPDATE, "actor.optimizer={lr: 4e-3, warmup_ratio: 0}")
    found, where = compared(one, other)
    assert where == "1 published weights", found
    said = CliRunner().invoke(app, ["diff", str(one), str(other)])
    assert said.exit_code == 1
    assert "first difference: step 1, published weights" in said.stdout


@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_difference_is_named_at_its_step_and_place(runs, own, first, plant):
    if plant == "a row that was changed":
        text = (own / "train.jsonl").read_text()
        (own / "changed.jsonl").write_text(text.replace('"prompt": "11"', '"prompt": "19"'))
    if plant == "a bit of the model":
        make_tiny_model(own / "flipped")
        edit_weights(own / "flipped", lambda weights: next(iter(weights.values())).view(-1)[0].mul_(1 + 2**-20))
    given, more, place = PLANTS[plant]
    other = start(runs, own, "other", *more, **given)
    found, where = compared(first, other)
    if plant == "another cap of micro-batches" and where == "1 actor/loss":
        place = where  # sums of other parts round otherwise: with some builds of torch the loss does, too
    assert where == place, (where, found)
    said = CliRunner().invoke(app, ["diff", str(first), str(other)])
    assert said.exit_code == 1
    step, what = place.split(maxsplit=1)
    assert f"first difference: step {step}, {what}" in said.stdout
    if what == "scores":
        assert "prompt train.jsonl:12 (11), sample 0, score" in said.stdout, said.stdout
    if what == "prompts" and step == "2":
        assert "prompt train.jsonl:12 (11), sample 0, prompt_ids" in said.stdout, said.stdout
        assert "'11'  |  '19'" in said.stdout
    if what == "tokens":
        assert " with logprob -" in said.stdout
        assert " by the trainer" in said.stdout
