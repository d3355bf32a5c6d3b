"""Saving tensors that ranks hold in parts: seconds, where each writes its own and where all pass through the first.

    python benchmarks/saving.py                        # 200 MB in float32, cut over 2 ranks by rows and by columns
    python benchmarks/saving.py --ranks 4 --times 3

`own parts` is how checkpoints are written. `through rank 0` is how whole tensors are put together for a published
folder, whose digests are taken of the bytes in memory; here nothing is done with them. `write` is without a flush,
`flushed` with one. Sides take turns; seconds are medians of the slowest rank, and those of processors of all ranks.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import statistics
import tempfile
import time
from collections import defaultdict
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from pathlib import Path

import torch

from rallypoint.cluster.rendezvous import Rendezvous, open_rendezvous
from rallypoint.model_files import Writing, save_tensors
from rallypoint.models import Part
from rallypoint.parallel import DeviceMesh

CUTS = {"rows": 0, "columns": 1}
WAYS = ("own parts", "through rank 0")
NUM_ROWS, NUM_COLUMNS = 1024, 4096


def run_rank(
    where: Path,
    num_tensors: int,
    times: int,
    rank: int,
    size: int,
    rendezvous: Rendezvous,
    barrier: Barrier,
    told: Queue,
) -> None:
    """Take all turns in one process, so that none pays for imports."""
    torch.set_num_threads(1)
    mesh = DeviceMesh.connect(rendezvous, "saving", rank, {"dp_shard": size}, timeout_s=120)
    whole = Part.whole([NUM_ROWS, NUM_COLUMNS])
    for turn in range(times + 1):
        for (cut, dim), durable, way in itertools.product(CUTS.items(), (False, True), WAYS):
            part = whole.cut(dim, rank, size)
            tensors = {f"{number}": torch.full(part.sizes, float(turn)) for number in range(num_tensors)}
            how = Writing(durable=durable, seen=None if way == "own parts" else lambda *_: None)
            barrier.wait()
            began, busy = time.perf_counter(), time.process_time()
            save_tensors(where / "file", tensors, dict.fromkeys(tensors, part), mesh, how=how)
            seconds, busy = time.perf_counter() - began, time.process_time() - busy
            if turn:  # the first one warms up
                told.put((turn, cut, durable, way, seconds, busy))
            barrier.wait()


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--times", type=int, default=5)
    wanted = parser.parse_args()
    num_tensors = -(-wanted.megabytes * 10**6 // (NUM_ROWS * NUM_COLUMNS * 4))
    context = multiprocessing.get_context("spawn")
    barrier, told = context.Barrier(wanted.ranks), context.Queue()
    slowest: defaultdict[tuple[int, str, bool, str], float] = defaultdict(float)
    cpu: defaultdict[tuple[int, str, bool, str], float] = defaultdict(float)
    with tempfile.TemporaryDirectory(dir=".") as name, open_rendezvous("tcp", "saving") as rendezvous:
        arguments = [
            (Path(name), num_tensors, wanted.times, rank, wanted.ranks, rendezvous, barrier, told)
            for rank in range(wanted.ranks)
        ]
        ranks = [context.Process(target=run_rank, args=each) for each in arguments]
        for rank in ranks:
            rank.start()
        for _ in range(wanted.ranks * wanted.times * len(CUTS) * 2 * len(WAYS)):
            turn, cut, durable, way, seconds, busy = told.get(timeout=300)
            slowest[turn, cut, durable, way] = max(seconds, slowest[turn, cut, durable, way])
            cpu[turn, cut, durable, way] += busy
        for rank in ranks:
            rank.join()
    print("| cut by | | own parts s | through rank 0 s | ratio | own parts CPU s | through rank 0 CPU s |")
    print("|---|---|---|---|---|---|---|")
    for cut, durable in itertools.product(CUTS, (False, True)):
        (own, through), (own_cpu, through_cpu) = (
            [statistics.median(of[turn, cut, durable, way] for turn in range(1, wanted.times + 1)) for way in WAYS]
            for of in (slowest, cpu)
        )
        name = "flushed" if durable else "write"
        print(
            f"| {cut} | {name} | {own:.2f} | {through:.2f} | {through / own:.1f} | {own_cpu:.2f} | {through_cpu:.2f} |"
        )


if __name__ == "__main__":
    main()
