"""Loading a model into the parts that ranks hold: seconds, and memory beyond the parts themselves.

    python benchmarks/loading.py                       # a Llama of 500 MB in bfloat16, 2 and 4 ranks
    python benchmarks/loading.py --ranks 2 --times 1

`ours` is `load_policy`, in which each rank reads its rectangles of the files: `rows` as FSDP2 shards them, `tp` as
tensor parallelism cuts them, a third of it by columns; in bfloat16 as in the file, or converted to float32 on the way.
`torch` reads all of it on rank 0 and gives the others theirs (`set_model_state_dict` with `broadcast_from_rank0`, FSDP2
on gloo). `disk` is one process that reads every byte of the file once into the same 4 MiB.

Sides take turns. Seconds are medians, of the slowest rank; cold means that the file was dropped from the page cache
before. Memory is that of each rank, the worst of its turns: the peak of the process's resident pages, mapped files
included, over what was there before and what stays there after.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import gc
import multiprocessing
import os
import statistics
import tempfile
import time
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from pathlib import Path

import safetensors.torch
import torch
from torch import distributed, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig
from update import memory_mib

from rallypoint.cluster.rendezvous import Rendezvous, open_rendezvous
from rallypoint.model_files import load_policy
from rallypoint.model_files.writer import save_model
from rallypoint.models import ModelShard
from rallypoint.models.shard import allocate, build
from rallypoint.parallel import DeviceMesh, held

WAYS = {
    "ours, rows": ("dp_shard", "bfloat16"),
    "ours, tp": ("tp", "bfloat16"),
    "ours, rows, to float32": ("dp_shard", "float32"),
    "torch": ("torch", "bfloat16"),
}
"""Axis of the mesh, and in what the model will be. Nothing is trained: the shards of FSDP2 would be float32 masters."""


@dataclasses.dataclass(frozen=True)
class Turn:
    """What all ranks load at the same time."""

    way: str
    is_cold: bool
    number: int


@dataclasses.dataclass(frozen=True)
class Measured:
    """What one rank measured."""

    rank: int
    seconds: float
    part_mib: float
    beyond_mib: float


def make_model(folder: Path, num_layers: int) -> None:
    config = LlamaConfig(
        vocab_size=32_000,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=num_layers,
        num_attention_heads=16,
        num_key_value_heads=16,
    )
    config.save_pretrained(folder)
    shard = build_meta(folder)
    allocate(shard, torch.device("cpu"))
    with torch.no_grad():
        for tensor in shard.tensors().values():
            tensor.normal_(std=0.02)
    save_model(shard, folder)


def build_meta(folder: Path) -> ModelShard:
    config = AutoConfig.from_pretrained(folder)
    mesh = DeviceMesh.solo()
    return build(config, AutoModelForCausalLM, dtype=torch.bfloat16, mesh=mesh, trust_remote_code=False)


def load_torch(folder: Path, rank: int) -> nn.Module:
    model = build_meta(folder).model
    for layer in model.base_model.layers:
        fully_shard(layer)
    fully_shard(model)
    model.to_empty(device="cpu")
    state = safetensors.torch.load_file(folder / "model.safetensors") if rank == 0 else {}
    set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    return model


@dataclasses.dataclass(frozen=True)
class Meeting:
    """Where ranks meet: ours, and those of torch's default group."""

    rendezvous: Rendezvous
    store: str
    barrier: Barrier


def run_rank(folder: Path, turns: list[Turn], rank: int, size: int, meeting: Meeting, into: Queue) -> None:
    """Take all turns in one process, so that none pays for imports."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{meeting.store}", rank=rank, world_size=size)
    axes = {axis for axis, _ in WAYS.values()} - {"torch"}
    connected = {
        axis: DeviceMesh.connect(meeting.rendezvous, axis, rank, {axis: size}, timeout_s=120) for axis in sorted(axes)
    }
    meshes, barrier = {**connected, "torch": DeviceMesh.solo()}, meeting.barrier
    for way in WAYS:
        load(folder / "warm", way, rank, meshes)
    for turn in turns:
        if turn.is_cold and rank == 0:
            drop_from_cache(folder)
        gc.collect()  # the model of the turn before
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # so that memory of the turn before is not used again unseen
        barrier.wait()
        Path("/proc/self/clear_refs").write_text("5")
        before, began = memory_mib("VmRSS"), time.perf_counter()
        tensors = load(folder, turn.way, rank, meshes)
        seconds = time.perf_counter() - began
        part = sum(tensor.numel() * tensor.element_size() for tensor in tensors) / 2**20
        into.put((turn, Measured(rank, seconds, part, memory_mib("VmHWM") - before - part)))
        del tensors
        barrier.wait()
    distributed.destroy_process_group()


def load(folder: Path, way: str, rank: int, meshes: dict[str, DeviceMesh]) -> list[torch.Tensor]:
    """Return what the rank holds afterwards."""
    axis, dtype = WAYS[way]
    if axis == "torch":
        return [held(weight) for weight in load_torch(folder, rank).parameters()]
    return list(load_policy(str(folder), dtype=dtype, mesh=meshes[axis], frozen=True).tensors().values())


def measure(folder: Path, turns: list[Turn], size: int) -> list[tuple[Turn, Measured]]:
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(size), context.Queue()
    with tempfile.TemporaryDirectory() as where, open_rendezvous("tcp", "loading") as rendezvous:
        meeting = Meeting(rendezvous, f"{where}/store", barrier)
        arguments = [(folder, turns, rank, size, meeting, results) for rank in range(size)]
        ranks = [context.Process(target=run_rank, args=each) for each in arguments]
        for rank in ranks:
            rank.start()
        measured = [results.get(timeout=120) for _ in ranks for _ in turns]
        for rank in ranks:
            rank.join()
    return measured


def drop_from_cache(folder: Path) -> None:
    for file in folder.glob("*.safetensors"):
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def read_disk(file: Path) -> float:
    buffer, position, began = bytearray(4 * 2**20), 0, time.perf_counter()
    with file.open("rb", buffering=0) as opened:
        while count := opened.readinto(buffer):
            position += count
    return time.perf_counter() - began


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--layers", type=int, default=14)
    parser.add_argument("--times", type=int, default=3)
    wanted = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=".") as name:
        folder = Path(name)
        make_model(folder, wanted.layers)
        make_model(folder / "warm", 1)
        file = folder / "model.safetensors"
        print(f"{file.stat().st_size / 2**20:.0f} MiB; the largest tensor has {32_000 * 1024 * 2 / 2**20:.0f} MiB\n")
        print("| ranks | way | cold s | warm s | part MiB | beyond it MiB, of each rank |\n|---|---|---|---|---|---|")
        for size in wanted.ranks:
            turns = [Turn(way, c, t) for t in range(wanted.times) for c in (True, False) for way in WAYS]
            measured = measure(folder, turns, size)
            disk: dict[bool, list[float]] = {True: [], False: []}
            for _ in range(wanted.times):
                drop_from_cache(folder)
                disk[True].append(read_disk(file))
                disk[False].append(read_disk(file))
            for way in WAYS:
                mine = [(turn, one) for turn, one in measured if turn.way == way]
                seconds = {
                    c: statistics.median(
                        max(one.seconds for turn, one in mine if turn == Turn(way, c, t)) for t in range(wanted.times)
                    )
                    for c in (True, False)
                }
                part = max(one.part_mib for _, one in mine)
                worst = [max(one.beyond_mib for _, one in mine if one.rank == rank) for rank in range(size)]
                beyond = ", ".join(f"{mib:.0f}" for mib in worst)
                print(f"| {size} | {way} | {seconds[True]:.2f} | {seconds[False]:.2f} | {part:.0f} | {beyond} |")
            print(
                f"| | disk | {statistics.median(disk[True]):.2f} | {statistics.median(disk[False]):.2f} | | |",
                flush=True,
            )


if __name__ == "__main__":
    main()
