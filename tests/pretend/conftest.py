"""Everything here runs on the pretend device, in a process of its own: torch has one accelerator for good.

`tests/unit/test_pretend_device.py` starts these processes. By hand:

    RALLYPOINT_PRETEND=1 python -m pytest tests/pretend/test_device.py
"""

import gc
import os
import sys

import pytest
from pretend_device import install
from tiny_runs import Runs

from rallypoint.engine.determinism import prepare_process
from rallypoint.recipes import loop

IS_PRETEND = bool(os.environ.get("RALLYPOINT_PRETEND"))
collect_ignore_glob = [] if IS_PRETEND else ["test_*.py"]
if IS_PRETEND:
    install()
    prepare_process()


@pytest.fixture(autouse=True)
def pretend():
    """The device, with nothing counted yet; what went wrong on it where nothing could be raised fails the test."""
    device = install()
    device.reset()
    yield device
    device.check()


@pytest.fixture
def runs(tmp_path):
    """Runs that begin with a collection of garbage, which `bare_runs` leaves out: the device has little memory."""
    loop.gc.collect = gc.collect
    return Runs(tmp_path)


def pytest_unconfigure():
    """Leave at once: torch's threads of the device may be on their way into a Python that is being taken down."""
    if IS_PRETEND:
        sys.stdout.flush()
        os._exit(int(_ENDED[-1]) if _ENDED else 1)


_ENDED: list[int] = []


def pytest_sessionfinish(exitstatus):
    _ENDED.append(exitstatus)
