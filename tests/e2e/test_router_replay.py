"""A run of a small mixture whose actor chooses the experts that rollouts were sampled with; the same bits again."""

import pytest
from tiny_runs import Runs
from typer.testing import CliRunner

from rallypoint.cli.main import app
from rallypoint.run.rollouts import read_rollouts

MIXTURE = (
    "recipe=grpo",
    "cluster={runtime: inline, pools: {main: [1], own: [1]}}",
    "rollout.placement.pool=own",
    "model.create.architecture=qwen3_moe",
    "model.create.initializer_range=0.3",
    "model.create.num_layers=2",
    "model.dtype=bfloat16",
    "trainer.num_steps=3",
    "checkpoint={every_steps: 1, keep: 9}",
    "checks.ratio_tolerance=10",
)


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """A run with router replay, and the folder that it is in."""
    runs = Runs(tmp_path_factory.mktemp("replay"))
    return runs, runs.run("with", *MIXTURE, "rollout.router_replay=true")


def test_rollouts_have_the_experts_of_every_token(ran):
    _, run = ran
    for row in read_rollouts(run.path, 1):
        num_tokens = len(row["prompt_ids"]) + len(row["response_ids"])
        assert len(row["experts"]) == num_tokens * 2 * 2
        assert 0 not in row["experts"][4:]


def test_a_step_is_computed_again_and_a_resumed_run_ends_with_the_same_bits(ran, weights_of):
    runs, run = ran
    said = CliRunner().invoke(app, ["replay", str(run.path), "--step", "3"])
    assert said.exit_code == 0, said.output
    assert said.stdout.splitlines()[-1].startswith("equal: prompts, tokens, logprobs, scores, advantages, loss")
    whole = weights_of(run)
    for later in sorted(run.checkpoints.iterdir())[1:]:
        later.rename(run.path / later.name)
    assert weights_of(runs.resume("with")) == whole
