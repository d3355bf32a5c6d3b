"""Rollouts that their engine fails on are counted and left out of the batch; none of them becomes an empty answer."""

import dataclasses
import itertools
import re

import pytest
from metrics_file import read_metrics

from rallypoint.errors import GenerationError
from rallypoint.roles import rollout as role
from rallypoint.roles.engines import make_engine
from rallypoint.run.rollouts import read_rollouts

INLINE = ("cluster.runtime=inline", "cluster.pools={main: [1]}", "trainer.num_steps=3")


@pytest.fixture
def failing(monkeypatch):
    """Return a function that has one of so many requests of our own engine fail, and a list of which steps did so."""

    def fail(one_in):
        ended = itertools.count(1)

        def make(*args):
            engine = make_engine(*args)
            step = engine.step

            def failing_step():
                return [
                    output
                    if output.finish_reason is None or next(ended) % one_in
                    else dataclasses.replace(
                        output,
                        finish_reason="failed",
                        error=GenerationError("nonsense came"),
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
