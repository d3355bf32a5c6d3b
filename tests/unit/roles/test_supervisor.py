"""How often a run goes on after it has lost a process, and what of its roles is made again."""

import asyncio

import pytest

from rallypoint.cluster import broadcast
from rallypoint.cluster.inline import InlineRuntime
from rallypoint.config import load_config
from rallypoint.errors import WorkerDiedError
from rallypoint.journal import Journal, RoleLost, RolesRestarted, Said, StepDone, read_journal
from rallypoint.prepare.pools import pools_of
from rallypoint.roles.placement import Placement, SharedFolder
from rallypoint.roles.supervisor import Supervisor


def death(step, rank=0, *, is_preempted=False, is_terminated=False):
    died = WorkerDiedError("rollout", rank, "advance", "it was killed", step=step, pid=7, node="n")
    died.is_preempted, died.is_terminated = is_preempted, is_terminated
    return died


def events(tmp_path):
    return [entry.event for entry in read_journal(tmp_path / "journal.jsonl")]


def test_a_loss_and_the_way_back_are_recorded_and_said_in_a_line_each(tmp_path):
    seconds = iter((10.0, 13.5))
    supervisor = Supervisor(Journal(tmp_path / "journal.jsonl"), clock=lambda: next(seconds))
    supervisor.lost(death(step=3))
    supervisor.restarted({"rollout": ["8@n"]})
    supervisor.restarted({"rollout": ["8@n"]})
    why = "rollout rank 0 (pid 7, node n) died during advance at step 3"
    assert events(tmp_path) == [
        RoleLost(role="rollout", rank=0, step=3, why=f"{why}: it was killed"),
        Said(text=f"{why}; it is started again"),
        RolesRestarted(first=None, seconds=3.5, processes={"rollout": ["8@n"]}),
        Said(text="rollout: back after 3.5 s: the step goes on", level="log"),
    ]


def done(step, seconds=0.0):
    return StepDone(step=step, metrics={}, digests={}, seconds=seconds)


def every_30_s(num, useful_s):
    return [each for step in range(1, num + 1) for each in (30.0 * step, death(step), done(step, useful_s))]


TEN = [death(2, rank) for rank in range(10)]
LOSSES = {
    "the third in one call of a step": ([death(3), death(3, rank=1), death(3)], death(3)),
    "the third in one call without a further step": ([done(3), death(None), death(4)], death(None)),
    "a step done again is no further one": ([done(3), death(4), done(3), death(4), done(3)], death(4)),
    "each step anew": ([event for step in range(1, 5) for event in (death(step), death(step), done(step))], None),
    "validation after validation": ([event for step in range(1, 9) for event in (death(None), done(step))], None),
    "the eleventh within an hour": (TEN, death(1, 10)),
    "ten within an hour, and ten more": ([*TEN, 3601.0, *TEN], None),
    "often, while most of the time goes into steps": (every_30_s(40, 16.0), None),
    "often, while less than half does": ([*every_30_s(10, 14.0), 330.0], death(11)),
    "taken back, as often as it is": ([death(3, is_preempted=True)] * 40, None),
    "asked to end does not count": ([death(3, rank, is_terminated=True) for rank in range(30)] + TEN, None),
    "asked to end in one call for the third time": ([death(3, is_terminated=True)] * 2, death(3, is_terminated=True)),
    "taken back does not count": ([death(3, is_preempted=True)] * 10 + TEN, None),
}  # fmt: skip


@pytest.mark.parametrize("name", LOSSES)
def test_a_run_goes_on_after_losses_within_its_budget(tmp_path, name):
    survived, last = LOSSES[name]
    now, journal = 0.0, Journal(tmp_path / "journal.jsonl")
    supervisor = Supervisor(journal, clock=lambda: now)
    for event in survived:
        if isinstance(event, float):
            now = event
        elif isinstance(event, WorkerDiedError):
            supervisor.lost(event)
        else:
            journal.append(event)
    if last is not None:
        with pytest.raises(WorkerDiedError) as caught:
            supervisor.lost(last)
        assert caught.value is last
        *_, lost, said = events(tmp_path)
        assert isinstance(lost, RoleLost), "the last one is recorded, too"
        assert said.text.startswith("the run ends: ")
        assert last.is_final == ("third time" in said.text)


class Score:
    """A worker without a state, which can be told to have died."""

    def __init__(self, context, spec):
        self.context = context

    @broadcast
    def rank(self):
        return self.context.rank

    @broadcast
    def start(self):
        return self.context.start


class DyingRuntime(InlineRuntime):
    """Threads, of which new ones die while they start, as often as is said."""

    deaths = 0

    async def processes(self, pool):
        found = await super().processes(pool)
        if self.deaths:
            self.deaths -= 1
            raise WorkerDiedError("pool 'main'", 0, "its start", "it was killed")
        return found


def lose_one(tmp_path, num_deaths, refill=None):
    """Lose a process, and others while it is started again; return what the rank says after that."""
    config = load_config("digits", ["cluster.pools={main: [1], side: [1]}", "rollout.placement.pool=side"]).config

    async def scenario():
        runtime = DyingRuntime(log_folder=tmp_path)
        pools = pools_of(config)
        supervisor = Supervisor(Journal(tmp_path / "journal.jsonl"))
        placement = Placement(config, runtime, pools, "", SharedFolder.marked(tmp_path), None, supervisor)
        try:
            group = await placement.group("rollout", Score)
            if refill is not None:
                placement.refillers["rollout"] = refill
                refill.group = group
            lost, start = group.processes[0], await group.call(Score.start)
            lost.info = lost.info.__class__("gone", "gone", 1)
            runtime.deaths = num_deaths
            await placement.restore(WorkerDiedError("rollout", 0, "score", "it was killed", pid=1, node="gone"))
            assert lost.ended
            assert await group.call(Score.start) > start, "no rank meets those of the start before"
            return await group.call(Score.rank)
        finally:
            await runtime.shutdown()

    return asyncio.run(scenario())


def test_a_process_that_dies_while_it_is_started_again_is_one_more_loss(tmp_path):
    assert lose_one(tmp_path, 2) == 0
    assert [type(event) for event in events(tmp_path) if not isinstance(event, Said)] == [
        RoleLost,
        RoleLost,
        RoleLost,
        RolesRestarted,
    ]


def test_processes_that_die_at_every_start_use_the_budget_up(tmp_path):
    with pytest.raises(WorkerDiedError, match="pool 'main' rank 0 died during its start"):
        lose_one(tmp_path, 3)


def test_a_process_that_dies_before_it_has_what_the_others_have_is_made_again_once_more(tmp_path):
    class Refill:
        asked = 0

        async def refill(self, ranks):
            self.asked += 1
            if self.asked == 1:
                where = self.group.processes[0].info
                raise WorkerDiedError("rollout", 0, "load", "it was killed", pid=where.pid, node=where.node)
            assert list(ranks) == [0]

    assert lose_one(tmp_path, 0, Refill()) == 0
    assert [event.rank for event in events(tmp_path) if isinstance(event, RoleLost)] == [0, 0]


def test_the_end_of_all_groups_waits_for_no_role_that_is_being_made_again(tmp_path):
    config = load_config("digits", ["cluster.pools={main: [1], side: [1]}", "rollout.placement.pool=side"]).config

    class Waits(InlineRuntime):
        may = True

        async def processes(self, pool):
            if not self.may:
                await asyncio.Event().wait()
            return await super().processes(pool)

    async def scenario():
        runtime, supervisor = Waits(log_folder=tmp_path), Supervisor(Journal(tmp_path / "journal.jsonl"))
        shared = SharedFolder.marked(tmp_path)
        placement = Placement(config, runtime, pools_of(config), "", shared, None, supervisor)
        try:
            group = await placement.group("rollout", Score)
            where, runtime.may = group.processes[0].info, False
            error = WorkerDiedError("rollout", 0, "score", "it was killed", pid=where.pid, node=where.node)
            waiting = [asyncio.create_task(placement.restore(error)) for _ in range(2)]
            while not group.processes[0].ended:
                await asyncio.sleep(0)
            await placement.close()
            return error, await asyncio.gather(*waiting, return_exceptions=True)
        finally:
            await runtime.shutdown()

    error, raised = asyncio.run(scenario())
    assert raised == [error, error]


def test_all_processes_of_a_node_that_was_lost_are_one_loss_and_are_made_again_together(tmp_path):
    pools = "cluster.pools={main: [1], side: [1, 1]}"
    config = load_config("digits", [pools, "rollout.placement.pool=side", "reference.placement.pool=side"]).config

    async def scenario():
        runtime = InlineRuntime(log_folder=tmp_path)
        supervisor = Supervisor(Journal(tmp_path / "journal.jsonl"))
        shared = SharedFolder.marked(tmp_path)
        placement = Placement(config, runtime, pools_of(config), "", shared, None, supervisor)
        try:
            rollout, reference = [await placement.group(role, Score) for role in ("rollout", "reference")]
            before = rollout.processes
            for pid, process in enumerate(before):
                process.info = process.info.__class__("gone" if pid else "here", f"id of {pid}", pid)
            error = WorkerDiedError("rollout", 1, "score", "its node was lost", pid=1, node="gone")
            error.is_node_lost = True
            await placement.restore(error)
            assert [process.ended for process in before] == [True, True], "the reference has ranks on both nodes"
            assert rollout.processes == reference.processes
            return await rollout.call(Score.rank), await reference.call(Score.rank)
        finally:
            await runtime.shutdown()

    assert asyncio.run(scenario()) == (0, 0)
    assert len([event for event in events(tmp_path) if isinstance(event, RoleLost)]) == 1


@pytest.mark.parametrize("role", ["rollout", "actor"])
def test_a_process_that_died_idle_is_replaced_before_it_is_needed_unless_it_trains(tmp_path, role):
    pools = "cluster.pools={main: [1], side: [1]}"
    config = load_config("digits", [pools, "rollout.placement.pool=side"]).config

    class Telling(InlineRuntime):
        def tell_deaths(self, died):
            self.tell = died

    async def scenario():
        runtime = Telling(log_folder=tmp_path)
        supervisor = Supervisor(Journal(tmp_path / "journal.jsonl"))
        shared = SharedFolder.marked(tmp_path)
        placement = Placement(config, runtime, pools_of(config), "", shared, None, supervisor)
        try:
            group = await placement.group(role, Score)
            lost = group.processes[0]
            lost.info = lost.info.__class__("gone", "gone", 1)
            for _ in range(2):  # it is told again and again
                death = WorkerDiedError(role, 0, "waiting for calls", "it was killed", pid=1, node="gone")
                await asyncio.to_thread(runtime.tell, death)
            for _ in range(1000):
                await asyncio.sleep(0)
            return lost.ended, await group.call(Score.rank)
        finally:
            await runtime.shutdown()

    assert asyncio.run(scenario()) == (role == "rollout", 0)
    losses = [event for event in events(tmp_path) if isinstance(event, RoleLost)]
    assert [event.role for event in losses] == (["rollout"] if role == "rollout" else [])
