"""A reward model in place of a reward function, and beside one; on every kind of mesh; and folders that are none."""

import json

import pytest
import safetensors.torch
from metrics_file import read_metrics
from tiny_models import make_tiny_reward_model

from rallypoint.config import load_config
from rallypoint.errors import ModelError, RewardError
from rallypoint.prepare.plan import make_plan
from rallypoint.recipes.ending import summarise
from rallypoint.recipes.evaluation import evaluate
from rallypoint.recipes.use import Asked, find_trained

pytestmark = pytest.mark.lasting_ray

INLINE = ("cluster.runtime=inline", "cluster.pools={main: [1]}")
ALONE = ("recipe=grpo", "advantage.token_discount=null", "reward.function=null")


@pytest.fixture
def scorer(tmp_path):
    return make_tiny_reward_model(tmp_path / "scorer")


def steps_of(run):
    return [record for record in read_metrics(run.metrics) if "reward/mean" in record]


def test_a_policy_learns_what_a_reward_model_prefers(runs, scorer):
    fast = (
        "actor={num_mini_batches: 2, entropy_coef: 0, optimizer: {lr: 1e-2, schedule: constant, warmup_ratio: 0}}",
        "rollout.group_size=8",
        "kl=null",
        "trainer.num_steps=14",
    )
    run = runs.run("sevens", *ALONE, f"reward.path={scorer}", *fast, *INLINE)
    steps = steps_of(run)
    scores = [record["reward/model_mean"] for record in steps]
    assert sum(scores[-3:]) > 2 * sum(scores[:3])
    for record in steps:
        assert record["reward/mean"] == pytest.approx(record["reward/model_mean"])
        assert record["reward/model_min"] <= record["reward/model_mean"] <= record["reward/model_max"]
        assert record["reward/failed"] == 0
    validated = [r["validation/score"] for r in read_metrics(run.metrics) if "validation/score" in r]
    assert validated[-1] > validated[0]
    # Nothing of it is state of the run.
    assert not any("reward" in path.name for path in max(run.checkpoints.iterdir()).rglob("*"))
    config = load_config(str(run.path)).config
    assert "rally eval" not in str(summarise(run, config))
    assert [memory.role for memory in make_plan(config).memory] == ["actor", "rollout", "reward"]
    with pytest.raises(RewardError, match="has a reward model, which is asked in training only, and no function"):
        evaluate(
            find_trained(str(run.path)),
            [str(run.data / "validation.parquet")],
            reward=None,
            asked=Asked(),
            max_prompts=None,
            say=pytest.fail,
        )


@pytest.mark.parametrize("recipe", ["ppo", "grpo"])
def test_a_models_score_is_added_to_the_functions(runs, scorer, recipe):
    one = (f"recipe={recipe}", "trainer.num_steps=1", *INLINE)
    (without,) = steps_of(runs.run("without", *one))
    (both,) = steps_of(runs.run("both", *one, f"reward.path={scorer}"))
    assert both["rollout/num_tokens"] == without["rollout/num_tokens"]
    added = both["reward/mean"] - without["reward/mean"]
    assert added == pytest.approx(both["reward/model_mean"], abs=1e-6)
    assert both["reward/model_mean"] > 0


def test_several_models_beside_functions_are_weighed_normalised_apart_and_measured_by_name(runs, tmp_path):
    models = [
        f"{{name: {name}, path: {make_tiny_reward_model(tmp_path / name, likes=likes)}, weight: {weight}}}"
        for name, likes, weight in (("sevens", "7", 0.5), ("threes", "3", 2.0))
    ]
    run = runs.run(
        "several",
        *("recipe=grpo", "advantage={name: gdpo}", f"reward.models=[{', '.join(models)}]"),
        *("reward.function=null", "reward.functions=[{name: right, function: digits}]", "trainer.num_steps=2"),
        *("cluster.runtime=inline", "cluster.pools={main: [1], scorers: [2]}", "reward.placement.pool=scorers"),
    )
    for record in steps_of(run):
        parts = [record[f"reward/{name}/mean"] for name in ("right", "sevens", "threes")]
        assert record["reward/mean"] == pytest.approx(parts[0] + 0.5 * parts[1] + 2 * parts[2], abs=1e-5)
        assert 0 < record["reward/sevens/mean"] != record["reward/threes/mean"] > 0
        assert record["reward/threes/std"] > 0
        assert "reward/model_mean" not in record


THREADS = ("cluster.runtime=inline", "cluster.pools={main: [1], scorers: [2]}", "reward.placement.pool=scorers")
PROCESSES = ("cluster.runtime=ray", "cluster.pools={main: [2]}")


@pytest.mark.parametrize(
    ("where", "mesh"), [(THREADS, "{}"), (THREADS, "{tp: 2}"), (THREADS, "{sp: 2}"), (PROCESSES, "{dp_shard: 2}")]
)
def test_scores_do_not_depend_on_the_mesh_of_the_reward_model(runs, tmp_path, where, mesh):
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    path = f"reward.path={make_tiny_reward_model(tmp_path / 'scorer', **heads)}"
    one = (*ALONE, path, "trainer.num_steps=1")
    (alone,) = steps_of(runs.run("alone", *one, *INLINE))
    (found,) = steps_of(runs.run("split", *one, *where, f"reward.mesh={mesh}"))
    for name in ("mean", "min", "max"):
        assert found[f"reward/model_{name}"] == pytest.approx(alone[f"reward/model_{name}"], rel=1e-5, abs=1e-5)
    if where is PROCESSES:  # here the process of the tests itself was larger before
        assert found["reward/memory_gib"] > 0


def test_a_folder_that_is_no_reward_model_is_refused_before_any_step(runs, tmp_path):
    two = make_tiny_reward_model(tmp_path / "two", num_labels=2)
    with pytest.raises(ModelError, match="two: a classifier with 2 labels, expected a reward model"):
        runs.run("refused", *ALONE, f"reward.path={two}", *INLINE)


def test_a_folder_without_a_head_is_refused_before_anything_is_started(runs, scorer, tmp_path):
    file = tmp_path / "scorer" / "model.safetensors"
    weights = safetensors.torch.load_file(file)
    del weights["score.weight"]
    safetensors.torch.save_file(weights, file, metadata={"format": "pt"})
    keys = (*ALONE, f"reward.path={scorer}", "cluster.runtime=inline", "cluster.pools={main: [2]}")
    process = runs.start("train", "digits", *runs.overrides("headless", *keys))
    said, _ = process.communicate(timeout=100)
    assert process.returncode == 2, said
    assert said.count("missing score.weight") == 1, said
    assert "Traceback" not in said
    assert not (runs.folder / "headless").exists()


def test_a_run_with_a_reward_model_that_is_stopped_and_resumed_ends_with_the_same_weights(runs, weights_of, scorer):
    keys = (*ALONE, f"reward.path={scorer}", *INLINE)
    stopped = runs.run("stopped", *keys, "checkpoint={every_steps: 2, keep: 9}")
    whole = weights_of(stopped)
    newest = max(stopped.checkpoints.iterdir())
    assert newest.name == "step_000004"
    for path in sorted(newest.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    newest.rmdir()
    resumed = runs.resume("stopped")
    assert weights_of(resumed) == whole
    assert json.loads((max(resumed.checkpoints.iterdir()) / "training" / "state.json").read_text())["step"] == 4
