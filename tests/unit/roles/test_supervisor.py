import pytest

from rallypoint.errors import WorkerDiedError
from rallypoint.journal import Journal, RoleLost, RolesRestarted, Said, read_journal
from rallypoint.roles.supervisor import Supervisor


def death(step, rank=0):
    return WorkerDiedError("rollout", rank, "advance", "it was killed", step=step, pid=7, node="n")


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


def test_the_same_call_of_the_same_step_is_lost_three_times_and_the_run_ends(tmp_path):
    supervisor = Supervisor(Journal(tmp_path / "journal.jsonl"))
    supervisor.lost(death(step=3))
    supervisor.lost(death(step=3, rank=1))
    supervisor.lost(death(step=3))
    with pytest.raises(WorkerDiedError, match="at step 3"):
        supervisor.lost(death(step=3))
    *_, lost, said = events(tmp_path)
    assert isinstance(lost, RoleLost), "the last one is recorded, too"
    assert said.text == "the run ends: rollout rank 0 was lost in advance for the third time"


def test_ten_losses_an_hour_are_survived_and_an_eleventh_is_not(tmp_path):
    now = 0.0
    supervisor = Supervisor(Journal(tmp_path / "journal.jsonl"), clock=lambda: now)
    for step in range(10):
        supervisor.lost(death(step))
    now = 3601.0
    for step in range(10, 20):
        supervisor.lost(death(step))
    with pytest.raises(WorkerDiedError, match="at step 20"):
        supervisor.lost(death(20))
