"""Trackers get what metrics.jsonl gets, and none of them can slow or stop a run."""

import math
import threading
import types
from pathlib import Path

import pytest

from rallypoint.observability.trackers import (
    MLflow,
    Tracked,
    Trackers,
    WeightsAndBiases,
    find_tracker_problem,
    open_trackers,
)
from rallypoint.run import MetricsLog

LONG_S = 60.0


def run_in(folder: Path, first_step: int = 0) -> Tracked:
    return Tracked(folder, "rallypoint", first_step, {"seed": 3, "actor.optimizer.lr": 1e-6})


class Recording:
    """A client that remembers what it was told, and does what the test wants at each line."""

    def __init__(self, at_line=lambda: None) -> None:
        self.lines: list[tuple[int, dict[str, float]]] = []
        self.closed = False
        self._at_line = at_line

    def log(self, step, scalars) -> None:
        self._at_line()
        self.lines.append((step, dict(scalars)))

    def close(self) -> None:
        self.closed = True


def test_every_line_of_the_metrics_goes_to_every_tracker_in_order(tmp_path):
    first, second = Recording(), Recording()
    trackers = Trackers({"a": lambda _: first, "b": lambda _: second}, run_in(tmp_path), print, close_s=LONG_S)
    with MetricsLog(tmp_path / "metrics.jsonl", also=trackers.log) as log:
        log.write(1, {"reward/mean": 0.5})
        log.write(1, {"validation/score": 1.0})
        log.write(2, {"reward/mean": 0.7})
    trackers.close()
    assert first.lines == [(1, {"reward/mean": 0.5}), (1, {"validation/score": 1.0}), (2, {"reward/mean": 0.7})]
    assert second.lines == first.lines
    assert first.closed and second.closed  # noqa: PT018


def test_a_tracker_that_raises_is_told_once_and_the_others_go_on(tmp_path):
    def fail() -> None:
        raise ConnectionError("no network\nand a page more")

    said: list[str] = []
    good = Recording()
    opens = {"bad": lambda _: Recording(fail), "good": lambda _: good}
    trackers = Trackers(opens, run_in(tmp_path), said.append, close_s=LONG_S)
    for step in range(5):
        trackers.log(step, {"x": 1.0})
    trackers.close()
    assert said == [
        "tracking with bad has ended: ConnectionError: no network; the run goes on, and metrics.jsonl has everything"
    ]
    assert len(good.lines) == 5


def test_a_tracker_that_cannot_be_opened_is_told_once(tmp_path):
    def refuse(_run: Tracked) -> Recording:
        raise PermissionError("not logged in")

    said: list[str] = []
    trackers = Trackers({"bad": refuse}, run_in(tmp_path), said.append, close_s=LONG_S)
    trackers.log(1, {"x": 1.0})
    trackers.close()
    assert "not logged in" in said[0]


def test_a_tracker_that_hangs_holds_neither_a_step_nor_the_end(tmp_path):
    release, hangs = threading.Event(), threading.Event()

    def hang() -> None:
        hangs.set()
        release.wait(LONG_S)

    trackers = Trackers({"slow": lambda _: Recording(hang)}, run_in(tmp_path), print, close_s=0.0)
    for step in range(20_000):  # more than may wait
        trackers.log(step, {"x": 1.0})
    assert hangs.wait(LONG_S)
    trackers.close()
    assert not release.is_set(), "it was left behind"
    release.set()


def test_tensorboard_writes_files_that_its_own_reader_reads_also_after_a_resume(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trackers = open_trackers(["tensorboard"], run_in(tmp_path), pytest.fail)
    for step in range(1, 5):
        trackers.log(step, {"reward/mean": step / 10, "actor/loss": math.nan})
    trackers.close()
    again = open_trackers(["tensorboard"], run_in(tmp_path, first_step=2), pytest.fail)
    again.log(3, {"reward/mean": 0.9})
    again.close()
    found = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, round(event.value, 3)) for event in found.Scalars("reward/mean")] == [
        (1, 0.1),
        (2, 0.2),
        (3, 0.9),
    ]
    assert "actor/loss" in found.Tags()["scalars"]


class FakeWandb:
    """What of wandb is used."""

    def __init__(self) -> None:
        self.inits: list[dict[str, object]] = []
        self.lines: list[tuple[int, dict[str, float]]] = []
        self.num_finished = 0

    def init(self, **settings):
        self.inits.append(settings)
        return self

    def log(self, scalars, *, step) -> None:
        self.lines.append((step, scalars))

    def finish(self) -> None:
        self.num_finished += 1


def test_wandb_gets_config_and_metrics_and_a_resumed_run_is_the_same_run(tmp_path):
    client = FakeWandb()
    tracker = WeightsAndBiases(run_in(tmp_path), client)
    tracker.log(1, {"reward/mean": 0.5})
    tracker.close()
    WeightsAndBiases(run_in(tmp_path, first_step=1), client)
    first, second = client.inits
    assert first["id"] == second["id"]
    assert first["config"] == {"seed": 3, "actor.optimizer.lr": 1e-6}
    assert (first["project"], first["name"], first["resume"]) == ("rallypoint", tmp_path.name, "allow")
    assert client.lines == [(1, {"reward/mean": 0.5})]
    assert client.num_finished == 1
    WeightsAndBiases(run_in(tmp_path), client)  # begun anew at step 1
    assert client.inits[2]["id"] != first["id"]


class FakeMlflow:
    """What of MlflowClient is used."""

    def __init__(self) -> None:
        self.params: dict[str, str] = {}
        self.metrics: list[tuple[str, str, float, int]] = []
        self.num_runs = 0

    def get_experiment_by_name(self, name):
        return None

    def create_experiment(self, name) -> str:
        return "7"

    def create_run(self, experiment, *, run_name):
        self.num_runs += 1
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id=f"run{self.num_runs}"))

    def log_param(self, run, key, value) -> None:
        self.params[key] = value

    def log_metric(self, run, name, value, *, step) -> None:
        self.metrics.append((run, name, value, step))

    def set_terminated(self, run) -> None:
        self.metrics.append((run, "ended", 1.0, 0))


def test_mlflow_gets_params_and_finite_metrics_and_a_resumed_run_is_the_same_run(tmp_path):
    client = FakeMlflow()
    tracker = MLflow(run_in(tmp_path), client)
    tracker.log(1, {"reward/mean": 0.5, "actor/loss": math.inf})
    MLflow(run_in(tmp_path, first_step=1), client).log(2, {"reward/mean": 0.6})
    assert client.params == {"seed": "3", "actor.optimizer.lr": "1e-06"}
    assert client.metrics == [("run1", "reward/mean", 0.5, 1), ("run1", "reward/mean", 0.6, 2)]


def test_mlflow_itself_keeps_the_metrics_in_a_local_store(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    client = mlflow.MlflowClient(tracking_uri=f"file:{tmp_path / 'store'}")
    tracker = MLflow(run_in(tmp_path), client)
    tracker.log(1, {"reward/mean": 0.5})
    tracker.log(2, {"reward/mean": 0.75})
    tracker.close()
    (run,) = client.search_runs([client.get_experiment_by_name("rallypoint").experiment_id])
    assert [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, "reward/mean")] == [
        (1, 0.5),
        (2, 0.75),
    ]
    assert run.data.params["seed"] == "3"


def test_a_tracker_that_is_not_known_or_not_installed_says_what_to_do():
    assert "any of tensorboard, wandb, mlflow" in str(find_tracker_problem("tensorbord"))
