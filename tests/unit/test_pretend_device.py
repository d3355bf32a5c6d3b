"""Whatever is asked of a GPU and needs none, in processes in which torch has a pretend one: see tests/pretend."""

from pathlib import Path

import pytest
import torch
from forks import run_forked

pytestmark = pytest.mark.timeout(300)

ROOT = Path(__file__).parents[2]
FOR_GPUS = ("test_forward.py", "test_norm.py", "test_sleep.py")
"""Of tests/gpu, those that are small enough for a CPU and need no more of a GPU than that it is not one."""
LONG = ("test_training.py", "test_rollouts.py", "test_waits.py")
"""The files that take most of the time."""


@pytest.mark.parametrize("name", LONG)
def test_on_the_pretend_device(name):
    assert "skipped" not in run(ROOT / "tests" / "pretend" / name)


def test_on_the_pretend_device_with_tests_for_gpus():
    pretend = (path for path in sorted((ROOT / "tests" / "pretend").glob("test_*.py")) if path.name not in LONG)
    assert "skipped" not in run(*pretend, *(ROOT / "tests" / "gpu" / name for name in FOR_GPUS))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_on_the_pretend_device_what_takes_long():
    assert "skipped" not in run("-m", "slow", *(ROOT / "tests" / "pretend").glob("test_*.py"))


def run(*files):
    """Run files of tests in a process of their own, and return what it printed."""
    program = "import sys, pytest; sys.exit(pytest.main(sys.argv[1:]))"
    found = run_forked("-c", program, "-p", "no:cacheprovider", *map(str, files), cwd=ROOT, RALLYPOINT_PRETEND="1")
    assert found.returncode == 0, found.stdout[-10_000:] + found.stderr[-2_000:]
    return found.stdout


def test_other_processes_do_not_have_it():
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    assert accelerator is None or accelerator.type != "pretend"
