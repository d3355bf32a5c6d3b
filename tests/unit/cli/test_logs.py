"""`rally logs`: what a run has said, what of it failed, and what it says from now on."""

import subprocess
import sys
import threading

import pytest
from typer.testing import CliRunner

from rallypoint.cli.main import app
from rallypoint.journal import Journal, RoleLost, RolloutFailed, RunBegan, RunEnded, Said, StepDone

BEGAN = RunBegan(first=0, config={}, software={}, machine="")
FAILED = RolloutFailed(prompt=3, sample=1, validation=None, num_turns=1, why="raised", reason="KeyError: 'a'")
ENDED = RunEnded(how="failed", why='Traceback (most recent call last):\n  File "a.py", line 3\nValueError: \x1b[2Jbad')
EVENTS = (
    BEGAN,
    Said(text="reading", level="wait"),
    Said(text="no validation: data.validation is not set"),
    StepDone(step=1, metrics={}, digests={}),
    FAILED,
    Said(text="the reward raised:\nTypeError: no text", level="log"),
    RoleLost(role="actor", rank=0, step=2, why="killed"),
    ENDED,
)


@pytest.fixture
def run(tmp_path):
    with Journal(tmp_path / "journal.jsonl") as journal:
        journal.append(*EVENTS)
    return tmp_path


def said(*arguments: object) -> list[str]:
    result = CliRunner().invoke(app, ["logs", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    return [line[20:] if line[:4].isdigit() else line for line in result.stdout.splitlines()]


def test_all_that_a_run_said_is_printed_with_its_step_and_cleaned(run):
    assert said(run) == [
        "step 1     begun after step 0",
        "step 1     no validation: data.validation is not set",
        "step 2     rollout failed, prompt 3, sample 1: raised: KeyError: 'a'",
        "step 2     the reward raised:",
        "  TypeError: no text",
        "step 2     lost actor rank 0: killed",
        "step 2     failed: Traceback (most recent call last):",
        '    File "a.py", line 3',
        "  ValueError: bad",
    ]


def test_errors_alone_are_what_failed_with_the_whole_traceback(run):
    found = said(run, "--errors")
    assert len(found) == 7
    assert found[0].startswith("step 2     rollout failed")
    assert found[-1] == "  ValueError: bad"


WRITER = """
import sys
from pathlib import Path
from rallypoint.journal import Journal, RunEnded, Said
from rallypoint.run.folder import RunFolder
run = RunFolder(Path(sys.argv[1]))
with run.locked(), Journal(run.journal) as journal:
    print("held", flush=True)
    sys.stdin.readline()
    journal.append(Said(text="later"))
    journal.append(RunEnded(how="finished"))
"""


def test_a_run_that_goes_on_is_followed_to_its_end(tmp_path):
    with Journal(tmp_path / "journal.jsonl") as journal:
        journal.append(BEGAN)
    command = [sys.executable, "-c", WRITER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdin is not None
        assert writer.stdout is not None
        assert writer.stdout.readline() == "held\n"
        found = list[str]()
        follower = threading.Thread(target=lambda: found.extend(said(tmp_path, "--follow")))
        follower.start()
        writer.stdin.write("\n")
        writer.stdin.flush()
        follower.join(60)
    assert found == ["step 1     begun after step 0", "step 1     later", "step 1     finished"]
