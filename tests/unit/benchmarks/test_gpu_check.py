"""`make gpu-check` keeps its time, says what it left out, and ends with a status that tells these apart."""

import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rallypoint.config import load_config

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "benchmarks" / "gpu_check.py"
ABSENT = ("ray", "starlette", "uvicorn", "matplotlib", "beartype")
"""Packages that a machine with a GPU need not have."""


@pytest.fixture(scope="module")
def check():
    sys.path.append(str(SCRIPT.parent))
    try:
        return importlib.import_module("gpu_check")
    finally:
        sys.path.remove(str(SCRIPT.parent))


@pytest.fixture
def run(check, tmp_path):
    """A function that runs a program as a part, with so many seconds left in all."""

    def run_one(program, *, left_s=1000.0, deadline_s=60.0):
        part = check.Part("part", ("-c", program, str(tmp_path / "part.json")), deadline_s)
        return check.run(part, check.Budget(left_s, began=time.monotonic()), tmp_path, {**os.environ})

    return run_one


WRITES = "import sys; open(sys.argv[1], 'a').write('{\"speed\": 2.5}\\n'); "


def test_a_part_that_leaves_figures_is_right(run, check):
    outcome = run(WRITES)
    assert (outcome.status, outcome.rows) == ("right", [{"speed": 2.5}])
    assert check.status_of([outcome]) == check.RIGHT


def test_a_part_that_fails_says_its_last_line_and_keeps_what_it_had(run, check):
    outcome = run(WRITES + "raise SystemExit('out of memory')")
    assert (outcome.status, outcome.note, outcome.rows) == ("wrong", "out of memory", [{"speed": 2.5}])
    assert check.status_of([outcome]) == check.WRONG


def test_a_part_that_leaves_no_figures_is_wrong(run):
    assert run("print('nothing')").status == "wrong"


def test_a_part_that_hangs_is_stopped_with_what_it_started(run, check):
    outcome = run("import subprocess, time; subprocess.run(['sleep', '600'])", deadline_s=0.5)
    assert (outcome.status, outcome.note) == ("late", "stopped after 0 s")
    assert check.status_of([outcome]) == check.WRONG


def test_what_there_is_no_time_for_is_skipped_and_said(run, check):
    outcome = run(WRITES, left_s=5.0)
    assert (outcome.status, outcome.note) == ("skipped", "5 s of 5 were left")
    assert check.status_of([outcome]) == check.NO_TIME


def test_a_gpu_gets_every_test_file_and_both_models_within_eight_minutes(check, tmp_path):
    groups = [*check.parts("cuda", tmp_path)]
    names = [part.name for group in groups for part in group]
    assert {file.stem for file in (ROOT / "tests" / "gpu").glob("test_*.py")} < set(names)
    figures = [f"update-{size}-{keeps}" for size in ("0.6B", "1.7B") for keeps in ("checkpoint", "keep")]
    assert {*figures, "rollouts-0.6B", "rollouts-1.7B", "parity"} < set(names)
    assert not any(name.startswith("run-") for name in names)
    help_text = subprocess.run([sys.executable, SCRIPT, "--help"], capture_output=True, text=True, check=True).stdout
    assert "at most eight minutes" in help_text


def test_two_devices_share_runs_in_every_way(check, tmp_path):
    runs = {part.name: part for [part, *_] in check.parts("cuda", tmp_path, over_two=True) if part.name[:4] == "run-"}
    assert runs.keys() == {"run-dp_shard", "run-tp", "run-sp", "run-cp", "run-two-pools"}
    for name, part in runs.items():
        keys = part.arguments[part.arguments.index("--keys") + 1 : part.arguments.index("--json")]
        assert keys == check.OVER_TWO[name.removeprefix("run-")]
        load_config("gsm8k-grpo", ["cluster.device=cuda", "model.path=Qwen/Qwen3-0.6B", *keys], draft=True)


def test_the_report_has_a_line_for_each_part_and_a_table_for_each_kind_of_figures(check):
    found = {"device": "cuda", "name": "H100", "memory_gib": 80.0, "python": "3.12", "torch": "2.11"}
    figures = {"model": "0.6B", "tokens_per_s": 1234.5678}
    rows = [check.Outcome(name, "right", 2.0, [figures]) for name in ("one", "two")]
    text = check.table_of(found, [*rows, check.Outcome("three", "skipped", 0.0, [], "no time")])
    assert text.splitlines()[0] == "cuda: H100, 80 GiB; python 3.12, torch 2.11"
    assert "skipped     0.0 s  three: no time" in text
    assert text.count("| part | model | tokens_per_s |") == 1
    assert "| two | 0.6B | 1235 |" in text


def without(packages, folder):
    """The environment of a Python that lacks packages."""
    lines = [f"sys.modules[{name!r}] = None" for name in packages]
    (folder / "sitecustomize.py").write_text("\n".join(["import sys", *lines]))
    return {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}


def run_script(*arguments, environment):
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_without_a_gpu_it_is_said_in_a_line_with_a_status_of_its_own(tmp_path):
    done = run_script("--out", str(tmp_path / "out"), environment=without(ABSENT, tmp_path))
    assert (done.returncode, done.stderr) == (3, "")
    assert done.stdout.startswith("no GPU: torch ")
    assert done.stdout.count("\n") == 1


def test_a_package_that_is_missing_is_named(tmp_path):
    done = run_script("--out", str(tmp_path / "out"), environment=without((*ABSENT, "pydantic"), tmp_path))
    assert done.returncode == 1
    assert "lacks pydantic: install them, or carry wheels (CONTRIBUTING.md)" in done.stdout


@pytest.mark.slow
def test_all_of_it_runs_tiny_on_a_cpu_without_ray(tmp_path):
    done = run_script("--device", "cpu", "--out", str(tmp_path / "out"), environment=without(ABSENT, tmp_path))
    assert done.returncode == 0, done.stdout
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    kinds = {part["part"]: part["rows"] for part in report["parts"]}
    updates = {f"update-tiny-{what}" for what in ("checkpoint", "keep", "any-order", "ragged")}
    assert kinds.keys() == {
        "gpu",
        "parity",
        "kernels",
        "prefill",
        "run",
        "rollouts-tiny",
        "rollouts-adapters",
        "rollouts-experts",
        *updates,
    }
    assert all(part["status"] == "right" and part["rows"] for part in report["parts"])
    assert kinds["gpu"][0]["failed"] == 0
    assert kinds["update-tiny-keep"][0]["peak_gib"] is None
    assert (tmp_path / "out" / "report.txt").read_text() in done.stdout
