"""The four places where a rendezvous can be kept, and processes that can be killed."""

import contextlib
import dataclasses
import pickle
import shutil
import socket
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import pytest

from rallypoint.cluster.rendezvous import Rendezvous, open_rendezvous
from rallypoint.cluster.rendezvous.etcd import EtcdClient

LEASE_S = 1.0
INSTALL_ETCD = "there is no etcd server here: apt-get install etcd-server"


@dataclasses.dataclass
class Place:
    """One kind of place."""

    kind: Literal["memory", "tcp", "etcd", "ray"]
    address: str | None = None

    def open(self, scope: str | None = None) -> Rendezvous:
        scope = scope or uuid.uuid4().hex
        return open_rendezvous(self.kind, scope, address=self.address, lease_s=LEASE_S)


@pytest.fixture(scope="session")
def etcd_url(tmp_path_factory) -> Iterator[str]:
    """A real etcd server on loopback, which writes to a folder of its own and is ended by its id."""
    with etcd_server(tmp_path_factory.mktemp("etcd")) as url:
        yield url


@contextlib.contextmanager
def etcd_server(folder: Path) -> Iterator[str]:
    if not shutil.which("etcd"):
        pytest.skip(INSTALL_ETCD)
    for attempt in range(5):
        # etcd's gateway connects to the very port it was told, so that it cannot be 0: again, if somebody was faster.
        with socket.create_server(("127.0.0.1", 0)) as probe:
            url = f"http://127.0.0.1:{probe.getsockname()[1]}"
        (folder / str(attempt)).mkdir()
        server = start_etcd(url, folder / str(attempt))
        if server.poll() is None:
            break
    else:
        raise RuntimeError("etcd did not start")
    yield url
    server.terminate()
    server.wait(20)


@pytest.fixture
def locked_etcd_url(tmp_path) -> Iterator[str]:
    """An etcd server that lets in nobody but `root`, whose password is `secret`."""
    with etcd_server(tmp_path) as url:
        client = EtcdClient(url)
        client.call("auth/user/add", {"name": "root", "password": "secret"})
        client.call("auth/user/grant", {"user": "root", "role": "root"})
        client.call("auth/enable", {})
        yield url


def start_etcd(url: str, folder: Path) -> subprocess.Popen[str]:
    """Return when it serves, or has ended."""
    any_port = "http://127.0.0.1:0"
    options = {
        "data-dir": str(folder / "data"),
        "listen-client-urls": url,
        "advertise-client-urls": url,
        "listen-peer-urls": any_port,
        "initial-advertise-peer-urls": any_port,
        "initial-cluster": f"default={any_port}",
        "heartbeat-interval": "20",
        "election-timeout": "200",
        "log-outputs": str(folder / "log"),
        "logger": "zap",
    }
    command = ["etcd", "--unsafe-no-fsync", *(f"--{name}={value}" for name, value in options.items())]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True)
    port = int(url.rsplit(":", 1)[1])
    while server.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            break
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(0.05)
    return server


@pytest.fixture(scope="module", params=["memory", "tcp", "etcd", "ray"])
def place(request) -> Place:
    if request.param == "ray":
        request.getfixturevalue("local_ray")
    return Place(request.param, request.getfixturevalue("etcd_url") if request.param == "etcd" else None)


@pytest.fixture(scope="module")
def rendezvous(place) -> Iterator[Rendezvous]:
    """One for all tests of a module; each uses a name of its own."""
    with place.open() as rendezvous:
        yield rendezvous


@pytest.fixture
def name(request) -> str:
    return request.node.name.removeprefix("test_")


@pytest.fixture
def start_process(place, tmp_path) -> Iterator[Callable[..., int]]:
    """Return a function that starts a process which joins and stays, and returns its id."""
    if place.kind == "memory":
        pytest.skip("a rendezvous in memory has no other processes")
    kept: list[object] = []

    def on_ray(rendezvous: Rendezvous, name: str, rank: int, world_size: int) -> int:
        import ray

        actor = ray.remote(RayParticipant).options(num_cpus=0, max_concurrency=2).remote()  # pyright: ignore[reportAttributeAccessIssue]
        kept.extend([actor, actor.join.remote(rendezvous, name, rank, world_size)])
        return ray.get(actor.pid.remote())

    def by_itself(rendezvous: Rendezvous, name: str, rank: int, world_size: int) -> int:
        handed_over = tmp_path / f"participant-{len(kept)}"
        handed_over.write_bytes(pickle.dumps((rendezvous, name, rank, world_size)))
        command = [sys.executable, str(Path(__file__).with_name("participant.py")), str(handed_over)]
        process = subprocess.Popen(command)
        kept.append(process)
        return process.pid

    yield on_ray if place.kind == "ray" else by_itself
    for process in kept:
        if isinstance(process, subprocess.Popen):
            process.kill()
            process.wait()


class RayParticipant:
    """A process that joins and stays."""

    def pid(self) -> int:
        import os

        return os.getpid()

    def join(self, rendezvous: Rendezvous, name: str, rank: int, world_size: int) -> None:
        self.membership = rendezvous.join(name, rank=rank, world_size=world_size, timeout_s=60)
