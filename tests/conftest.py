"""Settings for every test: algorithms check shapes where they are tested, no deadline, workers share the files.

With `pytest --numprocesses=N` each worker takes whole files, so that a module's fixtures are made once, and one of them
takes `tests/cluster`, whose modules share a Ray cluster. Files marked `lasting_ray` are dealt one after another, so
that they share one, too; of these, and then of the others, the longest come first, as `durations.json` has them. To
record the durations anew, on a machine with nothing else to do: `make test DURATIONS=tests/durations.json`.
"""

import atexit
import collections
import faulthandler
import gc
import importlib
import json
import os
import re
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import pytest
from _pytest.assertion import rewrite
from _pytest.doctest import DoctestModule
from _pytest.faulthandler import fault_handler_stderr_fd_key
from hypothesis import settings
from jaxtyping import config as checks_of_shapes, install_import_hook
from skips import refuse_skip

if "RALLYPOINT_PRETEND" not in os.environ:  # in a fork of a process that has imported them
    assert "rallypoint.algorithms" not in sys.modules, "the hook must come before the first import"
    install_import_hook("rallypoint.algorithms", "checked_functions.checked")

# No garbage is collected until all tests are: what is imported stays, and looking through it takes a fifth of the time.
gc.disable()

# One thread for each test process and the programs that it starts: read when torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Workers of Ray clusters that tests start themselves would wait for all other tests: ours have this by themselves.
os.environ.setdefault("RAY_worker_niceness", "0")

# Ignored under nohup, and the programs that tests start would inherit that.
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# readline sets them in the process that starts workers, and a program in a terminal would ignore the terminal's size.
for name in ("COLUMNS", "LINES"):
    os.environ.pop(name, None)

# What one process of the tests has counted, others need not count again: see `bare_runs`.
if "RALLYPOINT_TEST_COUNTED" not in os.environ:
    os.environ["RALLYPOINT_TEST_COUNTED"] = tempfile.mkdtemp(prefix="counted-")
    atexit.register(shutil.rmtree, os.environ["RALLYPOINT_TEST_COUNTED"], ignore_errors=True)

# Processes of Ray import the test that they belong to, with what it imports.
paths = (str(Path(__file__).with_name("shared")), os.environ.get("PYTHONPATH"))
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))

# Machines are shared and the first example of a run pays for lazy imports, so no example is timed. Each run draws other
# examples, so that a few are enough; `make test-slow` asks for as many as hypothesis would draw.
settings.register_profile("rallypoint", deadline=None, max_examples=12)
settings.register_profile("thorough", deadline=None, max_examples=100)
settings.load_profile("rallypoint")


DURATIONS = json.loads(Path(__file__).with_name("durations.json").read_text())
"""Seconds that the parts of `part_of` took, each in one worker of `make test`."""
UNKNOWN_S = {"tests/e2e": 30.0, "tests/distributed": 30.0}
"""What is assumed of a new file, by folder; elsewhere it is a second."""


def part_of(nodeid):
    """Return what one worker takes as a whole: a file, all of tests/cluster, or one test of the pretend device."""
    file = nodeid.partition("::")[0]
    if file == "tests/unit/test_pretend_device.py":
        return nodeid
    return "tests/cluster" if file.startswith("tests/cluster/") else file


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    sharing = {part_of(item.nodeid) for item in items if item.get_closest_marker("lasting_ray") is not None}

    def place(item):
        part = part_of(item.nodeid)
        seconds = DURATIONS.get(part, UNKNOWN_S.get(part.rpartition("/")[0], 1.0))
        return part not in sharing, -seconds, part, item.get_closest_marker("lasting_ray") is None

    items.sort(key=place)


CHECKED = ("tests/unit/algorithms/", "src/rallypoint/algorithms/", "tests/e2e/test_golden_bits.py")
"""Where each call of an algorithm has its shapes and types checked, which takes most of the call: their own tests, and
whole runs that call them as recipes do."""
OVER_AND_OVER = re.compile(
    r"/test_gradients\.py|/test_kl_of_any_sampler\.py|/test_conformance\.py::test_.*_keeps?_to_"
    r"|/test_sequences\.py::test_a_rollout_cut_.*-(sequence|fixed_length|prompt)-"
)
"""Of these tests, those that call hundreds of times what others have checked."""


class CheckedShapes:
    """Checks shapes where `CHECKED` says so."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item):
        is_checked = item.nodeid.startswith(CHECKED) and not OVER_AND_OVER.search(item.nodeid)
        checks_of_shapes.update("jaxtyping_disable", not is_checked)


class WithDoctests:
    """Looks for doctests only where there are some: each worker would look through every object of 800 files."""

    @pytest.hookimpl(wrapper=True)
    def pytest_collect_file(self, file_path, parent):
        found = yield
        if file_path.suffix != ".py" or parent.session.isinitpath(file_path) or b">>>" in file_path.read_bytes():
            return found
        return [one for one in found if not isinstance(one, DoctestModule)]


def pytest_configure(config):
    for plugin in (CheckedShapes(), WithDoctests()):  # as hooks of this file are not asked about src
        config.pluginmanager.register(plugin)
    server = importlib.import_module("fork_server")
    server.fork_context()
    if config.getoption("numprocesses", None):  # this process starts those that test, and collects none
        gc.enable()
        compile_tests(config)
        importlib.import_module("ray_forks").share()
        server.share()


def compile_tests(config):
    """Compile the files of tests as pytest reads them, over all cores; each worker would compile all, at the same time.

    In a checkout whose tests have run these are there already. What cannot be compiled is reported by the workers.
    """
    files = sorted(path for name in ("test_*.py", "conftest.py") for path in Path(__file__).parent.rglob(name))
    num_parts = 0 if sys.dont_write_bytecode else os.cpu_count() or 1
    parts = []
    for part in range(num_parts):
        if (process := os.fork()) == 0:
            try:
                for file in files[part::num_parts]:
                    compile_test(config, file)
            finally:
                os._exit(0)
        parts.append(process)
    for process in parts:
        os.waitpid(process, 0)


def compile_test(config, file):
    folder = rewrite.get_cache_dir(file)
    compiled = folder / f"{file.stem}{rewrite.PYC_TAIL}"
    if rewrite.try_makedirs(folder) and rewrite._read_pyc(file, compiled) is None:
        source_hash, code = rewrite._rewrite_test(file, config)
        rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, source_hash, compiled)


SECONDS = collections.Counter()


def pytest_runtest_logreport(report):
    SECONDS[part_of(report.nodeid)] += report.duration


def pytest_sessionfinish(session):
    """Record what every part took, where the run is to be an example for later ones."""
    into = os.environ.get("DURATIONS")
    if into and not hasattr(session.config, "workerinput"):
        seconds = {part: round(took, 1) for part, took in sorted(SECONDS.items()) if took >= 1}
        Path(into).write_text(json.dumps(seconds, indent=4) + "\n")


def pytest_collection_finish():
    """Have runs and learners do what is tested, see `bare_runs`, if there are any.

    And leave what was imported out of later collections of garbage, which would look through all of it.
    """
    if {"rallypoint.recipes.ending", "rallypoint.roles.learner"} & sys.modules.keys():
        importlib.import_module("bare_runs").leave_out()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """End this process a minute after a test should have ended: where C code waits, no timeout can be raised."""
    mark = item.get_closest_marker("timeout")
    limit_s = float(mark.args[0] if mark else item.config.getini("timeout"))
    if not item.config.getoption("usepdb"):
        into = item.config.stash.get(fault_handler_stderr_fd_key, 2)  # where it is not captured
        faulthandler.dump_traceback_later(limit_s + 60, file=into, exit=True)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item, nextitem):
    """End a Ray that tests have shared after the last one that may use it."""
    result = yield
    if shared := sys.modules.get("lasting_ray"):
        shared.end_before(nextitem, item.session)
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport():
    report = yield
    refuse_skip(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report():
    report = yield
    refuse_skip(report)
    return report


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Deal parts, see `part_of`, in the order of the tests."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid):
            return part_of(nodeid)

        def remove_node(self, node):
            """Have other workers do what is left, but not the test in which one has ended: it might end them all."""
            left = ((part, test) for part in self.assigned_work[node].values() for test in part if not part[test])
            part, test = next(left, ({}, None))
            part[test] = True
            super().remove_node(node)
            return test

    config.option.loadscopereorder = False
    return Scheduling(config, log)
