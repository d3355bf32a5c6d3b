"""Which kernels an update, a prefill and steps of decoding launch on an accelerator, and how long each takes there.

    python benchmarks/accelerator_kernels.py                      # Qwen3 shape of 0.6B, random weights, bfloat16
    python benchmarks/accelerator_kernels.py --model 1.7B --most 30
    python benchmarks/accelerator_kernels.py --model tiny --device cpu       # operators instead of kernels

For each kind of work: milliseconds on the device, launches, waits of the host, and the kernels that take longest.
"""

from __future__ import annotations

import argparse
import collections
from collections.abc import Callable
from pathlib import Path

import torch
from accelerator import SIZES, config_of, lengths_of, make_batch, make_engine, make_shard, take_update
from accelerator_rollouts import seconds, submit
from figures import Table
from torch.profiler import ProfilerActivity, profile

from rallypoint.engine.determinism import prepare_process
from rallypoint.generation import NativeEngine

COLUMNS = {"work": "", "kernel": "", "launches": "d", "ms": ".2f", "share": ".0%"}
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "hipStreamSynchronize")
LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx", "hipLaunchKernel")


def profiled(work: Callable[[], object], device: torch.device) -> tuple[float, dict[str, tuple[int, float]], int, int]:
    """Run work once more under the profiler.

    Returns:
        Seconds without the profiler; name of a kernel -> launches and seconds; launches by the host; waits of the host.
    """
    taken = seconds(work, device)
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with profile(activities=kinds) as found:
        seconds(work, device)
    kernels: dict[str, tuple[int, float]] = collections.defaultdict(lambda: (0, 0.0))
    num_launches = num_waits = 0
    for event in found.events() or ():
        num_launches += event.name in LAUNCHES
        num_waits += event.name in WAITS
        is_kernel = event.device_type.name != "CPU" if device.type == "cuda" else event.name.startswith("aten::")
        if is_kernel and event.name not in ("Context Sync",):
            count, time = kernels[event.name]
            spent = event.time_range.elapsed_us() if device.type == "cuda" else event.self_cpu_time_total
            kernels[event.name] = count + 1, time + spent / 1e6
    return taken, dict(kernels), num_launches, num_waits


def show(table: Table, name: str, most: int, work: Callable[[], object], device: torch.device) -> None:
    """Add the lines of a kind of work."""
    taken, kernels, num_launches, num_waits = profiled(work, device)
    busy = sum(time for _, time in kernels.values())
    title = f"all; host: {num_launches} launches, {num_waits} waits, {taken * 1e3:.1f} ms"
    table.add(work=name, kernel=title, launches=sum(count for count, _ in kernels.values()), ms=busy * 1e3, share=1.0)
    for kernel, (count, time) in sorted(kernels.items(), key=lambda item: -item[1][1])[:most]:
        table.add(work=name, kernel=kernel[:100], launches=count, ms=time * 1e3, share=time / busy)


@torch.no_grad()
def show_rollouts(table: Table, name: str, num_rows: int, most: int, device: torch.device) -> None:
    """Add the lines of a prefill and of decoding."""
    model = make_shard(name, device, "float32" if device.type == "cpu" else "bfloat16").model
    engine = NativeEngine(model, max_rows=num_rows, cache_tokens=num_rows * 640)
    seeds = iter(range(10))

    def prefill() -> None:
        submit(engine, 32, 1, seed=next(seeds))
        while engine.has_work:
            engine.step()

    def decode() -> None:
        for _ in range(16):
            engine.step()

    prefill()  # compiles what there is to compile
    show(table, "prefill of 32 prompts", most, prefill, device)
    submit(engine, num_rows, 128, seed=next(seeds))
    for _ in range(24):
        engine.step()
    show(table, f"16 tokens of {num_rows} rows", most, decode, device)
    engine.sleep()


def show_update(table: Table, name: str, most: int, device: torch.device) -> None:
    """Add the lines of an update."""
    engine = make_engine(name, device, "keep", deterministic=True)
    length, num_rows = (128, 8) if device.type == "cpu" else (1024, 16)
    lengths = lengths_of(num_rows, length, is_ragged=True, seed=0)
    batch = make_batch(config_of(name).vocab_size, lengths)
    take_update(engine, batch)
    show(table, f"update of {num_rows} rows", most, lambda: take_update(engine, batch), device)


def main(arguments: list[str] | None = None) -> None:
    """Print the table; `arguments` are those of the command line by default."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="0.6B", choices=SIZES)
    parser.add_argument("--rows", type=int, default=256, help="that decode")
    parser.add_argument("--most", type=int, default=15, help="kernels of each kind of work")
    parser.add_argument("--device", help="default: the accelerator that torch finds")
    parser.add_argument("--json", type=Path, help="a file to which every row is appended, too")
    wanted = parser.parse_args(arguments)
    device = (
        torch.device(wanted.device) if wanted.device else torch.accelerator.current_accelerator(check_available=True)
    )
    if device is None:
        raise SystemExit("no accelerator was found; --model tiny --device cpu shows that it runs")
    if device.type != "cpu":  # as in every run
        prepare_process()
    table = Table(COLUMNS, wanted.json)
    show_rollouts(table, wanted.model, wanted.rows, wanted.most, device)
    show_update(table, wanted.model, wanted.most, device)


if __name__ == "__main__":
    main()
