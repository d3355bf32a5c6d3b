"""Two data-parallel ranks with one thread each, beside one process with two threads: seconds of a whole update.

    python benchmarks/scaling.py
    python benchmarks/scaling.py --shapes 10M --dtypes float32 --times 5

The rows are those of training.py. The update is the engine's own: micro-batches, sum of the gradients over the ranks,
norm and optimizer step. The sides take turns; a ratio above 1 means that two ranks are faster.
"""

from __future__ import annotations

import argparse
import pickle
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from update import GROUP_SIZE, PROMPT_TOKENS, SHAPES, make_model, make_rows

from rallypoint.algorithms.losses import policy_loss
from rallypoint.cluster.rendezvous import open_rendezvous
from rallypoint.config import OptimizerConfig
from rallypoint.engine import TrainingEngine, policy_outputs
from rallypoint.models import ATTENTION, ModelShard
from rallypoint.models.layers import replace_layers
from rallypoint.parallel import DeviceMesh
from rallypoint.roles.dealing import deal
from rallypoint.types import ActorBatch, Metrics, offsets_from_lengths


def make_batch(vocabulary: int) -> ActorBatch:
    """All rows of the update."""
    tokens, lengths, advantages = make_rows(vocabulary)
    real = torch.arange(tokens.shape[1]) < lengths.unsqueeze(1)
    return ActorBatch(
        offsets=offsets_from_lengths(lengths),
        tokens=tokens[real],
        loss_mask=(real & (torch.arange(tokens.shape[1]) >= PROMPT_TOKENS))[real],
        prompt_index=torch.arange(len(lengths)) // GROUP_SIZE,
        sample_index=torch.arange(len(lengths)) % GROUP_SIZE,
        rollout_logprobs=torch.zeros(int(lengths.sum())),
        old_logprobs=torch.full((int(lengths.sum()),), -float(torch.tensor(vocabulary).log())),
        reference_logprobs=None,
        advantages=advantages.unsqueeze(1).expand_as(tokens)[real],
    )


def work(name: str, dtype: str, rendezvous_file: str, rank: int, size: int) -> None:
    """Be one rank: each line on stdin asks for an update, each line on stdout says that it is done."""
    torch.set_num_threads(2 // size)
    mesh = DeviceMesh.connect(pickle.loads(Path(rendezvous_file).read_bytes()), name, rank, {"dp_replicate": size})
    model = make_model(SHAPES[name], getattr(torch, dtype), ATTENTION).eval()
    replace_layers(model)
    engine = TrainingEngine(ModelShard.whole(model, mesh), optimizer=OptimizerConfig(), max_tokens_per_micro_batch=4096)
    batch = make_batch(SHAPES[name].vocabulary)
    part, denominator = deal(batch, size, 0.001)[0][rank], batch.num_loss_tokens

    def loss(rows: ActorBatch, at: torch.Tensor) -> tuple[torch.Tensor, Metrics]:
        logprobs, mask = policy_outputs(engine.shard, rows, at, 1.0).logprobs, torch.ones(len(at), dtype=torch.bool)
        clips = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None}
        return policy_loss(logprobs, rows.old_logprobs[at], rows.advantages[at], mask, **clips).sum, Metrics()

    for _ in sys.stdin:
        engine.train(part, loss, denominator=denominator, step=1, num_steps=1)
        print("done", flush=True)


def measure(name: str, dtype: str, times: int) -> tuple[float, float]:
    """Return the median seconds of one process with two threads, and of two with one."""
    with open_rendezvous("tcp", "scaling") as rendezvous, tempfile.NamedTemporaryFile() as file:
        Path(file.name).write_bytes(pickle.dumps(rendezvous))
        sides = [
            [
                subprocess.Popen(
                    [sys.executable, __file__, "--work", name, dtype, file.name, str(rank), str(size)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
                for rank in range(size)
            ]
            for size in (1, 2)
        ]
        seconds: list[list[float]] = [[], []]
        try:
            for _ in range(times + 1):  # the first warms up
                for side, taken in zip(sides, seconds, strict=True):
                    began = time.perf_counter()
                    for process in side:
                        assert process.stdin is not None
                        print(file=process.stdin, flush=True)
                    for process in side:
                        assert process.stdout is not None
                        assert process.stdout.readline() == "done\n", f"{name} in {dtype}: a rank ended"
                    taken.append(time.perf_counter() - began)
        finally:
            for process in (process for side in sides for process in side):
                process.kill()
                process.wait()
    return statistics.median(seconds[0][1:]), statistics.median(seconds[1][1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["1M", "10M", "50M"], choices=SHAPES)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--work", nargs=5, help=argparse.SUPPRESS)
    wanted = parser.parse_args()
    if wanted.work:
        name, dtype, file, rank, size = wanted.work
        return work(name, dtype, file, int(rank), int(size))
    print("| model | type | 1 process x 2 threads, s | 2 ranks x 1 thread, s | ratio |\n|---|---|---:|---:|---:|")
    for name in wanted.shapes:
        for dtype in wanted.dtypes:
            one, two = measure(name, dtype, wanted.times)
            print(f"| {name} | {dtype} | {one:.2f} | {two:.2f} | {one / two:.2f} |", flush=True)
    return None


if __name__ == "__main__":
    main()
