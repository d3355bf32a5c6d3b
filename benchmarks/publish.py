"""Publishing: the speed of each way that weights take between processes, beside a plain copy of the same tensors.

    python benchmarks/publish.py                          # 1M, 50M and a model of 468 MiB, all ways
    python benchmarks/publish.py --models 50M --times 20
    python benchmarks/publish.py changes                  # how many bits of weights an update leaves as they are
    python benchmarks/publish.py vllm --models 50M        # to a running vLLM server, by each way

`copy` is `copy_` of every tensor into another model, in one process. `memory`, `broadcast` and `folder` publish from a
process with the model to one or two with a model each; with `2 -> 1`, two processes hold half of the rows each.
Processes have a thread each, sides take turns, and seconds are medians from the first process that begins to the last
one that ends. "of copy" is the speed beside that of the plain copy of as many bytes: of two copies, where two models
are filled. "cpu" is the time of the busiest process, which says more on a machine that others use, and "of its cpu" the
plain copy's beside it. Memory is the peak of resident pages beyond those that a process had before, the worst over
processes and turns.

Colocated roles of an unsharded model are not measured: they share the tensors, and 0 bytes move.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import multiprocessing
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from update import SHAPES, memory_mib

from rallypoint.cluster.rendezvous import Rendezvous, open_rendezvous
from rallypoint.config import OptimizerConfig
from rallypoint.engine import TrainingEngine, policy_outputs
from rallypoint.generation.vllm import Launch, Outline, ServerProcess, VllmConnection, VLLMEngine
from rallypoint.install import find_engine
from rallypoint.model_files import load_policy, outline_policy
from rallypoint.models import ATTENTION, ModelShard, Part
from rallypoint.parallel import DeviceMesh
from rallypoint.roles.connections import ServerReplica
from rallypoint.roles.publishing import Stream, make_plan
from rallypoint.transport_kinds import BROADCAST, FOLDER, TRANSPORT_KINDS
from rallypoint.types import ActorBatch, Metrics, offsets_from_lengths
from rallypoint.weights import (
    HEADER_BYTES,
    Exposed,
    Held,
    Manifest,
    Participant,
    Receiver,
    Sender,
    TransferPlan,
    Transport,
    join,
    published_folder,
    same_node,
    share_trained,
)
from rallypoint.weights.shared import share

NUM_PROCESSES = 4
"""Two that may send, and two that may take."""


@dataclasses.dataclass(frozen=True)
class Side:
    """A way between some of the processes: senders are 0 and 1, takers 2 and 3."""

    way: str
    num_senders: int
    num_takers: int

    @property
    def places(self) -> list[int]:
        return [*range(self.num_senders), *range(2, 2 + self.num_takers)]

    def __str__(self) -> str:
        return "copy" if self.way == "copy" else f"{self.way}, {self.num_senders} -> {self.num_takers}"


WAYS = ["memory", "broadcast", "folder"]
SIDES = [Side("copy", 0, 1)]
SIDES += [Side(way, *numbers) for way in ("memory", "broadcast") for numbers in ((1, 1), (1, 2), (2, 1))]
SIDES += [Side("folder", 1, 1), Side("folder", 1, 2)]


def config_of(name: str) -> LlamaConfig:
    if name in SHAPES:
        return SHAPES[name].config("sdpa")
    num_layers = 36 if name == "500M" else 14
    sizes = {"vocab_size": 32_000, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": num_layers}
    return LlamaConfig(**sizes, num_attention_heads=16, num_key_value_heads=16)


def make_shard(name: str, dtype: torch.dtype) -> ModelShard:
    with torch.device("meta"):
        model = LlamaForCausalLM(config_of(name)).to(dtype)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for weight in model.parameters():
            weight.fill_(0.02)
    return ModelShard.whole(model, DeviceMesh.solo())


def rows_of(tensors: dict[str, Tensor], rank: int, size: int) -> tuple[dict[str, Tensor], dict[str, Part]]:
    """Return a rank's rows of every tensor, in memory of their own where that is not all."""
    parts = {}
    for name, tensor in tensors.items():
        per_rank = -(-len(tensor) // size)
        first, last = (min(at * per_rank, len(tensor)) for at in (rank, rank + 1))
        parts[name] = Part.whole(tensor.shape).rows(first, last)
    own = {name: t[parts[name].within(Part.whole(t.shape))] for name, t in tensors.items()}
    return (own if size == 1 else {name: tensor.clone() for name, tensor in own.items()}), parts


class Process:
    """What one of the processes has."""

    def __init__(
        self, place: int, name: str, dtype: torch.dtype, rendezvous: Rendezvous, work: Path, sides: list[Side]
    ) -> None:
        self.place, self.work, self.name = place, work, name
        self.shard = make_shard(name, dtype)
        self.tensors = self.shard.trained()
        self.other = {n: torch.zeros_like(t) for n, t in self.tensors.items()} if place == 2 else {}
        # Of what it sends, by the number of senders; in memory that takers read, as an actor has it.
        own = {size: rows_of(self.tensors, place, size)[0] for size in (1, 2) if place < size}
        memory = share([tensor for tensors in own.values() for tensor in tensors.values()])
        self.sources = {size: Sender(tensors) for size, tensors in own.items()}
        self.manifests: dict[Side, Manifest] = {}
        self.lines: dict[Side, Transport] = {}
        for side in sides:
            if side.way not in ("copy", FOLDER.name) and place in side.places:
                members = [Participant(at if at < 2 else None, at - 2 if at >= 2 else None) for at in side.places]
                plan = TransferPlan(str(side), tuple(members), self._manifest(side), 120.0)
                self.manifests[side] = plan.manifest
                exposed = None
                if memory is not None and place < 2:
                    exposed = memory.exposed(self._held(side)[place], own[side.num_senders])
                at = side.places.index(place)
                self.lines[side] = join(TRANSPORT_KINDS[side.way], rendezvous, plan, at, device="cpu", exposed=exposed)

    def _held(self, side: Side) -> list[dict[str, Held]]:
        held = []
        for rank in range(side.num_senders):
            parts = rows_of({n: t.to("meta") for n, t in self.tensors.items()}, rank, side.num_senders)[1]
            held.append({name: Held(self.tensors[name].dtype, part) for name, part in parts.items()})
        return held

    def _manifest(self, side: Side) -> Manifest:
        return Manifest.of(
            self._held(side), bucket_bytes=TRANSPORT_KINDS[side.way].bucket_mib[0] * 2**20 + HEADER_BYTES
        )

    @torch.no_grad()
    def take_part(self, side: Side, version: int, barrier: Barrier) -> None:
        if side.way == "copy":
            for name, tensor in self.tensors.items():
                self.other[name].copy_(tensor)
        elif side.way == "folder":
            where = published_folder.version_folder(self.work, version)
            if self.place == 0:
                published_folder.write(self.shard, self.work, version, base=self.name)
            barrier.wait()
            if self.place > 0:
                published_folder.read(self.shard, where, version)
        elif self.place < 2:
            self.lines[side].run(version, self.sources[side.num_senders], None, lambda: None)
        else:
            sink = Receiver(self.manifests[side], self.tensors, version)
            self.lines[side].run(version, None, sink, lambda: None)
            sink.finish()


def run_process(
    place: int, name: str, dtype: torch.dtype, times: int, rendezvous: Rendezvous, work: Path,
    barriers: dict[Side, tuple[Barrier, Barrier]], everyone: Barrier, into: Queue,
) -> None:  # fmt: skip
    """Take part in all sides that this process belongs to, again and again."""
    torch.set_num_threads(1)
    me = Process(place, name, dtype, rendezvous, work, list(barriers))
    for version in range(times + 1):  # the first one touches all memory
        for side in barriers:
            ctypes.CDLL("libc.so.6").malloc_trim(0)
            everyone.wait()
            if place in side.places:
                Path("/proc/self/clear_refs").write_text("5")
                before = memory_mib("VmRSS")
                barriers[side][0].wait()
                began, cpu_s = time.perf_counter(), time.process_time()
                me.take_part(side, version, barriers[side][1])
                ended, cpu_s = time.perf_counter(), time.process_time() - cpu_s
                into.put((side, version, began, ended, cpu_s, memory_mib("VmHWM") - before))
    everyone.wait()


def measure(
    name: str, dtype: torch.dtype, times: int, sides: list[Side]
) -> dict[Side, list[tuple[float, float, float]]]:
    """Return seconds, seconds of CPU, and MiB of every turn."""
    context = multiprocessing.get_context("spawn")
    barriers = {side: (context.Barrier(len(side.places)), context.Barrier(len(side.places))) for side in sides}
    everyone, results = context.Barrier(NUM_PROCESSES), context.Queue()
    with open_rendezvous("tcp", "publish") as rendezvous, tempfile.TemporaryDirectory(dir=".") as work:
        given = (name, dtype, times, rendezvous, Path(work), barriers, everyone, results)
        processes = [context.Process(target=run_process, args=(place, *given)) for place in range(NUM_PROCESSES)]
        for process in processes:
            process.start()
        num_results = (times + 1) * sum(len(side.places) for side in sides)
        found = [results.get(timeout=120) for _ in range(num_results)]
        for process in processes:
            process.join()
    turns: dict[Side, list[tuple[float, float, float]]] = {side: [] for side in sides}
    for side in sides:
        for version in range(1, times + 1):
            mine = [one for one in found if one[:2] == (side, version)]
            seconds = max(one[3] for one in mine) - min(one[2] for one in mine)
            turns[side].append((seconds, max(one[4] for one in mine), max(one[5] for one in mine)))
    return turns


def changes(name: str, rates: list[float], num_steps: int) -> None:
    """Print which part of bfloat16 weights, and of blocks of them, Adam's steps change, at some learning rates."""
    shape = SHAPES[name]
    print("| model | learning rate | step | numbers changed | blocks of 4 KiB | tensors |\n|---|---|---|---|---|---|")
    for rate in rates:
        torch.manual_seed(0)
        model = LlamaForCausalLM(shape.config(ATTENTION)).to(torch.bfloat16)
        shard = ModelShard.whole(model, DeviceMesh.solo())
        engine: TrainingEngine[ActorBatch] = TrainingEngine(
            shard, optimizer=OptimizerConfig(lr=rate), max_tokens_per_micro_batch=4096
        )
        for step in range(1, num_steps + 1):
            before = {key: tensor.clone() for key, tensor in shard.trained().items()}
            generator = torch.Generator().manual_seed(step)
            tokens = torch.randint(shape.vocabulary, (16 * 64,), generator=generator)
            batch = ActorBatch(
                offsets=offsets_from_lengths(torch.full((16,), 64)),
                tokens=tokens,
                loss_mask=torch.arange(16 * 64) % 64 >= 32,
                prompt_index=torch.arange(16),
                sample_index=torch.zeros(16, dtype=torch.int64),
                rollout_logprobs=torch.zeros(16 * 64),
                old_logprobs=torch.zeros(16 * 64),
                reference_logprobs=None,
                advantages=torch.randn(16, generator=generator).repeat_interleave(64),
            )

            def loss(part: ActorBatch, at: Tensor, shard: ModelShard = shard) -> tuple[Tensor, Metrics]:
                found = policy_outputs(shard, part, at, 1.0).logprobs
                return -(found * part.advantages[at]).sum(), Metrics({})

            engine.train(batch, loss, denominator=16 * 32, step=step, num_steps=num_steps)
            if step in (1, num_steps):
                print(f"| {name} | {rate:g} | {step} | {' | '.join(_changed(before, shard.trained()))} |")


def _changed(before: dict[str, Tensor], after: dict[str, Tensor]) -> list[str]:
    numbers = blocks = num_blocks = 0
    for key, tensor in after.items():
        differs = (tensor.view(torch.int16) != before[key].view(torch.int16)).flatten()
        numbers += int(differs.sum())
        padded = torch.nn.functional.pad(differs, (0, -len(differs) % 2048)).view(-1, 2048)
        blocks, num_blocks = blocks + int(padded.any(1).sum()), num_blocks + len(padded)
    tensors = sum(not torch.equal(tensor, before[key]) for key, tensor in after.items()) / len(after)
    total = sum(tensor.numel() for tensor in after.values())
    return [f"{numbers / total:.1%}", f"{blocks / num_blocks:.1%}", f"{tensors:.0%}"]


class Trainer:
    """An actor's rank and a rollout rank whose server is vLLM, in this process."""

    rank, device, say, tick, is_open = 0, "cpu", staticmethod(print), staticmethod(lambda: None), True

    def __init__(self, folder: Path, dtype: str, rendezvous: Rendezvous) -> None:
        self.shard, self.rendezvous = load_policy(str(folder), dtype=dtype), rendezvous
        self.memory = share_trained(self.shard.model)
        self.held = {name: Held(one.dtype, self.shard.parts[name]) for name, one in self.shard.trained().items()}

    def open(self, stream: Stream, plan: TransferPlan, place: int, exposed: Exposed | None) -> None:
        self.transport = join(stream.kind, self.rendezvous, plan, place, device="cpu", exposed=exposed)

    def close(self) -> None:
        """Nothing is open."""

    def meet(self, plan: TransferPlan, place: int, given_up: threading.Event) -> list[bytes]:
        return same_node.meet_members(self.rendezvous, plan, place, given_up=given_up)

    def exposed(self) -> Exposed | None:
        return self.memory and self.memory.exposed(self.held, self.shard.trained())

    @contextlib.contextmanager
    def open_sender(self) -> Iterator[Sender]:
        yield Sender(self.shard.trained())


def connected(trainer: Trainer, replica: ServerReplica, stream: Stream) -> Callable[[int], object]:
    """Connect a server, and return a function that publishes a version to it."""
    process: Any = object()
    plan = make_plan(stream, [trainer.held], [object() if stream.kind == BROADCAST else process], [process])  # pyright: ignore[reportArgumentType]
    if stream.kind != BROADCAST:
        replica.connect(stream, plan)
        return replica.receive
    actor = ThreadPoolExecutor(1)
    joining = actor.submit(join, stream.kind, trainer.rendezvous, plan, 0, device="cpu")
    replica.connect(stream, plan)

    def publish(version: int) -> None:
        sending = actor.submit(joining.result().run, version, Sender(trainer.shard.trained()), None, lambda: None)
        replica.receive(version)
        sending.result()

    return publish


def write_and_read(trainer: Trainer, replica: ServerReplica, below: Path, base: str, version: int) -> None:
    """Publish by a folder."""
    written = published_folder.write(trainer.shard, below, version, base=base)
    replica.read(version, written)
    published_folder.remove_others(written)


def to_vllm(name: str, dtype: torch.dtype, times: int) -> dict[str, list[float]]:
    """Return the seconds of every publish to a running server, in turns.

    They come from memory, broadcast by a thread that stands for the actor's process on another node, and from a folder.
    """
    seconds: dict[str, list[float]] = {"memory": [], "broadcast": [], "folder": []}
    with tempfile.TemporaryDirectory(dir=".") as work, open_rendezvous("memory", "vllm") as rendezvous:
        folder, word = Path(work) / "model", str(dtype).removeprefix("torch.")
        torch.manual_seed(0)
        LlamaForCausalLM(config_of(name)).to(dtype).save_pretrained(folder)  # pyright: ignore[reportArgumentType]
        outline = Outline.of(outline_policy(str(folder), dtype=word))
        launch = Launch(
            python=find_engine("vllm").python, model=str(folder), dtype=word, device="cpu", num_cpus=1, max_tokens=128,
            max_rows=4, cache_bytes=2048 * outline.cache_bytes_per_token, trust_remote_code=False,
            log=Path(work) / "vllm.log",
        )  # fmt: skip
        with contextlib.closing(VllmConnection(lambda own: ServerProcess(launch, own))) as connection:
            engine = VLLMEngine(connection, outline, max_request_tokens=128, max_rows=4)
            trainer = Trainer(folder, word, rendezvous)
            replica = ServerReplica(trainer, trainer, engine, trainer)  # pyright: ignore[reportArgumentType]
            for version, way in enumerate([*seconds] * (times + 1), 1):
                publish = partial(write_and_read, trainer, replica, Path(work) / "published", name)
                if way != "folder":
                    publish = connected(trainer, replica, Stream(TRANSPORT_KINDS[way], "xxh3", 600.0, num_workers=1))
                began = time.perf_counter()
                publish(version)
                if version > len(seconds):  # the first ones touch all memory
                    seconds[way].append(time.perf_counter() - began)
    return seconds


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["speed", "changes", "vllm"], default="speed")
    parser.add_argument("--models", nargs="+", choices=[*SHAPES, "468 MiB", "500M"], default=["1M", "50M", "468 MiB"])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--times", type=int, default=7)
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-6, 1e-5, 1e-4])
    wanted = parser.parse_args()
    if wanted.what == "changes":
        changes(wanted.models[0], wanted.rates, wanted.times)
        return
    if wanted.what == "vllm":
        print("| model | way | median s | least | most |\n|---|---|---|---|---|")
        for name in wanted.models:
            found = to_vllm(name, torch.bfloat16 if name == "468 MiB" else torch.float32, wanted.times)
            for way, seconds in found.items():
                middle = statistics.median(seconds)
                print(f"| {name} | {way} | {middle:.3f} | {min(seconds):.3f} | {max(seconds):.3f} |", flush=True)
        return
    sides = [side for side in SIDES if side.way in ("copy", *wanted.ways)]
    print("| model | way | ms | GB/s | of copy | cpu ms | of its cpu | peak MiB |\n|---|---|---|---|---|---|---|---|")
    for name in wanted.models:
        dtype = torch.bfloat16 if name == "468 MiB" else torch.float32
        with torch.device("meta"):
            num_bytes = sum(
                weight.numel() * dtype.itemsize for weight in LlamaForCausalLM(config_of(name)).parameters()
            )
        turns = measure(name, dtype, wanted.times, sides)
        plain_s, plain_cpu_s, _ = map(statistics.median, zip(*turns[sides[0]], strict=True))
        for side in sides:
            seconds, cpu_s, _ = map(statistics.median, zip(*turns[side], strict=True))
            count, peak = side.num_takers, max(turn[2] for turn in turns[side])
            print(
                f"| {name} | {side} | {seconds * 1e3:.1f} | {count * num_bytes / seconds / 1e9:.1f} "
                f"| {count * plain_s / seconds:.0%} | {cpu_s * 1e3:.1f} | {plain_cpu_s / cpu_s:.0%} | {peak:.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
