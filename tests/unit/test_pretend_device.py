"""Whatever is asked of a GPU and needs none, in processes in which torch has a pretend one: see tests/pretend."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
FILES = sorted(path.relative_to(ROOT) for path in (ROOT / "tests" / "pretend").glob("test_*.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem.removeprefix("test_"))
def test_on_the_pretend_device(file):
    environment = {**os.environ, "RALLYPOINT_PRETEND": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(file)]
    found = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout[-10_000:] + found.stderr[-2_000:]


def test_other_processes_do_not_have_it():
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is None or accelerator.type != "pretend"
