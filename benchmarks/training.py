"""Forward and backward of the actor's update: seconds, memory, and the share of the machine's peak.

    python benchmarks/training.py                                      # every size and precision; many minutes
    python benchmarks/training.py --shapes 10M --dtypes bfloat16 --rows 32 --times 5
    python benchmarks/training.py --trl-python ~/trl/bin/python --json training.json

Sides: `ours`, which computes a prompt once for its eight rollouts; `apart`, which is ours without that; and TRL's own
loss, if an interpreter that has trl is named. Each is a process of its own, on the same rows; they take turns, update
by update. Seconds are medians of the updates during which others used less than a tenth of the machine, or of the
calmest three, and how busy others were stands beside them. Memory is what an update takes at most beyond the loaded
model, gradients included. MFU is the rate of the operations that a side needs for its rows (torch's own count,
without padding and the last tokens, which choose nothing, attention as a full square, tokens that are computed once
counted once) against the best matrix product of this precision, measured between the turns; both per second of CPU,
which others hardly disturb where there is one thread. What --json names is added to, model by model.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TypeAlias

import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaForCausalLM
from update import GROUP_SIZE, MAX_ROWS, PROMPT_TOKENS, SHAPES, Shape, make_rows

Sample: TypeAlias = tuple[float, float, float]
"""Seconds, seconds of CPU, and the share of all cores that others used meanwhile."""

CALM = 0.1
DEFAULT_WAITS = {"generate", "spinning", "trl", "vllm", "yardstick"}
"""Sides whose threads wait as OpenMP has it."""
UPDATE = str(Path(__file__).with_name("update.py"))


@dataclasses.dataclass
class Row:
    """A line of the table."""

    shape: str
    dtype: str
    side: str
    at_once: int
    seconds: float
    cpu_s: float
    """Of all threads; hardly depends on what others do."""
    foreign: float
    """Share of all cores that others used meanwhile."""
    peak_mib: float
    peak_gflops: float
    """Of the matrix product, per second of CPU."""
    mfu: float
    samples: list[Sample]
    """Of every update."""

    def __str__(self) -> str:
        return (
            f"| {self.shape} | {self.dtype} | {self.side} ({self.at_once}) | {self.seconds:.2f} | {self.cpu_s:.2f} "
            f"| {self.peak_mib:.0f} | {self.mfu:.0%} | {self.peak_gflops:.0f} | {self.foreign:.0%} |"
        )


def as_users_have_it(side: str) -> dict[str, str]:
    """Return the environment of a side: what `import rallypoint` makes of it, or OpenMP's default.

    By default idle threads look for work for a few milliseconds before they sleep. With "passive", TRL is slower by a
    sixth at 1M on a quiet machine.
    """
    kept = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    return kept if side in DEFAULT_WAITS else kept | {"OMP_WAIT_POLICY": "passive"}


class Side:
    """A process that waits for its turn."""

    def __init__(self, python: str, name: str, shape: str, dtype: str, at_once: int, threads: int, rows: int) -> None:
        self.name, self.at_once = name, at_once
        command = [python, UPDATE, name, shape, dtype]
        command += ["--threads", str(threads), "--rows", str(rows), "--at-once", str(at_once)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=as_users_have_it(name),
            stderr=subprocess.DEVNULL,
        )
        self.samples: list[Sample] = []
        self.peak_mib = 0.0

    def update(self, *, keep: bool = True) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        busy, everything = machine_seconds()
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} failed; run it alone to see why: {' '.join(map(str, self._process.args))}")
        answer = json.loads(line)
        busy, everything = (after - before for after, before in zip(machine_seconds(), (busy, everything), strict=True))
        self.peak_mib = answer["peak_mib"]
        if keep:
            foreign = max(0.0, (busy - answer["cpu_s"]) / everything)
            self.samples.append((answer["seconds"], answer["cpu_s"], foreign))

    def close(self) -> None:
        self._process.communicate()


def machine_seconds() -> tuple[float, float]:
    """Return (busy, all) seconds of all cores since the machine started."""
    numbers = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    idle = numbers[3] + numbers[4]
    return (sum(numbers) - idle) / os.sysconf("SC_CLK_TCK"), sum(numbers) / os.sysconf("SC_CLK_TCK")


def calm(samples: list[Sample]) -> list[Sample]:
    """Return the samples that others hardly disturbed; the calmest three where there are none."""
    by_foreign = sorted(samples, key=lambda sample: sample[2])
    return [sample for sample in by_foreign if sample[2] < CALM] or by_foreign[:3]


def count_flops(shape: Shape, num_rows: int, *, shared_prompts: bool) -> float:
    """Return the FLOPs of one update: forward and backward of every row, and of the head for its trained tokens.

    The last token of a row chooses none, and counts for the head only.
    """
    lengths = make_rows(2, num_rows)[1] - 1
    with torch.device("meta"):
        model = LlamaForCausalLM(shape.config("eager"))
    # A row's FLOPs are a polynomial of second degree in its length, without a constant: two lengths tell it.
    first, second = (backbone_flops(model, length) / length for length in (64, 128))
    quadratic = (second - first) / 64
    linear = first - quadratic * 64
    num_saved = PROMPT_TOKENS * (num_rows - num_rows // GROUP_SIZE) if shared_prompts else 0
    backbone = linear * (int(lengths.sum()) - num_saved) + quadratic * int(lengths.square().sum())
    return backbone + 6 * shape.hidden * shape.vocabulary * int((lengths + 1 - PROMPT_TOKENS).sum())


def backbone_flops(model: LlamaForCausalLM, length: int) -> int:
    tokens = torch.zeros(1, length, dtype=torch.int64, device="meta")
    with FlopCounterMode(display=False) as counter:
        states = model.model(
            input_ids=tokens,
            position_ids=torch.arange(length, device="meta").unsqueeze(0),
            attention_mask=torch.zeros(1, 1, length, length, device="meta"),
            use_cache=False,
        ).last_hidden_state
        states.sum().backward()
    return counter.get_total_flops()


def product_gflops(dtype: torch.dtype, size: int = 2048, times: int = 4) -> float:
    """Return the best rate of a square matrix product, per second of CPU."""
    left, right = (torch.randn(size, size, dtype=dtype) for _ in range(2))
    seconds: list[float] = []
    for _ in range(times):
        began = time.process_time()
        left @ right.T
        seconds.append(time.process_time() - began)
    return 2 * size**3 / min(seconds) / 1e9


def measure(shape: str, dtype: str, wanted: argparse.Namespace) -> list[Row]:
    """Let the sides take turns, and return a line for each."""
    shared = (wanted.threads, wanted.rows)
    sides = [Side(sys.executable, name, shape, dtype, wanted.tokens_at_once, *shared) for name in ("ours", "apart")]
    if wanted.trl_python:
        sides += [Side(wanted.trl_python, "trl", shape, dtype, rows, *shared) for rows in wanted.trl_rows_at_once]
    for side in sides:
        side.update(keep=False)
    gflops = 0.0
    for _ in range(wanted.times):
        gflops = max(gflops, product_gflops(getattr(torch, dtype)))
        for side in sides:
            side.update()
    for side in sides:
        side.close()
    rows: list[Row] = []
    for side in sides:
        flops = count_flops(SHAPES[shape], wanted.rows, shared_prompts=side.name == "ours")
        kept = calm(side.samples)
        seconds, cpu_s, foreign = (statistics.median(numbers) for numbers in zip(*kept, strict=True))
        rows.append(
            Row(
                shape=shape,
                dtype=dtype,
                side=side.name,
                at_once=side.at_once,
                seconds=seconds,
                cpu_s=cpu_s,
                foreign=foreign,
                peak_mib=side.peak_mib,
                peak_gflops=gflops,
                mfu=flops / cpu_s / gflops / 1e9,
                samples=side.samples,
            )
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    parser.add_argument("--times", type=int, default=7, help="updates of each side that are measured")
    parser.add_argument("--rows", type=int, default=MAX_ROWS, help="of an update; a multiple of 8")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--tokens-at-once", type=int, default=4096, help="tokens of a micro-batch of ours")
    parser.add_argument("--trl-python", help="interpreter with trl")
    parser.add_argument("--trl-rows-at-once", type=int, nargs="+", default=[16], help="rows of a micro-batch of TRL")
    parser.add_argument("--json", type=Path)
    wanted = parser.parse_args()
    torch.set_num_threads(wanted.threads)
    print(f"{platform.processor() or platform.machine()}, {wanted.threads} threads, torch {torch.__version__}\n")
    print("| model | precision | side (at once) | seconds | CPU s | peak MiB | MFU | product GFLOP/CPU s | others |")
    print("|---|---|---|---|---|---|---|---|---|")
    rows: list[Row] = []
    for shape in wanted.shapes:
        for dtype in wanted.dtypes:
            for row in measure(shape, dtype, wanted):
                rows.append(row)
                print(row, flush=True)
    if wanted.json:
        before = json.loads(wanted.json.read_text()) if wanted.json.exists() else []
        measured = {(row.shape, row.dtype) for row in rows}
        kept = [row for row in before if (row["shape"], row["dtype"]) not in measured]
        wanted.json.write_text(json.dumps(kept + [dataclasses.asdict(row) for row in rows], indent=1))


if __name__ == "__main__":
    main()
