"""What only a local Ray can do: start, not fit, be let go of piece by piece, and leave nothing."""

import asyncio
import os
import signal
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
    return [int(left.name) for left in still_there(Path(f"/proc/{pid}") for pid in pids)]


def still_there(paths):
    """Those of some paths that are there after the others had time to go, as files of other tests' Rays do at once."""
    left, until = list(paths), time.monotonic() + 30
    while (left := [path for path in left if path.exists()]) and time.monotonic() < until:
        time.sleep(0.05)
    return left


async def life_of_a_runtime(logs, folder):
    """Open, fill, empty and leave; return the process ids that were seen."""
    from ray_forks import forked_workers  # which processes of the other test, that import this file, do not find

    with forked_workers():
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
    before = set(Path("/dev/shm").glob("plasma*"))
    pids = asyncio.run(life_of_a_runtime(logs, folder))
    assert len(pids) == 2 * CORES
    assert alive(pids) == []
    assert still_there(set(Path("/dev/shm").glob("plasma*")) - before) == [], "no memory of the object store"
    assert (logs / "ray" / "raylet.out").is_file(), "Ray's logs are in the run's folder"
    assert not (logs / "ray").is_symlink()


SLOW_START = """
import os, pathlib, time
folder = pathlib.Path(__file__).parent
if (folder / "slow").exists():
    (folder / "new").write_text(str(os.getpid()))
    (folder / "new").rename(folder / "pid")
    time.sleep(600)
"""


async def loses_one_twice(folder):
    """Kill a process of a pool, and its successor while that starts; return the process ids before and after."""
    runtime = open_runtime("ray", log_folder=folder, object_store_gib=0.2, preload=("slow_start",), say=print)
    pool = ResourcePool([2], num_cpus=0.1)
    try:
        group = await WorkerGroup.create(Layout("one", await runtime.processes(pool)), Worker)
        before = await group.call(Worker.pid)
        os.kill(before[0], signal.SIGKILL)
        with pytest.raises(WorkerDiedError, match="one rank 0"):
            await group.call(Worker.pid)
        group.processes[0].end()
        (folder / "slow").touch()
        starting = asyncio.ensure_future(runtime.processes(pool))
        while not (folder / "pid").exists():
            await asyncio.sleep(0.05)
        (folder / "slow").unlink()
        os.kill(int((folder / "pid").read_text()), signal.SIGKILL)
        with pytest.raises(WorkerDiedError, match="pool 'pool' rank 0 died during its start: "):
            await starting
        assert await group.renew(await runtime.processes(pool)) == [0]
        return before, await group.call(Worker.pid)
    finally:
        await runtime.shutdown()


def test_a_process_that_dies_while_it_is_started_again_is_told_and_the_next_try_keeps_the_others(tmp_path):
    (tmp_path / "slow_start.py").write_text(SLOW_START)
    searched = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = str(tmp_path)  # the processes inherit it
    try:
        before, after = asyncio.run(loses_one_twice(tmp_path))
    finally:
        del os.environ["PYTHONPATH"]
        if searched is not None:
            os.environ["PYTHONPATH"] = searched
    assert before[0] != after[0]
    assert before[1] == after[1]


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
