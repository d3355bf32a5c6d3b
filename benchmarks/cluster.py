"""Worker groups and rendezvous beside what they stand on: plain Ray actors, and torch's own rendezvous.

    python benchmarks/cluster.py                     # everything; some minutes
    python benchmarks/cluster.py --workers 2 --only calls echo
    python benchmarks/cluster.py --json cluster.json

Both sides live in the same Ray cluster and take turns, call by call; figures are medians, and a ratio above 1
means that ours needs more. Bounds are those that we promise. "parts" compares what plain Ray gives back, one part
for each worker, with the same from a group; "joined" compares both with the parts put together again.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import gc
import json
import os
import platform
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import numpy as np
import ray
from echo import Echo, Flat, Plain
from meeting import measure_meetings

from rallypoint.cluster import (
    Layout,
    ResourcePool,
    Runtime,
    WorkerGroup,
    open_runtime,
)

MIB = 2**20
SHARE = 0.1
"""Cores that each worker asks for; eight of them must fit on a laptop."""


class Memory:
    """The most that this process held for itself while something ran, above what it held before: bytes."""

    def __enter__(self) -> Self:
        self.before = self.most = own_memory()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.growth = self.most - self.before

    def _watch(self) -> None:
        while not self._stop.wait(0.002):
            self.most = max(self.most, own_memory())


def own_memory() -> int:
    """Return the anonymous memory of this process; Ray's shared memory is the node's, and has a bound of its own."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def side_by_side(ours: Callable[[], object], plain: Callable[[], object], times: int) -> tuple[float, float]:
    """Return the medians of seconds, taking turns."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(times):
        for side, call in zip(seconds, (ours, plain), strict=True):
            gc.collect(0)
            began = time.perf_counter()
            result = call()
            side.append(time.perf_counter() - began)
            del result
    return statistics.median(seconds[0]), statistics.median(seconds[1])


@dataclasses.dataclass
class Row:
    """A line of the table."""

    what: str
    workers: int
    ours: float
    plain: float
    bound: float | None
    unit: str = "ms"

    @property
    def ratio(self) -> float:
        return self.ours / self.plain

    def __str__(self) -> str:
        bound = "" if self.bound is None else f"{self.bound:.1f}{'' if self.ratio <= self.bound else ' missed'}"
        scale = 1e3 if self.unit == "ms" else 1
        return (
            f"| {self.what} | {self.workers} | {self.ours * scale:.2f} | {self.plain * scale:.2f} {self.unit} "
            f"| {self.ratio:.2f} | {bound} |"
        )


class Bench:
    """Both sides, with as many workers as wanted."""

    def __init__(self, runtime: Runtime, loop: asyncio.AbstractEventLoop, workers: int, show: Callable[[Row], None]):
        self.runtime, self.loop, self.workers, self.show = runtime, loop, workers, show
        self.group = loop.run_until_complete(make_group(runtime, workers))
        self.actors = make_plain(workers)

    def close(self) -> None:
        self.loop.run_until_complete(self.group.shutdown())
        for actor in self.actors:
            ray.kill(actor)

    def calls(self) -> None:
        """Without data."""

        def plain() -> None:
            ray.get([actor.nothing.remote() for actor in self.actors])

        ours, theirs = side_by_side(lambda: self.group.call(Echo.nothing).result(), plain, 400)
        self.show(Row("call without data, waited for", self.workers, ours, theirs, 1.2))

        async def awaited_plain() -> None:
            await asyncio.gather(*[actor.nothing.remote() for actor in self.actors])

        async def awaited() -> None:
            await self.group.call(Echo.nothing)

        run = self.loop.run_until_complete
        ours, theirs = side_by_side(lambda: run(awaited()), lambda: run(awaited_plain()), 400)
        self.show(Row("call without data, awaited", self.workers, ours, theirs, 1.2))

    def echo(self, mib: int) -> None:
        """A batch there and back."""
        values = np.random.default_rng(0).random(mib * MIB // 8)
        batch = Flat(values)

        def plain() -> list[np.ndarray]:
            return ray.get(
                [a.echo.remote(part) for a, part in zip(self.actors, np.array_split(values, self.workers), strict=True)]
            )

        times = 41 if mib < 10 else 15
        ours, theirs = side_by_side(
            lambda: self.group.call(Echo.echo, batch).result(), lambda: np.concatenate(plain()), times
        )
        self.show(Row(f"sharded echo of {mib} MB, joined", self.workers, ours, theirs, 1.5))
        with Memory() as memory:
            result = self.group.call(Echo.echo, batch).result()
        assert np.array_equal(result.values, values)
        self.show(Row(f"driver memory for {mib} MB / batch", self.workers, memory.growth, mib * MIB, 1.3, "B"))
        del result

        def parts() -> list[np.ndarray]:
            self.group.call(Echo.keep, batch).result()
            return self.group.call(Echo.parts).result()

        ours, theirs = side_by_side(parts, plain, times)
        self.show(Row(f"echo of {mib} MB in two calls, parts", self.workers, ours, theirs, None))


async def make_group(runtime: Runtime, workers: int) -> WorkerGroup[Echo]:
    pool = ResourcePool([workers], num_cpus=SHARE)
    return await WorkerGroup.create(Layout("echo", await runtime.processes(pool)), Echo)


def make_plain(workers: int) -> list[Any]:
    actors = [ray.remote(Plain).options(num_cpus=SHARE).remote() for _ in range(workers)]
    ray.get([actor.nothing.remote() for actor in actors])
    return actors


def measure_ready(runtime: Runtime, loop: asyncio.AbstractEventLoop, workers: int, times: int) -> tuple[float, float]:
    """From nothing to the first answer of every worker."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(times):
        began = time.perf_counter()
        group = loop.run_until_complete(make_group(runtime, workers))
        group.call(Echo.nothing).result()
        seconds[0].append(time.perf_counter() - began)
        loop.run_until_complete(group.shutdown())
        began = time.perf_counter()
        actors = make_plain(workers)
        seconds[1].append(time.perf_counter() - began)
        for actor in actors:
            ray.kill(actor)
    return statistics.median(seconds[0]), statistics.median(seconds[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 64, 256], metavar="MB")
    parser.add_argument("--only", nargs="+", default=["calls", "echo", "ready", "meeting"])
    parser.add_argument("--json", type=Path)
    wanted = parser.parse_args()
    rows: list[Row] = []

    def show(row: Row) -> None:
        rows.append(row)
        print(row, flush=True)

    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, ray {ray.__version__}\n")
    print("| what | workers | ours | plain | ratio | bound |\n|---|---|---|---|---|---|")
    loop = asyncio.new_event_loop()
    with tempfile.TemporaryDirectory() as folder:
        runtime = open_runtime("ray", log_folder=Path(folder), object_store_gib=3.0)
        try:
            if "ready" in wanted.only:
                ours, plain = measure_ready(runtime, loop, max(wanted.workers), 5)
                show(Row("ready", max(wanted.workers), ours, plain, 1.3))
            for workers in wanted.workers:
                bench = Bench(runtime, loop, workers, show)
                if "calls" in wanted.only:
                    bench.calls()
                for mib in wanted.sizes if "echo" in wanted.only else ():
                    bench.echo(mib)
                bench.close()
            if "meeting" in wanted.only:
                for kind, ours, theirs in measure_meetings(8):
                    show(Row(f"rendezvous to a first sum, {kind}", 8, ours, theirs, 1.3))
        finally:
            loop.run_until_complete(runtime.shutdown())
    if wanted.json:
        wanted.json.write_text(json.dumps([dataclasses.asdict(row) | {"ratio": row.ratio} for row in rows], indent=1))


if __name__ == "__main__":
    main()
