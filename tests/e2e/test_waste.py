"""`rally waste` counts what a run has wasted as its rollouts say, where each cause was planted."""

import pytest
from tiny_runs import Runs
from typer.testing import CliRunner

from rallypoint.cli.main import app
from rallypoint.display import Silent
from rallypoint.journal import read_journal
from rallypoint.prepare.preflight import load_checked
from rallypoint.recipes.ending import summarise
from rallypoint.recipes.loop import train
from rallypoint.run.folder import open_run
from rallypoint.run.rollouts import read_rollouts
from rallypoint.run.waste import account

REWARD = """
def some(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str.count("1") == 1:
        raise ValueError("planted")
    return 0.5 if int(ground_truth) % 2 else len(solution_str) % 3 / 3
"""
INLINE = ("recipe=grpo", "cluster.runtime=inline", "cluster.pools={main: [1]}", "rollout.max_failed=0.9")
PLAIN = "advantage={name: grpo, token_discount: null}"


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """Return a function that makes a run of two steps, whose second is done twice if asked."""
    folder = tmp_path_factory.mktemp("waste")
    (folder / "rewards.py").write_text(REWARD)

    def start(name, *more, again):
        keys = (f"reward.function={folder / 'rewards.py'}:some", "trainer.num_steps=2", "checkpoint.every_steps=1")
        run = Runs(folder).run(name, *INLINE, *keys, PLAIN, *more, recipe="digits-grpo")
        if again:
            loaded = load_checked(str(run.path), [])
            assert train(loaded, open_run(run.path), Silent(), resume=True, from_step=1)
        return run

    return start


def tokens(rows, which):
    return sum(sum(row["loss_mask"]) for row in rows if which(row))


def wasted(run):
    found = account(read_journal(run.journal))
    return found, {waste.cause: waste for waste in found.wastes}


def test_planted_causes_are_counted_to_the_token(started):
    run = started("replaced", "rollout.dynamic_sampling=8", again=True)
    found, wastes = wasted(run)
    rows = [row for step in (1, 2) for row in read_rollouts(run.path, step)]
    replaced = [row for row in rows if row["replaced"]]
    failed = [row for row in rows if row["failure"]]
    assert replaced
    assert failed
    assert wastes["replaced"].num == len({row["prompt_index"] for row in replaced})
    assert wastes["replaced"].tokens == tokens(replaced, bool)
    assert (wastes["failed"].num, wastes["failed"].tokens) == (len(failed), tokens(failed, bool))
    again = tokens(rows, lambda row: row["step"] == 2)
    assert (wastes["done again"].num, wastes["done again"].tokens) == (1, again)
    assert wastes["started again"].num == 1
    assert found.tokens == tokens(rows, bool) + again
    assert 0 < found.seconds_wasted < found.seconds


def test_groups_without_signal_are_counted_and_table_and_summary_say_so(started):
    run = started("kept", "actor.num_epochs=2", again=False)
    found, wastes = wasted(run)
    rows = [row for step in (1, 2) for row in read_rollouts(run.path, step)]
    assert wastes["without signal"].tokens == tokens(rows, lambda row: row["advantages"] and not any(row["advantages"]))
    said = CliRunner().invoke(app, ["waste", str(run.path)]).stdout
    assert f"{wastes['without signal'].tokens:,}" in said, said
    assert f"for nothing: {found.tokens_wasted / found.tokens:.1%} of tokens" in said
    assert summarise(run, load_checked(str(run.path), []).config).account == found
