"""Trackers get what metrics.jsonl gets, and none of them can slow or stop a run."""

import contextlib
import itertools
import subprocess
import sys
import threading
from pathlib import Path

from heard import heard
from metrics_file import read_metrics

from rallypoint.config.other_projects import other_projects
from rallypoint.journal import Ending, Journal, RolesStarted, RunBegan, RunEnded, Shown, StepDone, Validated
from rallypoint.observability.tracker_clients import as_in_verl
from rallypoint.observability.trackers import Tracked, Trackers, find_tracker_problem
from rallypoint.run import MetricsLog

LONG_S = 60.0
CONFIG = {"trainer.num_steps": 3, "validation.every_steps": 2}


def run_in(folder: Path, first_step: int = 0) -> Tracked:
    return Tracked(folder, "rallypoint", first_step, {**CONFIG, "seed": 3, "actor.optimizer.lr": 1e-6})


class Recording:
    """A client that remembers what it was told, and does what the test wants at each line."""

    def __init__(self, at_line=lambda: None) -> None:
        self.lines: list[tuple[int, dict[str, float]]] = []
        self.tables, self.pictures = [], []
        self.closed: Ending | None = None
        self._at_line = at_line

    def log(self, step, scalars) -> None:
        self._at_line()
        self.lines.append((step, dict(scalars)))

    def table(self, step, rows) -> None:
        self.tables.append((step, list(rows)))

    def picture(self, step, png) -> None:
        self.pictures.append(png)

    def close(self, ending) -> None:
        self.closed = ending


def test_every_line_of_the_metrics_goes_to_every_tracker_in_order(tmp_path):
    first, second = Recording(), Recording()
    file = tmp_path / "journal.jsonl"
    journal = Journal(file)
    trackers = Trackers({"a": lambda _: first, "b": lambda _: second}, run_in(tmp_path), journal, close_s=LONG_S)
    with contextlib.closing(MetricsLog(tmp_path / "metrics.jsonl", file)) as log, journal:
        journal.subscribe(log.take, trackers.take)
        journal.append(RunBegan(first=0, config={}, software={}, machine=""), RolesStarted(step=0, metrics={"a": 1.0}))
        for step in (1, 2, 3):
            journal.tell(Shown(step=step, rows=[{"step": step}]))
            journal.append(StepDone(step=step, metrics={"reward/mean": 0.1 * step}, digests={}))
        journal.append(Validated(step=3, metrics={"validation/score": 1.0}), RunEnded(how="finished"))
        lines = [(int(line.pop("step")), line) for line in read_metrics(log.path) if line.pop("time_s") >= 0]
    trackers.close()
    assert [step for step, _ in first.lines] == [0, 1, 2, 3, 3]
    assert first.lines == second.lines == lines
    assert first.tables == [(2, [{"step": 2}]), (3, [{"step": 3}])]
    assert (first.closed, second.closed) == ("finished", "finished")


def test_a_tracker_that_raises_is_told_once_and_the_others_go_on(tmp_path):
    def fail() -> None:
        raise ConnectionError("no network\nand a page more")

    said: list[str] = []
    good = Recording()
    opens = {"bad": lambda _: Recording(fail), "good": lambda _: good}
    trackers = Trackers(opens, run_in(tmp_path), heard(said.append), close_s=LONG_S)
    for step in range(5):
        trackers.log(step, {"x": 1.0})
    trackers.close()
    assert said == [
        "tracking with bad has ended: ConnectionError: no network; the run goes on, and metrics.jsonl has everything"
    ]
    assert len(good.lines) == 5
    assert good.closed == "failed", "nobody said that the run ended well"


def test_a_tracker_that_cannot_be_opened_is_told_once(tmp_path):
    def refuse(_run: Tracked) -> Recording:
        raise PermissionError("not logged in")

    said: list[str] = []
    trackers = Trackers({"bad": refuse}, run_in(tmp_path), heard(said.append), close_s=LONG_S)
    trackers.log(1, {"x": 1.0})
    trackers.close()
    assert "not logged in" in said[0]


def test_a_tracker_that_hangs_holds_neither_a_step_nor_the_end(tmp_path):
    release, hangs = threading.Event(), threading.Event()

    def hang() -> None:
        hangs.set()
        release.wait(LONG_S)

    said, left = [], []
    opens = {"slow": lambda _: Recording(hang)}
    trackers = Trackers(opens, run_in(tmp_path), heard(said.append), close_s=0.0, leave=left.append)
    for step in range(7, 20_000):  # more than may wait
        trackers.log(step, {"x": 1.0})
    assert hangs.wait(LONG_S)
    trackers.close()
    assert not release.is_set(), "it was left behind"
    release.set()
    assert left == ["slow"]
    assert said == [
        "tracking with slow hangs and is left: what came from step 7 on was not sent; metrics.jsonl has everything"
    ]


def test_a_tracker_that_is_busy_with_one_thing_for_long_is_told_of_once_while_the_run_goes_on(tmp_path):
    release, time_s, said = threading.Event(), [0.0], []

    def hang(_run: Tracked) -> Recording:
        release.wait(LONG_S)
        return Recording()

    trackers = Trackers(
        {"slow": hang}, run_in(tmp_path), heard(said.append), close_s=LONG_S, clock=lambda: time_s[0], leave=print
    )
    for step in (1, 2, 3):
        trackers.log(step, {"x": 1.0})
        time_s[0] += 31.0
    release.set()
    trackers.close()
    assert said == [
        "tracking with slow is slow: opening the run for 31 s now; the run does not wait for it, and metrics.jsonl "
        "has everything"
    ]


def test_a_tracker_that_is_waited_for_at_the_end_is_named(tmp_path):
    release, said = threading.Event(), []
    seconds = itertools.count()

    def say(line: str) -> None:
        said.append(line)
        release.set()

    def hang() -> None:
        release.wait(LONG_S)

    opens = {"slow": lambda _: Recording(hang)}
    trackers = Trackers(opens, run_in(tmp_path), heard(say), close_s=10_000.0, clock=lambda: next(seconds), leave=print)
    trackers.log(1, {"x": 1.0})
    trackers.close()
    assert said == ["waiting for slow to take what is left, at most 9997 s"]


HELD = """
import atexit, os, sys, threading, time
from pathlib import Path
from rallypoint.journal import Journal
from rallypoint.observability import leaving
from rallypoint.observability.trackers import Tracked, Trackers

leaving.GRACE_S = 0.1
at_work = threading.Event()

class Held:
    def log(self, step, scalars):
        at_work.set()
        time.sleep(600)

def open_it(run):
    atexit.register(time.sleep, 600)
    return Held()

journal = Journal(Path(os.devnull))
journal.subscribe(lambda entry: print(entry.event.text))
trackers = Trackers({"wandb": open_it}, Tracked(Path("."), "p", 0, {}), journal, close_s=0.0)
trackers.log(4, {"x": 1.0})
at_work.wait()
trackers.close()
sys.stdout.write("the end")
"""


def test_a_tracker_that_was_left_behind_does_not_hold_the_process():
    done = subprocess.run([sys.executable, "-c", HELD], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "what came from step 4 on was not sent" in done.stdout
    assert done.stdout.endswith("the end")
    assert done.stderr == "wandb still held this process 0 s after its end, so it was ended\n"
    done = subprocess.run([sys.executable, "-c", HELD + "raise ValueError"], capture_output=True, check=False)
    assert done.returncode == 1


def test_a_table_and_a_picture_go_the_same_way_and_metrics_by_the_names_that_are_wanted(tmp_path):
    good = Recording()
    trackers = Trackers({"a": lambda _: good}, run_in(tmp_path), heard(), rename=as_in_verl, close_s=LONG_S)
    trackers.log(1, {"reward/mean": 0.5, "rollout/idle": 0.1, "validation/majority@8/sums/hard": 1.0})
    trackers.table(1, [{"prompt": "2+2", "score": 0.5}])
    trackers.picture(1, tmp_path / "curve.png")
    trackers.close()
    names = {
        "critic/score/mean": 0.5,
        "rollout/idle": 0.1,
        "val-core/sums/hard/reward/maj@8/mean": 1.0,
        "critic/rewards/mean": 0.5,
    }
    assert good.lines == [(1, names)]
    assert good.tables == [(1, [{"prompt": "2+2", "score": 0.5}])]
    assert good.pictures == [tmp_path / "curve.png"]


def test_no_two_metrics_get_one_name_of_verls():
    ours = ["actor/entropy", "actor/grad_norm", "actor/lr", "critic/grad_norm", "critic/lr", "actor/loss"]
    names = other_projects().verl.metrics
    assert len(set(names.values())) == len(names)
    assert not set(names.values()) & {*ours, *names}


def test_names_of_a_validation_tell_all_responses_from_some_of_them_as_verl_does():
    ours = ("mean@8", "majority@8", "best@4", "best@8", "pass@1", "pass@2", "pass@8")
    assert list(as_in_verl({f"validation/{name}/a/b": 1.0 for name in ours})) == [
        "val-core/a/b/reward/mean@8",
        "val-core/a/b/reward/maj@8/mean",
        "val-aux/a/b/reward/best@4/mean",
        "val-core/a/b/reward/best@8/mean",
        "val-core/a/b/acc/mean@8",
        "val-aux/a/b/acc/best@2/mean",
        "val-core/a/b/acc/best@8/mean",
    ]
    assert as_in_verl({"validation/mean@1/a": 1.0, "validation/score": 1.0}) == {
        "val-core/a/reward/mean@1": 1.0,
        "validation/score": 1.0,
    }


def test_scores_are_rewards_of_verls_only_where_nothing_is_added_to_them():
    rewards = "critic/rewards/mean"
    assert rewards in as_in_verl({"reward/mean": 1.0, "kl/reference_mean": 0.1, "actor/reference_kl": 0.1})
    assert rewards not in as_in_verl({"reward/mean": 1.0, "kl/reference_mean": 0.1}), "the KL is in the reward"
    assert rewards not in as_in_verl({"reward/mean": 1.0, "reward/overlong_penalty": -0.1})


def test_a_tracker_that_is_not_known_or_not_installed_says_what_to_do():
    assert "any of tensorboard, wandb, mlflow, trackio, swanlab" in str(find_tracker_problem("tensorbord"))
