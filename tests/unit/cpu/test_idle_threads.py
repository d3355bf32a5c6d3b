"""Idle threads of OpenMP sleep in every process of a run, unless a user says otherwise."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = """
import os, sys
sys.path[:0] = {path!r}
from rallypoint.cluster.ray_process import RayWorkerProcess
RayWorkerProcess(2, "cpu", [], {forwarded!r})
assert "torch" not in sys.modules, "OpenMP has started before it could be told"
print(os.environ["OMP_WAIT_POLICY"])
"""
DRIVER = """
import os, sys
sys.path[:0] = {path!r}
from rallypoint.cluster.ray_process import forwarded_environment
print(forwarded_environment(os.environ).get("OMP_WAIT_POLICY"))
"""
OPENMP = """
import ctypes, sys
sys.path[:0] = {path!r}
import rallypoint
ctypes.CDLL({library!r})
"""


def python(code: str, policy: str | None = None, **more: object) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    return subprocess.run(
        [sys.executable, "-c", code.format(path=sys.path, **more)],
        env=kept | {"OMP_DISPLAY_ENV": "true"} | ({} if policy is None else {"OMP_WAIT_POLICY": policy}),
        capture_output=True,
        text=True,
        check=True,
    )


@pytest.mark.parametrize(("own", "found"), [(None, "passive"), ("active", "active"), ("", "")])
def test_a_worker_process_has_the_policy_before_torch_and_the_policy_of_its_node_wins(own: str | None, found: str):
    assert python(WORKER, own, forwarded={}).stdout.strip() == found


@pytest.mark.parametrize(("own", "found"), [(None, "None"), ("active", "active")])
def test_a_driver_sends_the_policy_to_other_nodes_only_if_the_user_has_chosen_it(own: str | None, found: str):
    assert python(DRIVER, own).stdout.strip() == found


def test_the_policy_that_a_user_gives_to_the_driver_wins_in_its_workers():
    assert python(WORKER, forwarded={"OMP_WAIT_POLICY": "active"}).stdout.strip() == "active"


@pytest.mark.parametrize(("own", "found"), [(None, "PASSIVE"), ("active", "ACTIVE")])
def test_openmp_reads_what_the_first_import_of_rallypoint_sets(own: str | None, found: str):
    places = importlib.util.find_spec("torch").submodule_search_locations
    libraries = [library for place in places for library in Path(place).glob("lib/libgomp*.so*")]
    if not libraries:
        pytest.skip("this torch has no libgomp, which is what prints its settings")
    assert f"OMP_WAIT_POLICY = '{found}'" in python(OPENMP, own, library=str(libraries[0])).stderr
