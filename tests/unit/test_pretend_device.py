"""Whatever is asked of a GPU and needs none, in processes in which torch has a pretend one: see tests/pretend."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
FILES = sorted(path.relative_to(ROOT) for path in (ROOT / "tests" / "pretend").glob("test_*.py"))
FOR_GPUS = ("test_forward.py", "test_norm.py", "test_sleep.py")
"""Of tests/gpu, those that are small enough for a CPU and need no more of a GPU than that it is not one."""


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem.removeprefix("test_"))
def test_on_the_pretend_device(file):
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(file)]
    run(command)


def test_tests_for_gpus_run():
    files = [str(Path("tests", "gpu", name)) for name in FOR_GPUS]
    said = run([sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *files])
    assert "skipped" not in said


def run(command):
    environment = {**os.environ, "RALLYPOINT_PRETEND": "1", "OMP_NUM_THREADS": "1"}
    found = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout[-10_000:] + found.stderr[-2_000:]
    return found.stdout


def test_other_processes_do_not_have_it():
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is None or accelerator.type != "pretend"
