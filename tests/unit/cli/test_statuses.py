"""The exit status and the words of whatever goes wrong on the command line."""

import subprocess
import sys

import pytest

from rallypoint.cli.main import report
from rallypoint.errors import (
    ConfigError,
    NoPlaceError,
    PlacementError,
    RayLostError,
    RunFolderError,
    WorkerDiedError,
    WorkerError,
)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("trian", "digits"), "No such command 'trian'"),
        (("train",), "Missing argument 'RECIPE'"),
        (("train", "digits", "--resum"), "--resume"),
        (("chat", "x", "--temperature", "11"), "less than or equal to 10"),
        (("chat", "x", "--temperature", "1e-300"), "0 (greedy) or at least 0.001"),
        (("eval", "x", "y", "--temperature", "1e-300"), "0 (greedy) or at least 0.001"),
        (("eval", "x"), "Missing argument 'DATA"),
    ],
)
def test_a_wrong_command_line_ends_with_status_2_and_says_what_is_right(command, arguments, said):
    result = command(*arguments)
    assert result.exit_code == 2
    assert said in " ".join(result.output.split())


def test_the_real_command_ends_with_status_2_and_makes_nothing(process, tmp_path):
    done = process("train", "digits", "rollout.temprature=1", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[0] == "error: 1 problem in the config:"
    assert not list(tmp_path.iterdir())


def test_a_wrong_config_is_told_before_anything_heavy_is_imported():
    program = (
        "import sys\nfrom rallypoint.cli.main import _run\n"
        "try:\n    _run(['train', 'grpo', 'rollout.temprature=1'])\n"
        "except SystemExit as end:\n    print(end.code)\n"
        "heavy = {'torch', 'ray', 'transformers', 'numpy', 'pyarrow', 'pandas', 'huggingface_hub', 'starlette'}\n"
        "print(sorted(heavy & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["2", "[]"], done.stderr


def test_resuming_what_was_never_started_says_how_to_start_it(process, tmp_path):
    done = process("train", "digits", "--resume", cwd=tmp_path)
    assert done.returncode == 2
    assert "start one with `rally train digits`" in done.stderr
    assert not list(tmp_path.iterdir())


def test_the_folder_of_a_run_is_resumed_and_never_trained_anew(process, tmp_path):
    run = tmp_path / "runs" / "one"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text("base: digits\n")
    done = process("train", "runs/one", cwd=tmp_path)
    assert done.returncode == 2
    assert "resume it with --resume" in done.stderr
    assert [path.name for path in run.iterdir()] == ["config.yaml"]


def test_what_a_machine_did_has_status_75_so_that_a_scheduler_tries_again(capsys):
    assert report(WorkerDiedError("actor", 0, "update", "it was killed")) == 75
    assert report(RayLostError("Ray's raylet was killed")) == 75
    assert report(NoPlaceError("gave up after cluster.placement_timeout_s=600")) == 75
    assert "gave up after" in capsys.readouterr().err


def test_wrong_input_has_status_2_and_a_failure_status_1(capsys):
    assert report(ConfigError(("seed=-1: expected [0, 1]",))) == 2
    assert report(RunFolderError("runs/x is in use by process 7")) == 2
    assert report(PlacementError("no place")) == 1
    assert report(WorkerError("actor", 0, "update", "boom", "Traceback ...")) == 1
    died = WorkerDiedError("actor", 0, "update", "it was killed, as it was twice before")
    died.is_final = True
    assert report(died) == 1, "another try would end the same way"
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "seed=-1: expected [0, 1]" in captured.err
