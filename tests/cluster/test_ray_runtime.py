"""What only a local Ray can do: start, not fit, be let go of piece by piece, and leave nothing."""

import asyncio
import os
import sys
import threading
import time
from pathlib import Path
from typing import Self

import pytest

from rallypoint.cluster import Layout, ResourcePool, WorkerContext, WorkerGroup, collect, open_runtime
from rallypoint.errors import PlacementError, WorkerDiedError

CORES = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


class Worker:
    """Leaves a file when it is closed."""

    def __init__(self, context: WorkerContext, folder: Path | None = None) -> None:
        self.context, self.folder = context, folder

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self.folder is not None:
            (self.folder / f"closed-{self.context.rank}").touch()

    @collect
    def pid(self) -> int:
        return os.getpid()

    @collect
    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


def named_actors():
    import ray

    return ray.util.list_named_actors(all_namespaces=True)


def alive(pids):
    """Those of some processes that are there after the others had time to go."""
    until = time.monotonic() + 30
    while (left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]) and time.monotonic() < until:
        time.sleep(0.05)
    return left


async def life_of_a_runtime(logs, folder):
    """Open, fill, empty and leave; return the process ids that were seen."""
    runtime = open_runtime("ray", log_folder=logs, object_store_gib=0.2, say=print)
    try:
        with pytest.raises(
            PlacementError, match=r"pool 'huge' cannot fit on this cluster:\n(.*\n)* .*999 CPU .*too little"
        ):
            await runtime.processes(ResourcePool([999], name="huge"))
        with pytest.raises(PlacementError, match=r"not all of them at the same time:\npool 'one':\n"):
            await runtime.reserve([ResourcePool([CORES], name="one"), ResourcePool([1], name="other")])

        full = await WorkerGroup.create(
            Layout("full", await runtime.processes(ResourcePool([CORES], name="full"))), Worker, folder
        )
        pids = await full.call(Worker.pid)
        await full.shutdown()
        assert sorted(path.name for path in folder.iterdir()) == [f"closed-{rank}" for rank in range(CORES)]
        assert alive(pids) == [], "a group leaves no process, whatever else goes on"

        second = await WorkerGroup.create(Layout("second", await runtime.processes(ResourcePool([CORES]))), Worker)
        pids += await second.call(Worker.pid)
        assert named_actors() == []
        busy = asyncio.ensure_future(second.call(Worker.sleep, 60))
        await asyncio.sleep(0.2)
    finally:
        await runtime.shutdown()
    with pytest.raises(WorkerDiedError, match=r"second rank \d .* died during sleep.*: it had been ended"):
        await busy
    return pids


@pytest.mark.skipif(sys.platform != "linux", reason="the processes are looked up in /proc")
def test_pools_come_and_go_and_nothing_is_left(tmp_path):
    logs, folder = tmp_path / "logs", tmp_path / "closed"
    folder.mkdir()
    before = set(Path("/dev/shm").iterdir())
    pids = asyncio.run(life_of_a_runtime(logs, folder))
    assert len(pids) == 2 * CORES
    assert alive(pids) == []
    assert set(Path("/dev/shm").iterdir()) <= before, "no shared memory"
    assert (logs / "ray" / "raylet.out").is_file(), "Ray's logs are in the run's folder"
    assert not (logs / "ray").is_symlink()


def test_inline_runtimes_leave_no_thread(tmp_path):
    async def scenario():
        runtime = open_runtime("inline", log_folder=tmp_path)
        group = await WorkerGroup.create(Layout("group", await runtime.processes(ResourcePool([3]))), Worker)
        busy = asyncio.ensure_future(group.call(Worker.sleep, 0.3))
        await asyncio.sleep(0.05)
        await runtime.shutdown()
        return await asyncio.gather(busy, return_exceptions=True)

    before = set(threading.enumerate())
    (error,) = asyncio.run(scenario())
    assert "it had been ended: its group was shut down, or the runtime" in str(error)
    assert {thread for thread in threading.enumerate() if not thread.name.startswith("asyncio")} <= before
