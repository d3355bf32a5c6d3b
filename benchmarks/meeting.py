"""From nothing to a first sum over all ranks: our rendezvous beside torch's own, for `benchmarks/cluster.py`."""

from __future__ import annotations

import contextlib
import datetime
import os
import shutil
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import ray
import torch
import torch.distributed as dist

from rallypoint.cluster.rendezvous import Rendezvous, open_rendezvous
from rallypoint.parallel import meet

TIMES = 15


class Rank:
    """One process; both sides use the same ones."""

    def __init__(self, rank: int, size: int) -> None:
        torch.set_num_threads(1)
        self.rank, self.size = rank, size

    def ours(self, rendezvous: Rendezvous, name: str) -> float:
        with meet(rendezvous, name, rank=self.rank, world_size=self.size, timeout_s=60, address="127.0.0.1") as group:
            total = torch.ones(1)
            group.torch_group.allreduce([total]).wait()
        return float(total)

    def torchs(self, port: int) -> float:
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://127.0.0.1:{port}",
            rank=self.rank,
            world_size=self.size,
            timeout=datetime.timedelta(seconds=60),
        )
        total = torch.ones(1)
        dist.all_reduce(total)
        dist.destroy_process_group()
        return float(total)


def measure_meetings(size: int) -> list[tuple[str, float, float]]:
    """Return (backend, seconds with ours, seconds with torch's) as medians, taking turns; Ray must be initialised."""
    ranks = [ray.remote(Rank).options(num_cpus=0.1).remote(rank, size) for rank in range(size)]
    measured: list[tuple[str, float, float]] = []
    with etcd_server() as etcd:
        for kind, address in (("ray", None), ("tcp", "127.0.0.1:0"), ("etcd", etcd)):
            if kind == "etcd" and address is None:
                print("| (etcd is not installed: apt-get install etcd-server) | | | | | |")
                continue
            with open_rendezvous(kind, f"benchmark-{kind}-{os.getpid()}", address=address) as rendezvous:
                measured.append((kind, *_turns(ranks, rendezvous)))
    for rank in ranks:
        ray.kill(rank)
    return measured


def _turns(ranks: list[Any], rendezvous: Rendezvous) -> tuple[float, float]:
    ours: list[float] = []
    torchs: list[float] = []
    for trial in range(TIMES + 1):
        began = time.perf_counter()
        totals = ray.get([rank.ours.remote(rendezvous, f"trial {trial}") for rank in ranks])
        ours.append(time.perf_counter() - began)
        port = free_port()
        began = time.perf_counter()
        totals += ray.get([rank.torchs.remote(port) for rank in ranks])
        torchs.append(time.perf_counter() - began)
        assert set(totals) == {float(len(ranks))}
    return statistics.median(ours[1:]), statistics.median(torchs[1:])  # the first one imports


def free_port() -> int:
    """Pick a port that torch's way needs to be told; ours never does this."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def etcd_server() -> Iterator[str | None]:
    """Start an etcd on loopback, if there is one."""
    program = shutil.which("etcd")
    if program is None:
        yield None
        return
    client, peer = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
    with tempfile.TemporaryDirectory() as folder:
        flags = {"data-dir": folder, "listen-client-urls": client, "advertise-client-urls": client}
        flags |= {"listen-peer-urls": peer, "initial-advertise-peer-urls": peer, "initial-cluster": f"default={peer}"}
        server = subprocess.Popen(
            [program, *(f"--{name}={value}" for name, value in flags.items())],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            host, port = client.removeprefix("http://").split(":")
            for _ in range(200):
                with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=1):
                    break
                time.sleep(0.05)
            yield client
        finally:
            server.terminate()
            server.wait()
