"""A list of runs says of each what its folder says, and no folder is too damaged to be listed."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rallypoint.config import load_config
from rallypoint.errors import RunFolderError
from rallypoint.journal import Event, Journal, RunBegan, RunEnded, Said, StepDone, read_journal
from rallypoint.run.folder import RunFolder, create_run
from rallypoint.run.overview import find_runs, overview

HOLD = """
import sys
from pathlib import Path
from rallypoint.run.folder import RunFolder
with RunFolder(Path(sys.argv[1])).locked():
    print("held", flush=True)
    sys.stdin.readline()
"""


BEGAN = RunBegan(first=0, config={}, software={}, machine="")
NOTE = Said(text="the reward raised:\n2026-11-25 10:00:00 ValueError: parser\n2026-11-25 10:00:00 failed on line 3")


def run_in(folder: Path, name: str, *events: Event, scores=()) -> RunFolder:
    run = create_run(load_config("digits", [f"trainer.runs_dir={folder}", f"trainer.name={name}"]))
    with Journal(run.journal) as journal:
        journal.append(*events, *(StepDone(step=step, metrics=metrics, digests={}) for step, metrics in scores))
    return run


@pytest.mark.parametrize(
    ("events", "state", "why"),
    [
        ((BEGAN, RunEnded(how="finished")), "finished", ""),
        ((BEGAN, NOTE, RunEnded(how="stopped")), "stopped", ""),
        ((BEGAN, RunEnded(how="failed", why="no room\nand more"), NOTE), "failed", "no room"),
        ((BEGAN, RunEnded(how="stopped"), BEGAN, NOTE), "killed", ""),
        ((BEGAN, NOTE), "killed", ""),
        ((), "killed", ""),
    ],
)
def test_the_end_of_a_run_is_the_event_of_its_newest_start_whatever_was_said(tmp_path: Path, events, state, why):
    found = overview(run_in(tmp_path, "mine", *events).path)
    assert (found.state, found.why, found.recipe, found.num_steps) == (state, why, "ppo", 120)


def test_a_copy_of_a_run_that_has_not_ended_is_elsewhere_while_it_is_heard_of_and_then_silent(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    copies = tmp_path / "rallypoint" / "fetched" / "runs" / "s3" / "lab"
    run = run_in(copies, "mine", BEGAN, NOTE)
    os.utime(run.journal, (1, 1))  # when it was fetched says nothing
    (heard,) = list(read_journal(run.journal))[-1:]
    monkeypatch.setattr(time, "time", lambda: heard.time_s + 299)
    assert (overview(run.path).state, overview(run.path).changed) == ("elsewhere", heard.time_s)
    monkeypatch.setattr(time, "time", lambda: heard.time_s + 301)
    assert overview(run.path).state == "silent"
    with Journal(run.journal) as journal:
        journal.append(RunEnded(how="finished"))
    assert overview(run.path).state == "finished"


def test_a_run_that_another_process_trains_is_running(tmp_path: Path):
    run = run_in(tmp_path, "mine", BEGAN, RunEnded(how="finished"))
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(run.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    assert overview(run.path).state == "running"
    holder.communicate("\n")
    assert overview(run.path).state == "finished"


def test_scores_are_those_of_validations_and_else_mean_rewards(tmp_path: Path):
    steps = [(0, {"validation/score": 0.5}), (1, {"reward/mean": 0.9}), (1, {"validation/score": 0.4})]
    found = overview(run_in(tmp_path, "validated", scores=steps).path)
    assert (found.step, found.last, found.best, found.is_validated) == (1, 0.4, (0, 0.5), True)
    steps = [(1, {"reward/mean": 0.1}), (2, {"reward/mean": 0.7}), (3, {"reward/mean": float("nan")})]
    found = overview(run_in(tmp_path, "bare", scores=steps).path)
    assert (found.step, found.best, found.is_validated) == (3, (2, 0.7), False)


def test_runs_come_newest_first_and_a_damaged_one_is_listed_with_the_reason(tmp_path: Path):
    for age, name in enumerate(("new", "old", "older")):
        run = run_in(tmp_path, name, scores=[(1, {"reward/mean": 0.1})])
        os.utime(run.journal, (1e9 - age, 1e9 - age))
    (tmp_path / "old" / "journal.jsonl").write_text("no json\n")
    os.utime(tmp_path / "old" / "journal.jsonl", (1e9 - 1, 1e9 - 1))
    (tmp_path / "no-run").mkdir()
    found = find_runs(tmp_path)
    assert [(one.path.name, one.state) for one in found] == [("new", "killed"), ("old", "damaged"), ("older", "killed")]
    assert "journal.jsonl, line 1 is damaged" in found[1].why
    assert [one.path.name for one in find_runs(tmp_path / "older")] == ["older"]
    with pytest.raises(RunFolderError, match="no such folder"):
        find_runs(tmp_path / "nowhere")
