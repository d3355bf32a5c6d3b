"""A cluster of our own: closed to others, quiet, and gone without a trace however its driver ends."""

import contextlib
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from rallypoint.cluster import reaper
from rallypoint.cluster.ray_cluster import RayCluster
from rallypoint.errors import ClusterError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

DRIVER = """
import json, os, signal, sys, time
from pathlib import Path
from rallypoint.cluster import reaper
from rallypoint.cluster.ray_cluster import RayCluster, ray

@ray.remote
class Worker:
    def here(self):
        return os.environ[reaper.MARK], os.getpid(), os.getpriority(os.PRIO_PROCESS, 0)
    def child(self):  # as a reward function may leave one
        import subprocess
        return subprocess.Popen(["sleep", "1000"]).pid

def start():
    return RayCluster.start_local(log_folder=Path(sys.argv[1]), object_store_gib=0.1, say=print)

environment = dict(os.environ)
cluster = start()
changed = {name for name in environment.keys() | os.environ if environment.get(name) != os.environ.get(name)}
worker, victim = Worker.options(name="worker").remote(), Worker.remote()
child = ray.get(worker.child.remote())
mark, pid, niceness = ray.get(worker.here.remote())
os.kill(ray.get(victim.here.remote())[1], signal.SIGKILL)
try:
    ray.get(victim.here.remote())
except ray.exceptions.RayActorError:
    time.sleep(0.5)  # Ray would print its line about the death by now
forked = os.fork()  # holds every file of the driver open, the reaper's pipe too
if not forked:
    signal.pause()
print(json.dumps({
    "address": cluster.address, "namespace": cluster.namespace, "is_local": cluster.is_local, "mark": mark,
    "worker": pid, "child": child, "forked": forked, "niceness": niceness, "changed": sorted(changed),
}), flush=True)
sys.stdin.readline()
print(ray.get(worker.here.remote())[1], flush=True)
cluster.shutdown()
os.kill(forked, signal.SIGKILL)
second = start()
print(second.namespace, ray.get(Worker.remote().here.remote())[0], flush=True)
second.shutdown()
"""


class Driver:
    """A program that started a cluster, and what it said about it."""

    def __init__(self, folder: Path) -> None:
        self.logs = folder
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", DRIVER, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.process.communicate()[1]
        self.facts: dict[str, Any] = json.loads(line)
        self.private_folder = (folder / "ray").readlink().parents[2]  # of its "ray/session_latest/logs"

    def processes(self) -> set[int]:
        return marked(self.facts["mark"])

    def reaper(self) -> set[int]:
        return {
            pid for pid, words in command_lines().items() if reaper.__file__ in words and self.facts["mark"] in words
        }


def command_lines() -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for folder in Path("/proc").iterdir():
        try:
            found[int(folder.name)] = (folder / "cmdline").read_text().split("\0")
        except (ValueError, OSError):
            continue
    return found


def marked(mark: str) -> set[int]:
    """Processes that were started with that mark; found otherwise than by the reaper: they are looked up as text."""
    found: set[int] = set()
    for folder in Path("/proc").iterdir():
        try:
            if f"{reaper.MARK}={mark}\0".encode() in (folder / "environ").read_bytes():
                found.add(int(folder.name))
        except (ValueError, OSError):
            continue
    return found


def listeners(processes: set[int]) -> dict[str, set[int]]:
    """Addresses, in the kernel's notation, on which these processes listen."""
    owners: dict[str, int] = {}
    for pid in processes:
        with contextlib.suppress(FileNotFoundError):  # an idle worker may end at any time
            for link in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(FileNotFoundError):
                    owners[os.readlink(link)] = pid
    found: dict[str, set[int]] = {}
    for table in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, status, *rest = line.split()
            pid = owners.get(f"socket:[{rest[5]}]")
            if pid is not None and (status == "0A" or table.startswith("udp")):
                found.setdefault(local.rpartition(":")[0], set()).add(pid)
    return found


@pytest.fixture(scope="module")
def drivers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Driver, Driver]]:
    """Two programs, each with a cluster of its own, on one machine at one time."""
    with ThreadPoolExecutor() as pool:
        first, second = pool.map(Driver, [tmp_path_factory.mktemp(name) for name in ("first", "second")])
    yield first, second
    for driver in (first, second):
        driver.process.kill()
        with contextlib.suppress(ProcessLookupError):
            os.kill(driver.facts["forked"], signal.SIGKILL)
        driver.process.communicate()


def test_everything_of_a_local_cluster_listens_on_loopback_only(drivers: tuple[Driver, Driver]):
    loopback = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}
    for driver in drivers:
        found = listeners(driver.processes() | {driver.process.pid})
        assert set(found) <= loopback, found
        num_listening = len(set.union(*found.values()))
        assert num_listening >= 4, "the driver, the control service, the node's service and a worker listen"


def test_a_missing_or_wrong_token_is_named_with_the_place_where_it_was_looked_for(drivers, tmp_path, monkeypatch):
    def refusal(**token: str) -> str:
        with monkeypatch.context() as patch:
            for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
                patch.delenv(name, raising=False)
            for name, value in {"HOME": str(tmp_path), **token}.items():
                patch.setenv(name, value)
            with pytest.raises(ClusterError) as caught:
                RayCluster.join(drivers[0].facts["address"], namespace="intruder", say=print)
        return str(caught.value)

    wrong = tmp_path / "wrong"
    wrong.write_text("0" * 64)
    assert "wants another token than none: set RAY_AUTH_TOKEN" in refusal()
    assert f"wants another token than that in {wrong}" in refusal(RAY_AUTH_TOKEN_PATH=str(wrong))
    assert "wants another token than that in RAY_AUTH_TOKEN" in refusal(RAY_AUTH_TOKEN="1" * 64)
    assert f"there is no token in {tmp_path / 'gone'}" in refusal(RAY_AUTH_TOKEN_PATH=str(tmp_path / "gone"))
    assert f"there is no token in {tmp_path / '.ray' / 'auth_token'}" in refusal(RAY_AUTH_MODE="token")


def test_nobody_else_can_read_the_token(drivers: tuple[Driver, Driver]):
    driver = drivers[0]
    folder = driver.private_folder
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "token").stat().st_mode) == 0o600
    tokens = {(each.private_folder / "token").read_text() for each in drivers}
    assert {len(token) for token in tokens} == {64}
    assert len(tokens) == 2, "fresh for every run"
    assert not any(token in " ".join(words) for token in tokens for words in command_lines().values())


def test_the_settings_reach_the_workers_and_leave_the_drivers_environment_as_it_was(drivers: tuple[Driver, Driver]):
    for driver in drivers:
        facts = driver.facts
        assert facts["is_local"] is True
        assert facts["niceness"] == os.getpriority(os.PRIO_PROCESS, 0)
        assert facts["changed"] == []
        assert (driver.logs / "ray" / "raylet.out").is_file()
    assert drivers[0].facts["namespace"] != drivers[1].facts["namespace"]


def test_nothing_is_started_that_prints_logs_asks_for_machines_or_shows_a_page(drivers):
    mark = drivers[0].facts["mark"]
    words = " ".join(word for pid, words in command_lines().items() if pid in marked(mark) for word in words)
    assert "gcs_server" in words
    assert not [name for name in ("log_monitor.py", "autoscaler", "dashboard.py") if name in words]


def test_a_killed_driver_leaves_nothing_after_ten_seconds_and_other_clusters_are_not_touched(
    drivers: tuple[Driver, Driver],
):
    killed, other = drivers
    facts, bystanders = killed.facts, other.processes()
    assert {facts["worker"], facts["child"]} < killed.processes()
    assert len(killed.reaper()) == 1
    os.kill(killed.process.pid, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while (killed.processes() or killed.reaper()) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert killed.processes() == set()
    assert killed.reaper() == set()
    os.kill(facts["forked"], signal.SIGKILL)  # still there: what the driver forked is not Ray's, and not ours to end
    assert not killed.private_folder.exists()
    assert not [name for name in os.listdir("/dev/shm") if facts["mark"] in name or "plasma" in name]
    host, _, port = facts["address"].partition(":")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)))
    logs = killed.logs / "ray"
    assert not logs.is_symlink()
    assert (logs / "raylet.out").is_file()
    assert "processes behind, which were ended" in (logs / "reaper.log").read_text()
    assert other.processes() == bystanders


def test_after_shutdown_nothing_is_left_and_the_same_program_can_start_another(drivers: tuple[Driver, Driver]):
    driver = drivers[1]
    output, complaints = driver.process.communicate("\n", timeout=120)
    worker, second = output.splitlines()
    assert int(worker) == driver.facts["worker"], "it still works after the other cluster's end"
    assert complaints == "", "a worker was killed, and Ray says nothing on the screen"
    namespace, mark = second.split()
    assert namespace == f"rallypoint-{mark}"
    assert mark != driver.facts["mark"]
    assert driver.process.returncode == 0
    assert (driver.processes() | marked(mark), driver.reaper()) == (set(), set())
    assert not driver.private_folder.exists()
    assert not driver.private_folder.with_name(f"rally-{mark}").exists()
    logs = driver.logs / "ray"
    assert not logs.is_symlink()
    assert (logs / "raylet.out").is_file()
    assert not (logs / "reaper.log").exists()


def test_a_thread_that_may_end_before_the_program_cannot_start_a_cluster(tmp_path: Path):
    caught: list[BaseException] = []

    def start() -> None:
        try:
            RayCluster.start_local(log_folder=tmp_path, object_store_gib=0.1, say=print)
        except ClusterError as error:
            caught.append(error)

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    assert "start it from the main thread" in str(caught[0])
    assert list(tmp_path.iterdir()) == []


def test_the_reaper_ends_what_is_marked_or_writes_logs_the_stubborn_ones_too_and_nobody_else(tmp_path):
    stubborn = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); signal.pause()"
    mark = f"test-{os.getpid()}"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {stubborn!r}])"
    opening = "import os, sys; held = os.open(sys.argv[1], int(sys.argv[2]) | os.O_CREAT); "
    writes, log, of_driver = str(os.O_WRONLY), str(tmp_path / "raylet.out"), str(tmp_path / "python-core-driver_0.log")
    ended = {"stubborn": (mark, stubborn), "parent": (mark, parent), "a log": ("", opening + stubborn, log, writes)}
    stay = {
        "longer mark": (mark + "0", stubborn),
        "read it": ("", stubborn, f"{reaper.MARK}={mark}"),
        "reads a log": ("", opening + stubborn, log, str(os.O_RDONLY)),
        "forked by the driver": ("", opening + stubborn, of_driver, writes),
    }
    processes = {
        name: subprocess.Popen(
            [sys.executable, "-S", "-c", *words], stdout=subprocess.PIPE, env={**os.environ, reaper.MARK: marked}
        )
        for name, (marked, *words) in (ended | stay).items()
    }
    link = tmp_path.with_name(f"{tmp_path.name}-link")
    link.symlink_to(tmp_path)
    try:
        for process in processes.values():
            assert process.stdout is not None
            process.stdout.readline()
        assert reaper.end_processes(mark, grace_s=0.3, folder=str(link)) == 4, "and the one that `parent` started"
        assert processes["stubborn"].wait(10) == processes["a log"].wait(10) == -signal.SIGKILL
        assert processes["parent"].wait(10) == -signal.SIGTERM
        assert [processes[name].poll() for name in stay] == [None] * len(stay)
        assert reaper.end_processes(mark, folder=str(link)) == 0
    finally:
        for process in processes.values():
            process.kill()
            process.communicate()
