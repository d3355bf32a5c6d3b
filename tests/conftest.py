"""Settings for every test: algorithms check shapes at each call, hypothesis has no deadline, workers share the files.

With `pytest --numprocesses=N` each worker process takes whole files, so that a module's fixtures are made once. Files
are dealt in the order of collection, which begins with the folders that take longest.
"""

import os
import signal
import sys
from pathlib import Path

import pytest
from hypothesis import settings
from jaxtyping import install_import_hook

assert "rallypoint.algorithms" not in sys.modules, "the hook must come before the first import"
install_import_hook("rallypoint.algorithms", "beartype.beartype")

# One thread for each test process and the programs that it starts: read when torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Ignored under nohup, and the programs that tests start would inherit that.
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Processes of Ray import the test that they belong to, with what it imports.
paths = (str(Path(__file__).with_name("shared")), os.environ.get("PYTHONPATH"))
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))

# Machines are shared and the first example of a run pays for lazy imports, so no example is timed.
settings.register_profile("rallypoint", deadline=None)
settings.load_profile("rallypoint")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Deal files, in the order of collection."""
    from xdist.scheduler import LoadFileScheduling

    config.option.loadscopereorder = False
    return LoadFileScheduling(config, log)
