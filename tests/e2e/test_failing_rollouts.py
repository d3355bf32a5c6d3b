"""Rollouts that their engine fails on are counted and left out of the batch; none of them becomes an empty answer."""

import dataclasses
import itertools
import math
import re

import pytest
from metrics_file import read_metrics

from rallypoint.errors import DivergedError, GenerationError, NotFiniteError
from rallypoint.journal import RunBegan, read_journal
from rallypoint.roles import rollout as role
from rallypoint.roles.engines import make_engine
from rallypoint.run.folder import RunFolder
from rallypoint.run.rollouts import read_rollouts

INLINE = ("cluster.runtime=inline", "cluster.pools={main: [1]}", "trainer.num_steps=3")
NONSENSE = GenerationError("nonsense came")


@pytest.fixture
def failing(monkeypatch):
    """Return a function that has one of so many requests of our own engine fail: of the first ones, or of all."""

    def fail(one_in, error=NONSENSE, first=math.inf):
        ended = itertools.count(1)

        def make(*args):
            engine = make_engine(*args)
            step = engine.step

            def failing_step():
                return [
                    output
                    if output.finish_reason is None or (number := next(ended)) % one_in or number > first
                    else dataclasses.replace(
                        output,
                        finish_reason="failed",
                        error=error,
                        tokens=(),
                        logprobs=(),
                        sampled_logprobs=(),
                    )
                    for output in step()
                ]

            engine.step = failing_step
            return engine

        # No engine of this process fails by itself on a part of its requests; a server does.
        monkeypatch.setattr(role, "make_engine", make)

    return fail


@pytest.mark.parametrize("recipe", [(), ("recipe=grpo",)], ids=["ppo", "grpo"])
def test_a_run_goes_on_without_rollouts_that_failed_and_counts_them(runs, failing, recipe):
    failing(7)
    run = runs.run("some", *INLINE, *recipe)
    steps = [record for record in read_metrics(run.metrics) if "reward/mean" in record]
    assert len(steps) == 3
    for number, record in enumerate(steps, 1):
        assert 4 <= record["rollout/failed"] <= 5
        rollouts = read_rollouts(run.path, number)
        assert len(rollouts) == 32 - record["rollout/failed"]
        assert all(rollout["response"] or rollout["finish_reason"] == "stop" for rollout in rollouts)
        mean = sum(rollout["score"] for rollout in rollouts) / len(rollouts)
        assert record["reward/mean"] == pytest.approx(mean, abs=1e-6)
    log = (run.logs / "train.log").read_text()
    assert re.search(r"left out: \d rollouts failed \(\d engine\), the first is .*: nonsense came", log)


def test_a_run_of_which_all_rollouts_fail_ends_with_the_reason(runs, failing):
    failing(1)
    with pytest.raises(GenerationError, match=r"than rollout.max_failed=0.5 allows(.*\n)*.*: nonsense came"):
        runs.run("none", *INLINE)


NAN = NotFiniteError("the logits are not finite for token 3")
BACK = ("cluster.runtime=inline", "cluster.pools={main: [1]}", "checkpoint.every_steps=1")


def test_a_run_goes_back_once_where_the_logits_of_most_rollouts_are_not_finite(runs, failing, weights_of):
    whole = runs.run("whole", *BACK)
    failing(1, NAN, first=20)  # all of the first validation, and four rollouts of the next one
    run = runs.run("wild", *BACK)
    assert weights_of(run) == weights_of(whole)
    assert [entry.event.first for entry in read_journal(run.journal) if isinstance(entry.event, RunBegan)] == [0, 0]
    failing(1, NAN)
    with pytest.raises(DivergedError, match=r"step 0: of 16 rollouts more failed .*, or all"):
        runs.run("always", *BACK)


def test_rollouts_whose_logits_are_not_finite_are_left_out_and_three_such_steps_in_a_row_end_the_run(runs, failing):
    failing(7, NAN)
    with pytest.raises(DivergedError, match=r"logits were not finite while .*, for the 3rd time in a row: lower actor"):
        runs.run("some", *BACK)
    run = RunFolder(runs.folder / "some")
    steps = [record for record in read_metrics(run.metrics) if "reward/mean" in record]
    assert [record["rollout/not_finite"] == record["rollout/failed"] >= 4 for record in steps] == [True] * 3
    assert [entry.event.first for entry in read_journal(run.journal) if isinstance(entry.event, RunBegan)] == [0, 0]
    text = (run.logs / "train.log").read_text()
    assert "logits were not finite while rollouts were sampled; 4 of them were left out" in text
