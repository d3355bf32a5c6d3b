"""Failures on purpose: what may be named, what fires when, and that it does so once in a run."""

import asyncio

import pytest

from rallypoint.cluster import collect
from rallypoint.cluster.group import Layout, WorkerGroup, at_step
from rallypoint.cluster.inline import InlineRuntime
from rallypoint.cluster.pool import ResourcePool
from rallypoint.cluster.process import Invocation
from rallypoint.errors import ConfigError, FailpointError, WorkerError
from rallypoint.failpoints import NOTED, VARIABLE, Failpoints, arming, failing as failing_call, parse
from rallypoint.journal import NUMBERS_OF, Journal, Said, StepDone, read_journal


class Worker:
    def __init__(self, context):
        self.rank = context.rank

    @collect
    def work(self):
        return self.rank


def done(step):
    return StepDone(step=step, metrics={}, digests={})


@pytest.fixture
def said():
    """Lines for the user."""
    return []


@pytest.fixture
def failing(tmp_path, monkeypatch, said):
    """Arms what a text names."""

    def arm(text, *, inline=False):
        monkeypatch.setenv(VARIABLE, text)
        ranks = {"actor": 2, "rollout": 1}
        return arming(tmp_path, NUMBERS_OF, ranks, num_steps=9, inline=inline, say=said.append)

    return arm


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (
            "actor.train:explode",
            "expected it to end with how it fails, one of kill, term, stop, raise, hang, slow=SECONDS, disk",
        ),
        ("actor.train", "found ''"),
        ("actor.train:slow=often", "found 'slow=often'"),
        ("actor.train:step=last:kill", "expected conditions such as step=7, found 'step=last'"),
        ("StepsDone:kill", "there is no event 'StepsDone'; there are Launched, .*StepDone"),
        ("critic.train:kill", "the run has no role 'critic'; it has actor, rollout"),
        ("StepDone:rank=1:kill", "StepDone has no rank; conditions are step, n"),
        ("StepDone:n=0:kill", "expected each condition once, and n from 1; found n=0"),
        ("StepDone:step=1:step=2:kill", "expected each condition once, and n from 1; found step=1, step=2"),
        ("StepDone:step=10:kill", "StepDone:step=10:kill: the run has 9 steps"),
        ("actor.train:rank=2:kill", "actor.train:rank=2:kill: the run has 9 steps, and actor 2 ranks from 0"),
        ("actor.train:prompt=1:kill", "actor.train has no prompt; conditions are step, rank, n"),
    ],
)
def test_what_does_not_exist_is_refused_with_what_does(failing, text, found):
    with pytest.raises(ConfigError, match=found), failing(text):
        pass


def test_a_role_in_the_process_of_the_driver_cannot_be_killed_and_the_way_out_is_said(failing):
    with pytest.raises(ConfigError, match="inline a role's process is the driver itself; name an event instead"):
        failing("actor.train:kill", inline=True).__enter__()
    with failing("StepDone:kill; actor.train:raise", inline=True):
        pass


def test_what_is_to_come_is_said_at_the_beginning_and_what_never_came_at_the_end(failing, said, tmp_path):
    with failing("StepDone:step=2:disk_full; actor.train:raise"), Journal(tmp_path / "journal.jsonl") as journal:
        assert said == ["RALLY_FAIL: this run fails on purpose, at StepDone:step=2:disk_full; actor.train:raise"]
        journal.append(done(2))
    assert said[1:] == ["RALLY_FAIL: what never came: actor.train:raise"]
    with failing(""):
        assert not said[2:]


def test_an_event_fails_before_it_is_written_and_once_in_a_run(failing, tmp_path):
    for start in range(2):
        with failing("StepDone:step=2:disk_full; StepDone:n=3:raise"), Journal(tmp_path / "journal.jsonl") as journal:
            journal.append(done(1))
            if start == 0:
                journal.append(done(2))  # waits in memory until the next write
                with pytest.raises(FailpointError):
                    journal.append(done(3))
            journal.append(done(4), Said(text="after it"))
    kept = [entry.event for entry in read_journal(tmp_path / "journal.jsonl")]
    steps = [event.step for event in kept if isinstance(event, StepDone)]
    assert steps == [1, 2, 4, 1, 4]
    noted = (tmp_path / NOTED).read_text().splitlines()
    assert [line.partition(" ")[2] for line in noted] == ["StepDone:step=2:disk_full", "StepDone:n=3:raise"]


def test_a_call_fails_on_the_rank_and_at_the_step_that_is_named(tmp_path):
    points = Failpoints(parse("actor.work:step=3:rank=1:n=2:hang"), tmp_path / NOTED)
    calls = [(step, rank) for _ in range(3) for step in (2, 3) for rank in (0, 1)]
    due = [points.due("actor.work", Invocation(0, "actor", rank, "work", True, step)) for step, rank in calls]
    assert [place for place, how in enumerate(due) if how] == [7]


def test_an_invocation_takes_along_how_it_fails():
    call = Invocation(7, "the actor", 1, "train", answers=True, step=None, fails="slow=0.5")
    assert Invocation.unpacked(call.packed()) == call


def test_a_worker_fails_when_its_call_begins_and_a_method_that_it_has_not_is_refused(failing, tmp_path):
    async def main():
        runtime = InlineRuntime(log_folder=tmp_path)
        try:
            processes = await runtime.processes(ResourcePool((2,)))
            layout = Layout("actor", processes)
            with (
                failing("actor.wrok:raise"),
                pytest.raises(ConfigError, match=r"actor has no method 'wrok'; it has .*work"),
            ):
                await WorkerGroup.create(layout, Worker)
            with failing("actor.work:step=1:rank=1:raise; actor.work:n=3:slow=0.01"):
                group = await WorkerGroup.create(layout, Worker)
                assert await group.call(Worker.work) == [0, 1]
                with (
                    at_step(1),
                    pytest.raises(WorkerError, match=r"actor rank 1 .* failed in work at step 1 .* on purpose"),
                ):
                    await group.call(Worker.work)
                assert await group.call(Worker.work) == [0, 1]
        finally:
            await runtime.shutdown()

    asyncio.run(main())


def test_all_of_a_call_meets_a_full_disk_so_that_what_is_tolerated_is_tolerated(tmp_path):
    tolerated = False
    with failing_call("disk_full"):
        try:
            (tmp_path / "file").write_bytes(bytes(10))
        except OSError:
            tolerated = True
    assert tolerated
    (tmp_path / "file").write_bytes(bytes(10))
