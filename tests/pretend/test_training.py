"""Whole runs on the pretend device."""

import pytest

from rallypoint.observability import read_metrics

INLINE = ("cluster.runtime=inline", "cluster.pools={main: [1]}")


@pytest.mark.parametrize("recipe", ["ppo", "grpo"])
def test_a_run_ends_with_every_step_done(runs, pretend, recipe):
    run = runs.run("run", *INLINE, "cluster.device=pretend", f"recipe={recipe}")
    steps = [record for record in read_metrics(run.metrics) if "reward/mean" in record]
    assert len(steps) == 4
    assert pretend.peak() > 0
