"""Joining a cluster that somebody else started, and leaving it as it was."""

import contextlib
import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import rallypoint
from rallypoint.cluster.ray_cluster import RayCluster, ray
from rallypoint.cluster.ray_probe import ProblemError, Versions, check_reachable, check_versions, resolve
from rallypoint.errors import ClusterError

spec = importlib.util.spec_from_file_location("two_nodes", Path(__file__).with_name("two_nodes.py"))
assert spec is not None
assert spec.loader is not None
fixture = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = fixture
spec.loader.exec_module(fixture)
two_nodes = fixture.two_nodes

TOKEN = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_ADDRESS")


@contextlib.contextmanager
def environment(changes: Mapping[str, str], home: Path) -> Iterator[None]:
    """No token and no address but those given, and another home folder."""
    before = dict(os.environ)
    for name in TOKEN:
        os.environ.pop(name, None)
    os.environ.update({"HOME": str(home), **changes})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


DRIVER = """
import json, os, signal, sys, time
from rallypoint.cluster.ray_cluster import RayCluster, ray
from ray.util.placement_group import placement_group

@ray.remote(num_cpus=1)
class Visitor:
    def where(self):
        import rallypoint
        return rallypoint.__version__, rallypoint.__file__, ray.util.get_node_ip_address()
    def pid(self):
        return os.getpid()

cluster = RayCluster.join(sys.argv[1], namespace="visit", say=print)
visitors = [Visitor.options(name=name, resources={name: 1}).remote() for name in ("head", "second")]
group = placement_group([{"CPU": 1}] * 2, strategy="STRICT_SPREAD")
ray.get(group.ready())
where = ray.get([visitor.where.remote() for visitor in visitors])
os.kill(ray.get(visitors[0].pid.remote()), signal.SIGKILL)
try:
    ray.get(visitors[0].pid.remote())
except ray.exceptions.RayActorError:
    time.sleep(0.5)  # Ray would print its line about the death by now
print(json.dumps({"is_local": cluster.is_local, "where": where, "names": ray.util.list_named_actors()}), flush=True)
sys.stdin.readline()
cluster.shutdown()
"""


def state() -> dict[str, object]:
    """What everybody on the cluster sees of it."""
    return {
        "named": ray.util.list_named_actors(all_namespaces=True),
        "groups": [group for group in ray.util.placement_group_table().values() if group["state"] != "REMOVED"],
        "free": {name: amount for name, amount in ray.available_resources().items() if "memory" not in name},
    }


@pytest.mark.slow  # tests/e2e/test_joined_cluster.py brings it for a run, and test_nodes.py leaves what it finds
def test_a_visitor_brings_its_rallypoint_to_nodes_without_it_and_leaves_the_cluster_as_it_was(two_nodes, tmp_path):
    said: list[str] = []
    with environment({**two_nodes.environment, "RAY_ADDRESS": two_nodes.address}, home=tmp_path):
        observer = RayCluster.join("auto", namespace="observer", say=said.append)
        visitor = subprocess.Popen(
            [sys.executable, "-c", DRIVER, two_nodes.address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
        )
    try:
        assert (observer.address, observer.namespace, observer.is_local) == (two_nodes.address, "observer", False)
        before = state()
        assert visitor.stdout is not None
        line = visitor.stdout.readline()
        during = state()
        rest, complaints = visitor.communicate("\n", timeout=60)
        assert (rest, complaints) == ("", ""), "a worker was killed, and Ray says nothing on the screen"
        answer = json.loads(line)
        assert answer["is_local"] is False
        assert answer["names"] == ["second"]
        assert [version for version, _, _ in answer["where"]] == [rallypoint.__version__] * 2
        assert [ip for _, _, ip in answer["where"]] == ["127.0.0.2", "127.0.0.3"]
        assert all("py_modules" in file for _, file, _ in answer["where"]), answer
        assert during != before
        deadline = time.monotonic() + 30
        while (after := state()) != before and time.monotonic() < deadline:
            time.sleep(0.1)
        assert after == before
        assert said == []
    finally:
        visitor.kill()
        observer.shutdown()
    assert not ray.is_initialized()


def test_what_is_no_cluster_is_said_at_once_and_what_does_not_answer_within_the_timeout():
    said: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(ClusterError, match=rf"127.0.0.1:{port} has not answered for 1 s.*it hangs, or"):
            RayCluster.join(f"127.0.0.1:{port}", namespace="never", say=said.append, timeout_s=1)
    assert said
    assert all(line.startswith(f"waiting for the Ray cluster at 127.0.0.1:{port} to answer for") for line in said)
    with pytest.raises(ClusterError, match=rf"there is no Ray cluster at 127.0.0.1:{port}: .*refused"):
        RayCluster.join(f"127.0.0.1:{port}", namespace="never", say=print)


@pytest.mark.parametrize(
    ("address", "problem"),
    [
        ("ray://head:10001", "client server or a dashboard; give the address of the cluster itself.*host:6379"),
        ("http://head:8265", "client server or a dashboard"),
        ("head", "'head' is not host:port"),
        ("head:port", "is not host:port"),
        ("nowhere.invalid:6379", "no Ray cluster at nowhere.invalid:6379"),
    ],
)
def test_an_address_that_cannot_be_right_is_explained(address, problem):
    with pytest.raises(ProblemError, match=problem):
        check_reachable(address)


def test_other_versions_of_ray_and_python_are_refused_and_both_sides_named():
    own = Versions("2.60.0", "3.11.7")
    check_versions(Versions("2.60.0", "3.11.7"), own)
    for cluster in (Versions("2.59.0", "3.11.7"), Versions("2.60.0", "3.12.7"), Versions("2.60.0", "3.11.9")):
        with pytest.raises(ProblemError) as caught:
            check_versions(cluster, own)
        assert f"the cluster runs {cluster}, this program Ray 2.60.0 and Python 3.11.7" in str(caught.value)
        assert f"pip install 'ray=={cluster.ray}' under Python {cluster.python}" in str(caught.value)


def test_auto_means_the_named_then_the_recorded_then_the_only_cluster_and_never_any_of_several():
    assert resolve("a:1", named="b:1", recorded="c:1", running=["d:1"]) == "a:1"
    assert resolve("auto", named="b:1", recorded="c:1", running=["d:1"]) == "b:1"
    assert resolve("auto", named=None, recorded="c:1", running=["c:1", "d:1"]) == "c:1"
    assert resolve("auto", named=None, recorded="stale:1", running=["d:1"]) == "d:1"
    with pytest.raises(ProblemError, match="several Ray clusters run on this machine: d:1, e:1; name one"):
        resolve("auto", named=None, recorded=None, running=["e:1", "d:1"])
    with pytest.raises(ProblemError, match=r"no Ray runs on this machine.*ray start --head"):
        resolve("auto", named=None, recorded=None, running=[])
