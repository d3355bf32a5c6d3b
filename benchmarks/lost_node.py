"""Seconds until the loss of a node is noticed: of two on this machine one is killed, another one is stopped.

    python benchmarks/lost_node.py              # with the health checks that examples/cluster sets
    python benchmarks/lost_node.py --defaults   # with Ray's own

A node that is killed closes its connections, as a machine does whose processes have died. One that is stopped says
nothing any more, as a machine without power or network. The times are those until a call to a process there has ended
with its error, and until Ray has lost the node, after which its processes get another place.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

from rallypoint.cluster import Layout, ResourcePool, WorkerContext, WorkerGroup, collect
from rallypoint.cluster.ray_cluster import RayCluster
from rallypoint.cluster.ray_runtime import RayRuntime
from rallypoint.errors import WorkerDiedError
from rallypoint.recipes.drills import children_of

# isort: split
import ray
from ray.cluster_utils import Cluster

STORE = {"object_store_memory": 100 * 2**20, "include_dashboard": False}
FILE = Path(__file__).parents[1] / "examples" / "cluster" / "slurm.sbatch"


class Waiting:
    """A worker that is asked for something that takes longer than any check."""

    def __init__(self, context: WorkerContext) -> None:
        self.context = context

    @collect
    def wait(self) -> None:
        """Wait on one rank, for long."""
        if self.context.rank:
            time.sleep(300)


def send(raylet: int, number: signal.Signals) -> None:
    """Send a signal to all processes of a node, workers first."""
    for pid in (*(pid for pid, _ in children_of(raylet)), raylet):
        os.kill(pid, number)


async def measured(cluster: Any, number: signal.Signals, turn: int, folder: Path) -> tuple[float, float]:
    """Add a node, lose it during a call; return after how many seconds the call has ended, and the node was lost."""
    mark = {f"{number.name}{turn}": 1.0}
    node = cluster.add_node(num_cpus=0, resources=mark, **STORE)
    raylet = node.all_processes["raylet"][0].process.pid
    joined = RayCluster(address=str(cluster.address), namespace="nodes", own=None, silence_s=10, say=lambda _: None)
    runtime = RayRuntime(
        joined, log_folder=folder, placement_timeout_s=120, silence_s=300, preload=(), say=lambda _: None
    )
    here = ResourcePool([1], name="here", num_cpus=0.1)
    there = ResourcePool([1], name="there", num_cpus=0, resources=mark)
    processes = [process for pool in (here, there) for process in await runtime.processes(pool)]
    group = await WorkerGroup.create(Layout("waiting", processes), Waiting)
    call = asyncio.ensure_future(group.call(Waiting.wait))
    await asyncio.sleep(8)  # longer than a new node is left alone
    began = time.monotonic()
    send(raylet, number)
    try:
        await call
    except WorkerDiedError:
        ended_s = time.monotonic() - began
        while any(one["Alive"] and one["NodeID"] == node.node_id for one in ray.nodes()):
            await asyncio.sleep(0.05)
        return ended_s, time.monotonic() - began
    finally:
        send(raylet, signal.SIGCONT) if number == signal.SIGSTOP else None
        runtime.watch.stop()
    raise AssertionError("the call has ended without an error")


def main(*, defaults: bool, times: int) -> None:
    """Measure and print."""
    found = re.findall(r"RAY_(health_check_\w+)=(\d+)", FILE.read_text())
    checks = {} if defaults else {name: int(value) for name, value in found}
    print(checks or "Ray's own health checks")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "_system_config": checks, **STORE})
    ray.init(address=cluster.address, namespace="nodes", log_to_driver=False)
    with tempfile.TemporaryDirectory() as folder:
        for how, number in (("killed", signal.SIGKILL), ("stopped", signal.SIGSTOP)):
            seconds = [asyncio.run(measured(cluster, number, turn, Path(folder))) for turn in range(times)]
            for what, found in zip(("its call had ended", "Ray had lost it"), zip(*seconds, strict=True), strict=True):
                print(f"{how}, {what} after {', '.join(f'{each:.1f}' for each in sorted(found))} s", flush=True)
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--defaults", action="store_true", help="Ray's own health checks")
    parser.add_argument("--times", type=int, default=3, help="nodes that are lost in each way")
    main(**vars(parser.parse_args()))
