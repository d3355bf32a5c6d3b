"""What is wrong with Ray's own daemons is seen without asking Ray; ordinary daemons stand in for them."""

import os
import signal
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest

from rallypoint.cluster.ray_daemons import RayDaemons

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="daemons are looked up in /proc")


@pytest.fixture
def ray(tmp_path):
    """A raylet and a GCS that only sleep, and Ray's account of them."""
    started = {name: subprocess.Popen(["sleep", "600"]) for name in ("raylet", "gcs_server")}
    node = SimpleNamespace(
        all_processes={name: [SimpleNamespace(process=process)] for name, process in started.items()},
        raylet_socket_name=str(tmp_path / "raylet"),
    )
    yield SimpleNamespace(node=node, raylet=started["raylet"], gcs=started["gcs_server"], logs=tmp_path)
    for process in started.values():
        process.kill()
        process.wait()


def settled(process, how):
    """Send a signal, and return when it has had its effect."""
    process.send_signal(how)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WSTOPPED | os.WNOWAIT)


def test_what_was_killed_or_stopped_is_named_and_what_runs_is_not(ray):
    daemons = RayDaemons(ray.node, ray.logs)
    assert daemons.fault() is None
    settled(ray.gcs, signal.SIGSTOP)
    found = daemons.fault()
    assert (str(found), found.is_gone, found.is_raylet) == (
        f"Ray's GCS (pid {ray.gcs.pid}) is stopped",
        False,
        False,
    )
    settled(ray.raylet, signal.SIGSTOP)
    found = daemons.fault()
    assert (str(found), found.is_gone, found.is_raylet) == (
        f"Ray's raylet (pid {ray.raylet.pid}) is stopped",
        False,
        True,
    )
    settled(ray.raylet, signal.SIGKILL)
    found = daemons.fault()
    assert (str(found), found.is_gone) == (f"Ray's raylet (pid {ray.raylet.pid}) was killed by signal 9", True)
    assert daemons.why_workers_ended() == str(found)


def test_a_raylet_that_ends_because_of_an_agent_names_it_even_before_it_has_ended(ray):
    reason = "dashboard_agent failed and raylet fate-shares with it."
    (ray.logs / "raylet.out").write_text(f'[info] node death\nreason_message: "{reason}"\n[info] bye\n')
    daemons = RayDaemons(ray.node, ray.logs)
    assert daemons.why_workers_ended() == f"Ray's raylet is ending: {reason}"
    settled(ray.raylet, signal.SIGTERM)
    assert str(daemons.fault()) == f"Ray's raylet (pid {ray.raylet.pid}) was killed by signal 15: {reason}"


def test_of_a_cluster_that_was_joined_the_raylet_of_this_machine_is_found_by_its_socket(ray):
    ray.node.all_processes = {}
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(ray.node.raylet_socket_name)
        server.listen()
        daemons = RayDaemons(ray.node, None)
    assert [(one.name, one.pid) for one in daemons._processes] == [("raylet", os.getpid())]
    assert daemons.fault() is None
    assert RayDaemons(SimpleNamespace(all_processes={}, raylet_socket_name="/nowhere"), None).fault() is None
