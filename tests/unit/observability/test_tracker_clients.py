"""Each tracker holds a run's config, metrics, rollouts and curve on this machine, where its own client finds them.

The clients are extras: a test of one that is not installed is skipped. CONTRIBUTING.md says how to run them all.
"""

import dataclasses
import importlib
import json
import math
import struct
from pathlib import Path

import pytest
from heard import heard

from rallypoint.observability.tracker_clients import MLflow, Once, WeightsAndBiases, open_trackers
from rallypoint.observability.trackers import Ending, Tracked

ROWS = [
    {"step": 2, "prompt": "2 + 2 | 3 = ?", "response": "line 1\nline 2", "score": 0.5, "truncated": False},
    {"step": 2, "prompt": "ü", "response": "", "score": 0.0, "truncated": True},
]


@pytest.fixture
def png(tmp_path):
    """A picture, as the curve is one."""
    pyplot = pytest.importorskip("matplotlib.pyplot")
    figure = pyplot.figure(figsize=(1, 1), dpi=20)
    figure.savefig(tmp_path / "curve.png")
    pyplot.close(figure)
    return tmp_path / "curve.png"


def run_in(folder: Path, first_step: int = 0) -> Tracked:
    return Tracked(folder, "sums", first_step, {"seed": 3, "actor.optimizer.lr": 1e-6, "data.train": ("a", "b")})


def say(line: str) -> None:
    """Take no line but that of a client that is waited for, as on a slow machine."""
    if not line.startswith("waiting for"):
        pytest.fail(line)


def tell(name: str, folder: Path, png: Path) -> None:
    """Tell a tracker of two steps, and after a resume from the first of the second again, and of one more."""
    folder.mkdir()
    trackers = open_trackers([name], run_in(folder), heard(say), close_s=110.0)
    trackers.log(1, {"reward/mean": 0.5, "actor/loss": math.nan})
    trackers.log(1, {"validation/pass@4/sums": 0.25})
    trackers.log(2, {"reward/mean": 0.75})
    trackers.table(2, ROWS)
    trackers.picture(2, png)
    trackers.close()
    again = open_trackers([name], run_in(folder, first_step=1), heard(say), close_s=110.0)
    again.log(2, {"reward/mean": 0.75})
    again.table(2, ROWS)
    again.log(3, {"reward/mean": 1.0})
    again.picture(3, png)
    again.ending = "finished"
    again.close()


def test_tensorboard_holds_a_run(tmp_path, png):
    pytest.importorskip("tensorboard", reason="rallypoint[tensorboard] is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tell("tensorboard", tmp_path / "mine", png)
    found = EventAccumulator(str(tmp_path / "mine" / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in found.Scalars("reward/mean")] == [(1, 0.5), (2, 0.75), (3, 1.0)]
    assert found.Scalars("validation/pass@4/sums")[0].value == 0.25
    texts = {tag: found.Tensors(tag)[0].tensor_proto.string_val[0].decode() for tag in found.Tags()["tensors"]}
    assert "    actor.optimizer.lr: 1e-06" in texts["config/text_summary"]
    assert "| 2 | 2 + 2 \\| 3 = ? | line 1<br>line 2 | 0.5 | False |" in texts["rollouts/text_summary"]
    assert found.Images("curve")[0].width == 20


def test_tensorboard_has_each_step_once_after_a_resume_from_any_step(tmp_path):
    pytest.importorskip("tensorboard", reason="rallypoint[tensorboard] is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for first, last in ((0, 3), (0, 2), (2, 3), (1, 4)):  # the second begins again, as there was no checkpoint yet
        trackers = open_trackers(["tensorboard"], run_in(tmp_path, first), say, close_s=110.0)
        for step in range(first + 1 if first else 0, last + 1):
            trackers.log(step, {"validation/score" if step == 0 else "reward/mean": step + 10 * first})
        trackers.close()
    found = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in found.Scalars("validation/score")] == [(0, 0)]
    means = [(event.step, event.value) for event in found.Scalars("reward/mean")]
    assert means == [(1, 1), (2, 12), (3, 13), (4, 14)]


def test_wandb_holds_a_run(tmp_path, png, monkeypatch):
    pytest.importorskip("wandb", reason="rallypoint[wandb] is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    tell("wandb", tmp_path / "mine", png)
    records = [record for file in sorted(tmp_path.rglob("*.wandb")) for record in records_of_wandb(file)]
    runs = [record.run for record in records if record.WhichOneof("record_type") == "run"]
    assert {(run.project, run.display_name) for run in runs} == {("sums", "mine")}
    assert len({run.run_id for run in runs}) == 1, "after the resume it is the same run"
    config = {item.key: item.value_json for run in runs for item in run.config.update}
    assert config["actor.optimizer.lr"] == "0.000001" or float(config["actor.optimizer.lr"]) == 1e-6
    lines: dict[int, dict[str, object]] = {}
    for record in records:
        if record.WhichOneof("record_type") == "history":
            items = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
            lines.setdefault(items["_step"], {}).update(items)
    assert [lines[step]["reward/mean"] for step in (1, 2, 3)] == [0.5, 0.75, 1.0]
    assert lines[1]["validation/pass@4/sums"] == 0.25
    table = next(json.loads(file.read_text()) for file in tmp_path.rglob("*.table.json"))
    assert table["columns"] == list(ROWS[0])
    assert table["data"] == [list(row.values()) for row in ROWS]
    assert list(tmp_path.rglob("media/images/curve*.png"))


def records_of_wandb(file: Path) -> list:
    """Return the records of a file of wandb's: a log as LevelDB has it, of blocks of 32 KiB, with its own messages."""
    record = importlib.import_module("wandb.proto.wandb_internal_pb2").Record
    data, place, message, found = file.read_bytes(), 7, b"", []
    while place + 7 <= len(data):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + 7])
        message += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            found.append(record.FromString(message))
            message = b""
    return found


def test_mlflow_holds_a_run(tmp_path, png, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="rallypoint[mlflow] is not installed")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path / 'store'}")
    tell("mlflow", tmp_path / "mine", png)
    client = mlflow.MlflowClient(tracking_uri=f"file:{tmp_path / 'store'}")
    (run,) = client.search_runs([client.get_experiment_by_name("sums").experiment_id])
    history = client.get_metric_history(run.info.run_id, "reward/mean")
    assert [(one.step, one.value) for one in history] == [(1, 0.5), (2, 0.75), (3, 1.0)]
    assert run.data.metrics["validation/pass_at_4/sums"] == 0.25
    assert (run.info.run_name, run.info.status) == ("mine", "FINISHED")
    assert (run.data.params["seed"], run.data.params["data.train"]) == ("3", "('a', 'b')")
    assert {one.path for one in client.list_artifacts(run.info.run_id)} == {"curve.png", "rollouts"}
    table = json.loads(Path(client.download_artifacts(run.info.run_id, "rollouts/step_000002.json")).read_text())
    assert table == {"columns": list(ROWS[0]), "data": [list(row.values()) for row in ROWS]}
    assert json.loads(run.data.tags["mlflow.loggedArtifacts"])[0]["path"] == "rollouts/step_000002.json"


def test_trackio_holds_a_run(tmp_path, png, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read when it is imported
    pytest.importorskip("trackio", reason="rallypoint[trackio] is not installed")
    storage = importlib.import_module("trackio.sqlite_storage").SQLiteStorage
    tell("trackio", tmp_path / "mine", png)
    assert storage.get_runs("sums") == ["mine"], "after the resume it is the same run"
    config = storage.get_run_config("sums", "mine")
    assert config is not None
    assert (config["seed"], config["data.train"]) == (3, "('a', 'b')")
    logs = storage.get_logs("sums", "mine")
    assert [(one["step"], one["reward/mean"]) for one in logs if "reward/mean" in one] == [
        (1, 0.5),
        (2, 0.75),
        (3, 1.0),
    ]
    assert [one["validation/pass@4/sums"] for one in logs if "validation/pass@4/sums" in one] == [0.25]
    (table,) = (one["rollouts"] for one in logs if "rollouts" in one)
    assert table["_value"] == ROWS
    assert any("curve" in one for one in logs)
    assert list((tmp_path / "trackio" / "media").rglob("*.png"))


def test_swanlab_holds_a_run(tmp_path, png, monkeypatch):
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    pytest.importorskip("swanlab", reason="rallypoint[swanlab] is not installed")
    message = importlib.import_module("swanlab.proto.swanlab.record.v1.record_pb2").Record
    store = importlib.import_module("swanlab.sdk.internal.core_python.store")
    tell("swanlab", tmp_path / "mine", png)
    records = []
    for file in sorted((tmp_path / "mine" / "swanlog").rglob("*.swanlab")):
        reader = store.DataStoreReader()
        reader.open(file)
        while (data := reader.scan()) is not None:
            records.append(message.FromString(data))
        reader.close()
    scalars = [(one.scalar.key, one.scalar.step, one.scalar.value.number) for one in records if one.HasField("scalar")]
    rewards = [(step, value) for key, step, value in scalars if key == "reward/mean"]
    assert rewards == [(1, 0.5), (2, 0.75), (3, 1.0)]
    assert ("validation/pass@4/sums", 1, 0.25) in scalars
    media = {one.media.key: one.media for one in records if one.HasField("media")}
    assert media.keys() == {"rollouts", "curve"}
    text = "".join(file.read_text() for file in (tmp_path / "mine" / "swanlog").rglob("*.json"))
    assert "2 + 2 | 3 = ?" in text
    configs = [file.read_text() for file in (tmp_path / "mine" / "swanlog").rglob("config.y*ml")]
    assert any("actor.optimizer.lr" in one for one in configs)


class FakeTracker:
    """What `Once` is given: remembers what it was told, and how the run ended."""

    def __init__(self) -> None:
        self.told: list[tuple[int, dict[str, float]]] = []
        self.tables: list[int] = []
        self.endings: list[Ending] = []

    def log(self, step, scalars) -> None:
        self.told.append((step, dict(scalars)))

    def table(self, step, rows) -> None:
        del rows
        self.tables.append(step)

    def picture(self, step, png) -> None: ...

    def close(self, ending) -> None:
        self.endings.append(ending)


def test_steps_that_a_resumed_run_does_again_are_not_told_twice(tmp_path):
    client = FakeTracker()
    killed = Once(run_in(tmp_path), "fake", lambda _: client)
    killed.log(1, {"x": 1.0})
    killed.log(2, {"x": 2.0})
    killed.log(2, {"x": 2.5})  # a second line of a step, as of a validation, is another
    killed.table(2, ROWS)
    again = Once(run_in(tmp_path, first_step=1), "fake", lambda _: client)
    again.log(2, {"x": 2.0})
    again.table(2, ROWS)
    again.log(2, {"validation/score": 0.5})  # the first start was killed before it
    again.log(3, {"x": 3.0})
    again.close("stopped")
    assert client.told == [
        (1, {"x": 1.0}),
        (2, {"x": 2.0}),
        (2, {"x": 2.5}),
        (2, {"validation/score": 0.5}),
        (3, {"x": 3.0}),
    ]
    assert (client.tables, client.endings) == ([2], ["stopped"])
    anew = Once(run_in(tmp_path), "fake", lambda _: client)
    anew.log(1, {"x": 1.0})
    assert client.told[-1] == (1, {"x": 1.0})


@dataclasses.dataclass
class FakeMetric:
    """A metric as `mlflow.entities` has it."""

    key: str
    value: float
    timestamp: int
    step: int


class FakeMLflow:
    """What of mlflow is used; it is its client and its entities, too."""

    Metric = FakeMetric
    Param = staticmethod(lambda key, value: (key, value))

    def __init__(self) -> None:
        self.entities = self
        self.calls: list[str] = []
        self.batches: list[list[FakeMetric]] = []
        self.params: list[list[tuple[str, str]]] = []

    def MlflowClient(self):  # noqa: N802 - its name
        return self

    def get_experiment_by_name(self, name):
        del name

    def create_experiment(self, name):
        return name

    def create_run(self, experiment, *, run_name):
        del experiment, run_name
        self.calls.append("create")
        return self

    @property
    def info(self):
        return self

    run_id = "r1"

    def log_batch(self, run_id, metrics=(), params=()) -> None:
        assert run_id == "r1"
        if metrics:
            self.batches.append(list(metrics))
        if params:
            self.params.append(list(params))

    def update_run(self, run_id, *, status) -> None:
        self.calls.append(f"{run_id} {status}")

    def set_terminated(self, run_id, *, status) -> None:
        self.calls.append(f"{run_id} {status}")


def test_mlflow_is_told_a_line_in_one_call_and_of_the_state_of_the_run(tmp_path):
    client = FakeMLflow()
    long = dataclasses.replace(run_in(tmp_path), config={f"key{i}": i for i in range(250)})
    tracker = MLflow(long, client)
    tracker.log(1, {"validation/pass@4/sums": 0.25, "reward/mean": 0.5, "actor/loss": math.nan})
    tracker.close("failed")
    MLflow(run_in(tmp_path, first_step=1), client).close("stopped")
    MLflow(run_in(tmp_path, first_step=1), client).close("finished")
    (batch,) = client.batches
    assert [(one.key, one.value, one.step) for one in batch] == [
        ("validation/pass_at_4/sums", 0.25, 1),
        ("reward/mean", 0.5, 1),
    ]
    assert [len(batch) for batch in client.params] == [100, 100, 50], "no more than MLflow takes at once"
    assert client.calls == ["create", "r1 FAILED", "r1 RUNNING", "r1 KILLED", "r1 RUNNING", "r1 FINISHED"]


class FakeWandb:
    """What of wandb is used."""

    def __init__(self) -> None:
        self.inits: list[dict[str, object]] = []
        self.lines: list[tuple[int, dict[str, float]]] = []
        self.exit_codes: list[int] = []

    def init(self, **settings):
        self.inits.append(settings)
        return self

    def log(self, scalars, *, step) -> None:
        self.lines.append((step, scalars))

    def finish(self, *, exit_code) -> None:
        self.exit_codes.append(exit_code)


def test_a_resumed_run_is_the_same_run_and_one_that_begins_anew_is_another(tmp_path):
    client = FakeWandb()
    endings: tuple[Ending, ...] = ("failed", "stopped", "finished")
    for first_step, ending in zip((0, 1, 0), endings, strict=True):
        tracker = WeightsAndBiases(run_in(tmp_path, first_step), client)
        tracker.log(first_step + 1, {"reward/mean": 0.5})
        tracker.close(ending)
    first, second, third = (settings["id"] for settings in client.inits)
    assert first == second != third
    assert [step for step, _ in client.lines] == [1, 2, 1]
    assert client.exit_codes == [1, 255, 0]
