"""The shipped recipes learn what they promise; minutes, so they run by `make test-slow` only."""

import pytest
from metrics_file import read_metrics

from rallypoint.display import Silent
from rallypoint.prepare.preflight import load_checked
from rallypoint.recipes.loop import train
from rallypoint.run.folder import create_run


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("recipe", ["digits", "digits-grpo"])
def test_a_model_learns_to_sort_from_random_weights(tmp_path, recipe, seed):
    check_that_it_learns(recipe, f"seed={seed}", f"trainer.runs_dir={tmp_path}")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "glm4_moe"])
def test_a_mixture_of_experts_learns_to_sort_from_random_weights(tmp_path, family):
    check_that_it_learns("digits-grpo", f"model.create.architecture={family}", f"trainer.runs_dir={tmp_path}")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3_5_moe_text"])
def test_a_hybrid_learns_to_sort_from_random_weights(tmp_path, family):
    check_that_it_learns("digits-grpo", f"model.create.architecture={family}", f"trainer.runs_dir={tmp_path}")


def check_that_it_learns(recipe, *overrides):
    loaded = load_checked(recipe, overrides)
    run = create_run(loaded)
    assert train(loaded, run, Silent(), resume=False)
    scores = [record["validation/score"] for record in read_metrics(run.metrics) if "validation/score" in record]
    assert scores[0] < 0.2
    assert scores[-1] >= 0.9
