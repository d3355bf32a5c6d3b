"""Runs whose folders are on S3: a real server of it in this process, whose requests fail where a test says so."""

import io
import re
import shutil
import threading
import time
from pathlib import Path

import pytest
from rich.console import Console
from s3_server import keys, served
from tiny_runs import TINY, weights_of

from rallypoint import checkpoint
from rallypoint.cli.main import _run
from rallypoint.data import remote
from rallypoint.errors import ConfigError, ModelError
from rallypoint.library.launch import launch

INLINE = ("cluster.runtime=inline", "cluster.pools={main: [1]}")
EACH = ("checkpoint.every_steps=2", "trainer.num_steps=8")
URL = "s3://lab/runs/a"
HERE = ("trainer.runs_dir=s3://lab/runs", "trainer.name=a")
LAST = "runs/a/checkpoints/step_000008/manifest.json"


@pytest.fixture(scope="module")
def patch():
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture(scope="module")
def server(patch):
    with served(patch) as door:
        yield door


@pytest.fixture
def door(server, tmp_path, monkeypatch):
    """The server, with an empty bucket; this process is in a folder of its own, as on a machine of its own."""
    import boto3

    server.fails = lambda method, path: None
    for key in keys():
        boto3.client("s3").delete_object(Bucket="lab", Key=key)
    move_to(tmp_path / "one", monkeypatch)
    return server


def move_to(folder, monkeypatch):
    """Go to another machine: another working directory, another cache, another user's keys."""
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    remote.here.cache_clear()


def train(*arguments, resume=False, recipe="digits"):
    said = io.StringIO()
    folder, finished = launch(recipe, [*arguments], Console(file=said, width=200), resume=resume)
    return folder, finished, said.getvalue()


@pytest.fixture(scope="module")
def untouched(tmp_path_factory):
    """The weights of a run of 8 steps that nobody touched."""
    where = tmp_path_factory.mktemp("untouched")
    folder, finished, _ = train(*TINY, *INLINE, *EACH, f"trainer.runs_dir={where}")
    assert finished
    return weights_of(folder)


def test_a_run_whose_machine_is_gone_goes_on_on_another_one_to_the_same_bits(door, runs, untouched, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setenv("RALLY_FAIL", "StepDone:step=6:hang")  # so that it is there to be killed
        process = runs.start("train", "digits", *TINY, *INLINE, *EACH, *HERE, "validation.every_steps=100")
    await_key(process, "runs/a/checkpoints/step_000002/manifest.json")
    process.kill()
    process.wait(60)
    whole = {key for key in keys() if key.endswith("manifest.json")}
    shutil.rmtree("runs")
    move_to(runs.folder / "two", monkeypatch)
    folder, finished, said = train(recipe=URL, resume=True)
    assert finished
    assert folder.path == runs.folder / "two" / "runs" / "a"
    assert weights_of(folder) == untouched, f"{said}, {whole}"
    assert LAST in keys()
    move_to(runs.folder / "three", monkeypatch)
    again, finished, said = train(recipe=URL, resume=True)
    assert (finished, weights_of(again)) == (True, untouched)
    assert "all 8 steps are done" in (again.logs / "train.log").read_text() + said


def await_key(process, key):
    deadline = time.monotonic() + 120
    while key not in keys():
        assert process.poll() is None, process.communicate(10)
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_errors_cuts_and_slow_answers_neither_hold_up_training_nor_lose_anything(door, untouched, monkeypatch):
    monkeypatch.setattr(remote, "_WAITS_S", (0.1,) * 4)
    hows, counted, lock = ["500", None, "cut", None, None, "slow", None], [0], threading.Lock()

    def fails(method, path):
        with lock:
            counted[0] += 1
            return hows[counted[0] % len(hows)]

    door.fails = fails
    folder, finished, said = train(*TINY, *INLINE, *EACH, *HERE)
    door.fails = lambda method, path: None
    assert finished, said
    assert weights_of(folder) == untouched
    local = {path.relative_to(folder.path).as_posix() for path in folder.checkpoints.rglob("*") if path.is_file()}
    assert local == {key.removeprefix("runs/a/") for key in keys() if "/checkpoints/" in key}
    assert counted[0] > 100


def test_a_run_goes_on_while_nobody_answers_and_all_is_sent_when_somebody_does(door, untouched, monkeypatch):
    """The server is away from step 1 until training has ended."""
    from rallypoint.run import mirror

    monkeypatch.setattr(mirror, "_AGAIN_S", 0.2)
    monkeypatch.setattr(remote, "_WAITS_S", (0.01,))
    door.fails = lambda method, path: "500" if method == "PUT" and not is_done.is_set() else None
    is_done, close = threading.Event(), mirror.Mirror.close

    def ended(self):
        is_done.set()
        close(self)

    monkeypatch.setattr(mirror.Mirror, "close", ended)
    folder, finished, _ = train(*TINY, *INLINE, *EACH, *HERE)
    assert finished
    assert weights_of(folder) == untouched
    assert LAST in keys()
    log = (folder.logs / "train.log").read_text()
    if "has all of the run again" in log:
        assert re.search(
            r"s3://lab/runs/a: .*training goes on, .*runs/a has all of it, and sending is tried again", log
        )


def test_what_is_at_a_url_is_listed_shown_exported_and_trained_on(door, untouched, tmp_path, monkeypatch, capsys):
    folder, *_ = train(*TINY, *INLINE, "trainer.num_steps=2", *HERE)
    move_to(tmp_path / "two", monkeypatch)
    _run_done("runs", "s3://lab/runs")
    assert re.search(r"^a +ppo +\S finished", capsys.readouterr().out, re.MULTILINE)
    _run_done("show", URL, "--best", "1")
    assert "score" in capsys.readouterr().out
    _run_done("view", URL, "--export", "page.html")
    assert folder.path.name in (tmp_path / "two/page.html").read_text()
    capsys.readouterr()
    answers = []
    for name in (URL, str(folder.path)):
        monkeypatch.setattr("sys.stdin", io.StringIO("493\n"))
        _run_done("chat", name, "--max-response-tokens", "5", "--temperature", "1")
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1] != ""
    _run_done("export", URL, "exported")
    assert (tmp_path / "two/exported/model.safetensors").read_bytes() == newest(folder, "model.safetensors")
    assert "digits" in (tmp_path / "two/exported/README.md").read_text()
    _run_done("eval", f"{URL}/checkpoints/step_000002", str(folder.data / "validation.parquet"))
    model = f"model.path={URL}/checkpoints/step_000002"
    more = [one for one in TINY if not one.startswith("model.create")]
    second, finished, said = train(*more, *INLINE, model, "trainer.num_steps=2", "trainer.name=b", "model.create=null")
    assert finished, said
    assert f"path: {URL}/checkpoints/step_000002" in (second.path / "config.yaml").read_text()


def _run_done(*arguments):
    with pytest.raises(SystemExit) as ended:
        _run(arguments)
    assert ended.value.code == 0


def newest(folder, name):
    step = checkpoint.steps(folder.checkpoints)[-1]
    return (folder.checkpoints / checkpoint.checkpoint_name(step) / name).read_bytes()


def test_a_model_that_is_cut_off_while_it_is_fetched_is_absent(door, tmp_path, monkeypatch):
    import boto3

    for name in ("config.json", "model.safetensors"):
        boto3.client("s3").put_object(Bucket="lab", Key=f"models/m/{name}", Body=b"{}")
    monkeypatch.setattr(remote, "_WAITS_S", (0.0,))
    door.fails = lambda method, path: "cut" if method == "GET" and path.endswith("safetensors") else None
    with pytest.raises(ModelError, match="s3://lab/models/m: cannot be fetched"):
        remote.here("s3://lab/models/m")
    assert [path for path in (tmp_path / "one" / "cache").rglob("*") if path.is_file()] == []
    door.fails = lambda method, path: None
    folder = remote.here("s3://lab/models/m")
    assert sorted(path.name for path in Path(folder).iterdir()) == ["config.json", "model.safetensors"]
    with pytest.raises(ModelError, match=r"s3://lab/none: cannot be fetched: .*no files are there"):
        remote.here("s3://lab/none")


def test_the_same_command_starts_and_goes_on_and_a_taken_name_is_refused(door, tmp_path, monkeypatch):
    _, finished, said = train(*TINY, *INLINE, "trainer.num_steps=2", *HERE, resume=True)
    assert finished
    assert "a new one begins" in said
    move_to(tmp_path / "two", monkeypatch)
    folder, finished, _ = train(*TINY, *INLINE, "trainer.num_steps=4", *HERE, resume=True)
    assert finished
    assert checkpoint.steps(folder.checkpoints)[-1] == 4
    move_to(tmp_path / "three", monkeypatch)
    with pytest.raises(Exception, match="s3://lab/runs/a is there already; resume it with"):
        train(*TINY, *INLINE, *HERE)
    with pytest.raises(ConfigError, match="is the folder of a run: resume it with --resume"):
        train(recipe=URL)
