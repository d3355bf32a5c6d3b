"""A run on Ray whose worker processes are killed goes on by itself, to the weights of one that nobody touched."""

import os
import signal

import pytest
from tiny_runs import Runs

from rallypoint.display import Progress
from rallypoint.journal import BatchTaken, CheckpointSaved, RoleLost, RolesRestarted, RolesStarted
from rallypoint.prepare.preflight import load_checked
from rallypoint.recipes.loop import train
from rallypoint.run.folder import create_run

pytestmark = pytest.mark.lasting_ray

LONG = ("trainer.num_steps=6", "checkpoint.every_steps=4", "rollout.exact=true")
APART = ("cluster.pools={main: [1], side: [1]}", "rollout.placement.pool=side", "reference.placement.pool=side")


class Killer(Progress):
    """Kills the process of a rank, with SIGKILL, at the first event that a plan names; once for each of the plan."""

    def __init__(self, *plan):
        self.plan = list(plan)
        """Role, rank, and what says of an event that it is time."""
        self.processes = {}

    def take(self, entry):
        event = entry.event
        if isinstance(event, RolesStarted | RolesRestarted):
            self.processes |= event.processes
        if self.plan and self.processes and self.plan[0][2](event):
            role, rank, _ = self.plan.pop(0)
            os.kill(int(self.processes[role][rank].partition("@")[0]), signal.SIGKILL)


def begun(step):
    """When the batch of a step is there, so that its update begins."""
    return lambda event: isinstance(event, BatchTaken) and event.step == step


def saved(step):
    return lambda event: isinstance(event, CheckpointSaved) and event.step == step


def run_killed(runs, name, *overrides, plan, recipe="digits"):
    """Run to the end while processes are killed; return the run and what its journal has of that."""
    loaded_config, killer = load_checked(recipe, runs.overrides(name, *overrides)), Killer(*plan)
    run = create_run(loaded_config)
    assert train(loaded_config, run, killer, resume=False)
    assert not killer.plan, "all of the plan has happened"
    return run, run.state().losses


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nobody touched."""
    return Runs(tmp_path_factory.mktemp("whole")).run("whole", *LONG, "cluster.runtime=inline", *APART)


def test_roles_that_train_are_killed_and_the_run_goes_on_from_its_newest_step(runs, weights_of, whole):
    plan = [("actor", 0, begun(3)), ("critic", 0, saved(4))]
    run, losses = run_killed(runs, "killed", *LONG, *APART, plan=plan)
    assert weights_of(run) == weights_of(whole)
    assert [type(one) for one in losses] == [RoleLost, RolesRestarted] * 2
    assert [(one.rank, one.step) for one in losses[::2]] == [(0, 3), (0, 5)]
    assert losses[1].first in (1, 2), "from a snapshot, as often as they are due"
    assert losses[3].first == 4, "from a checkpoint"
    assert losses[1].processes.keys() == {"actor", "critic", "reference", "rollout"}
    assert not run.snapshots.exists(), "they are of no use to a run that is done"
    assert sorted(run.state().steps) == [1, 2, 3, 4, 5, 6]
