"""`rally replay` computes a recorded step again, to the bit, and says by rollout and token what a change would do."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tiny_runs import Runs
from typer.testing import CliRunner

from rallypoint.cli.main import app
from rallypoint.recipes.replay import Replay
from rallypoint.run.folder import RunFolder

REWARD = """
def plain(data_source, solution_str, ground_truth, extra_info=None):
    return len(solution_str) % 3 / 3

def other(data_source, solution_str, ground_truth, extra_info=None):
    return plain(data_source, solution_str, ground_truth) + len(solution_str) % 2
"""
INLINE = ("cluster.runtime=inline", "cluster.pools={main: [1], own: [1]}", "rollout.placement.pool=own")
KEPT = ("trainer.num_steps=3", "checkpoint={every_steps: 1, keep: 9}")
CASES = {
    "ppo": ("digits", ()),
    "grpo": (
        "digits-grpo",
        ("recipe=grpo", "rollout.dynamic_sampling=4", "advantage={name: grpo, token_discount: null}"),
    ),
    "ahead": ("digits-grpo", ("recipe=grpo", "rollout.max_staleness=1", "actor.num_epochs=2", "rollout.top_k=5")),
}


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """Return a function that returns the run of a case, made once."""
    folder, made = tmp_path_factory.mktemp("replay"), {}
    (folder / "rewards.py").write_text(REWARD)

    def run(case):
        if case not in made:
            recipe, keys = CASES[case]
            reward = f"reward.function={folder / 'rewards.py'}:plain"
            made[case] = Runs(folder).run(case, *keys, *INLINE, *KEPT, reward, recipe=recipe)
        return made[case]

    return run


def replayed(run, *more, step=3):
    return CliRunner().invoke(app, ["replay", str(run.path), "--step", str(step), *more])


def tree(run):
    return {str(path): path.stat().st_mtime_ns for path in run.path.rglob("*") if path.name != "__pycache__"}


@pytest.mark.parametrize("case", CASES)
def test_a_step_is_computed_again_to_the_bit_and_the_run_stays_as_it_is(ran, case):
    run = ran(case)
    before = tree(run)
    said = replayed(run)
    assert said.exit_code == 0, said.output
    assert "from the checkpoint of step 2" in said.stdout
    assert said.stdout.splitlines()[-1].startswith("equal: prompts, tokens, logprobs, scores, advantages, loss")
    assert said.stdout.splitlines()[-1].endswith("weights")
    assert tree(run) == before
    assert [path.name for path in run.path.parent.glob(".*partial")] == []


def test_without_checkpoints_before_it_a_step_is_computed_from_the_initial_weights(ran):
    run = ran("grpo")
    aside = run.checkpoints.rename(run.path / "aside")
    try:
        run.checkpoints.mkdir()
        said = replayed(run, step=2)
        assert said.exit_code == 0, said.output
        assert "step 2 again, from the initial weights" in said.stdout
        assert "weights are not compared" in said.stdout
    finally:
        run.checkpoints.rmdir()
        aside.rename(run.checkpoints)


def test_a_record_or_a_key_that_was_changed_is_found_where_it_first_shows(ran):
    run = ran("grpo")
    found = Replay.of(run.path, 3).compute(["actor.optimizer.lr=1e-3"])
    assert (found.comparison.first.step, found.comparison.first.what) == (3, "actor/grad_norm"), "of two mini-batches"
    assert [one.key for one in found.comparison.config] == ["actor.optimizer.lr"]
    file = run.path / "rollouts" / "step_000003.parquet"
    kept, rows = file.read_bytes(), pq.read_table(file)
    ids = rows["response_ids"].to_pylist()
    ids[5][0] ^= 1
    column = pa.array(ids, rows["response_ids"].type)
    try:
        pq.write_table(rows.set_column(rows.schema.get_field_index("response_ids"), "response_ids", column), file)
        said = replayed(run)
        assert said.exit_code == 1
        assert "different: step 3, tokens" in said.stdout
    finally:
        file.write_bytes(kept)


def test_another_reward_shows_by_rollout_and_token_what_would_have_been_different(ran):
    run = ran("grpo")
    other = f"reward.function={run.path.parent / 'rewards.py'}:other"
    said = replayed(run, "--set", other, "--full")
    assert said.exit_code == 0, said.output
    base, found = Replay.of(run.path, 3).compute(), Replay.of(run.path, 3).compute([other], is_rescored=True)
    for old, new in zip(base.rows, found.rows, strict=True):
        assert new["score"] == pytest.approx(old["score"] + len(old["response"]) % 2)
        assert f"score {old['score']:.4f} -> {new['score']:.4f}" in said.stdout or old["score"] == new["score"]
    assert base.logprobs != found.logprobs
    assert "advantage" in said.stdout
    assert "logprob after the step" in said.stdout


def test_another_loss_leaves_scores_and_advantages_and_moves_other_tokens(ran):
    run = ran("ahead")
    base = Replay.of(run.path, 3).compute()
    found = Replay.of(run.path, 3).compute(["loss={name: dppo}"])
    assert [row["advantages"] for row in base.rows] == [row["advantages"] for row in found.rows]
    assert base.done.metrics["actor/loss"] != found.done.metrics["actor/loss"]
    assert base.logprobs != found.logprobs
    assert found.comparison.first.what.startswith("actor/")


@pytest.mark.parametrize(
    ("more", "step", "words"),
    [
        ((), 9, ("expected a step that it has done, 1 to 3", "--step 9")),
        (("--set", "actor.optimizer.lrr=1"), 3, ("actor.optimizer.lrr",)),
        (("--set", "seed=5"), 3, ("seed",)),
    ],
)
def test_what_cannot_be_computed_again_is_refused_with_what_was_expected(ran, more, step, words):
    said = replayed(ran("grpo"), *more, step=step)
    assert said.exit_code != 0
    assert all(word in str(said.exception) for word in words), said.exception


def test_a_step_whose_rollouts_were_not_kept_is_refused(ran):
    run = ran("grpo")
    file = run.path / "rollouts" / "step_000003.parquet"
    aside = file.rename(file.with_suffix(".aside"))
    try:
        said = replayed(RunFolder(run.path))
        assert "rollouts/ has none of step 3" in str(said.exception)
    finally:
        aside.rename(file)
