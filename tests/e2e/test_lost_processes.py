"""A run on Ray whose worker processes are killed goes on by itself, to the weights of one that nobody touched."""

import os
import signal
from pathlib import Path

import pytest
from tiny_models import make_tiny_reward_model
from tiny_runs import Runs

from rallypoint.display import Progress
from rallypoint.journal import (
    BatchTaken,
    GroupScored,
    Resumed,
    RoleLost,
    RolesRestarted,
    RolesStarted,
    Said,
    StepDone,
    read_journal,
)
from rallypoint.prepare.preflight import load_checked
from rallypoint.recipes.loop import train
from rallypoint.run.folder import create_run

pytestmark = pytest.mark.lasting_ray

OWN_REWARD = Path(__file__).parents[1] / "shared" / "own_reward.py"
"""Its processes are the driver's, and outlive the roles, or are made again with them."""
LONG = (
    "trainer.num_steps=6",
    "checkpoint.every_steps=4",
    "rollout.exact=true",
    f"reward.function={OWN_REWARD}:score",
    "reward.num_processes=1",
)
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


def sampling(step):
    """In the middle of a step's sampling: its first group is scored."""
    return lambda event: isinstance(event, GroupScored) and event.validation is None and event.prompt // 8 == step - 1


def done(step):
    """Between two steps."""
    return lambda event: isinstance(event, StepDone) and event.step == step


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
    plan = [("actor", 0, begun(3)), ("critic", 0, begun(5))]
    run, losses = run_killed(runs, "killed", *LONG, *APART, plan=plan)
    assert weights_of(run) == weights_of(whole)
    assert [type(one) for one in losses] == [RoleLost, RolesRestarted] * 2
    assert [(one.rank, one.step) for one in losses[::2]] == [(0, 3), (0, 5)]
    assert losses[1].first in (1, 2), "from a snapshot, as often as they are due"
    assert losses[3].first == 4, "from a checkpoint"
    assert losses[1].processes.keys() == {"actor", "critic", "reference", "rollout"}
    assert not run.snapshots.exists(), "they are of no use to a run that is done"
    events = [entry.event for entry in read_journal(run.journal)]
    resumed = [event for event in events if isinstance(event, Resumed)]
    assert [set(range(8 * step - 8, 8 * step)) <= {*one.kept} for one, step in zip(resumed, (3, 5), strict=True)] == [
        True,
        True,
    ]
    said = [event.text for event in events if isinstance(event, Said)]
    assert not any("sampled again" in text for text in said), "nothing of what was finished"
    assert sorted(run.state().steps) == [1, 2, 3, 4, 5, 6]


def test_roles_of_a_process_without_one_that_trains_are_killed_and_the_step_goes_on(runs, weights_of, whole):
    plan = [("reference", 0, begun(3)), ("rollout", 0, sampling(5))]
    run, losses = run_killed(runs, "killed", *LONG, *APART, "rollout.max_batch_rows=4", plan=plan)
    assert weights_of(run) == weights_of(whole)
    assert [type(one) for one in losses] == [RoleLost, RolesRestarted] * 2
    assert [(one.rank, one.step) for one in losses[::2]] == [(0, 3), (0, 5)]
    assert {one.role for one in losses[::2]} <= {"reference", "rollout"}, "whichever of the process was called first"
    assert [one.first for one in losses[1::2]] == [None] * 2, "no step is done again"
    assert all(one.processes.keys() == {"rollout", "reference"} for one in losses[1::2]), "those that share a process"
    assert len(run.state().attempts) == 1


def test_a_rank_is_killed_while_it_samples_and_while_it_is_published_to_where_logits_depend_on_the_batch(
    runs, weights_of
):
    inexact = (*LONG, *APART[:2], "rollout.exact=false", "rollout.max_batch_rows=4")
    whole = runs.run("whole", *inexact, "cluster.runtime=inline")
    plan = [("rollout", 0, sampling(2)), ("rollout", 0, begun(3)), ("rollout", 0, done(4))]  # a validation follows
    run, losses = run_killed(runs, "killed", *inexact, plan=plan)
    assert weights_of(run) == weights_of(whole)
    assert [(one.role, one.step) for one in losses[::2]] == [("rollout", 2), ("rollout", 3), ("rollout", None)]
    assert [one.first for one in losses[1::2]] == [None] * 3, "no step is done again"
    assert [list(one.processes) for one in losses[1::2]] == [["rollout"]] * 3


def test_the_process_of_a_reward_model_is_killed_and_the_trainer_only_waits(runs, weights_of, tmp_path):
    scorer = make_tiny_reward_model(tmp_path / "scorer")
    judged = ("recipe=grpo", "advantage.token_discount=null", "reward.function=null", f"reward.path={scorer}")
    judged = (*judged, APART[0], "reward.placement.pool=side", "trainer.num_steps=2")
    whole = runs.run("whole", *judged, "cluster.runtime=inline")
    run, losses = run_killed(runs, "killed", *judged, plan=[("reward", 0, sampling(2))])
    assert weights_of(run) == weights_of(whole)
    assert [(one.role, one.step) for one in losses[::2]] == [("reward", 2)]
    assert [(one.first, [*one.processes]) for one in losses[1::2]] == [(None, ["reward"])]


@pytest.mark.slow  # a reward model's is lost and found in the same way
def test_the_process_of_a_teacher_is_killed_and_the_trainer_only_waits(runs, weights_of, whole):
    teacher = max(whole.checkpoints.iterdir())
    judged = ("recipe=opd", "reward.function=null", f"teacher.path={teacher}")
    judged = (*judged, APART[0], "teacher.placement.pool=side", "teacher.loss=forward", "trainer.num_steps=3")
    untouched = runs.run("untouched", *judged, "cluster.runtime=inline")
    plan = [("teacher", 0, begun(2)), ("teacher", 0, sampling(3))]
    run, losses = run_killed(runs, "killed", *judged, plan=plan)
    assert weights_of(run) == weights_of(untouched)
    assert [(one.role, one.step) for one in losses[::2]] == [("teacher", 2), ("teacher", 3)]
    assert [(one.first, [*one.processes]) for one in losses[1::2]] == [(None, ["teacher"])] * 2
