"""What only real processes can do: die, not fit, and be cleaned up."""

import asyncio
import os
import signal
import time

import pytest

from rallypoint.cluster import ResourcePool, WorkerContext, WorkerGroup, broadcast, first_rank, open_runtime
from rallypoint.errors import PlacementError, WorkerDiedError


class Mortal:
    """Can be killed."""

    def __init__(self, context: WorkerContext) -> None:
        self.context = context

    @first_rank
    def pid(self) -> int:
        return os.getpid()

    @broadcast
    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


def test_death_placement_and_shutdown(tmp_path):
    async def scenario():
        runtime = open_runtime(
            "ray", log_folder=tmp_path, object_store_gib=0.2, placement_timeout_s=3, say=lambda line: None
        )
        try:
            with pytest.raises(PlacementError, match=r"cannot fit on this cluster:\n.*wanted +999 CPU, has"):
                await runtime.hosts(ResourcePool("huge", (999,)))
            cores = len(os.sched_getaffinity(0))
            group = await WorkerGroup.create("mortal", Mortal, await runtime.hosts(ResourcePool("all", (cores,))))
            with pytest.raises(PlacementError, match=r"pool 'more' waits for 1 x \(1 CPU\).*gave up after"):
                await runtime.hosts(ResourcePool("more", (1,)))
            pid = await group.call(Mortal.pid)
            sleeping = asyncio.ensure_future(group.call(Mortal.sleep, 60))
            await asyncio.sleep(0.5)
            os.kill(pid, signal.SIGKILL)
            started = time.monotonic()
            with pytest.raises(WorkerDiedError, match="mortal rank 0 died during sleep"):
                await sleeping
            assert time.monotonic() - started < 30, "the other ranks' sixty seconds are not waited for"
        finally:
            await runtime.shutdown()
        return pid

    asyncio.run(scenario())
    assert (tmp_path / "ray" / "raylet.out").is_file(), "Ray's logs are in the run's folder"
    assert not (tmp_path / "ray").is_symlink()
