"""One process of `test_publishing_memory.py`: two send halves of a model, one takes over all of it, and each measures.

It writes down in bytes: what it has of the model (`own`), what loading that has left (`loaded`), and of every publish
the peak of resident pages over those before (`peak`), those of them that others had made for all to read (`mapped`),
and what stayed of its own (`kept`).
"""

import ctypes
import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
from ranks import open_meeting

from rallypoint.cluster.rendezvous import Rendezvous
from rallypoint.cpu.pages import give_back
from rallypoint.model_files import load_policy
from rallypoint.models import ModelShard, Part
from rallypoint.observability.memory import resident_bytes
from rallypoint.parallel import DeviceMesh
from rallypoint.transport_kinds import TRANSPORT_KINDS
from rallypoint.weights import (
    HEADER_BYTES,
    Held,
    Manifest,
    Participant,
    Receiver,
    Sender,
    SharedWeights,
    TransferPlan,
    Transport,
    join,
    published_folder,
    share_trained,
)  # fmt: skip

M_MMAP_THRESHOLD = -3
"""Of glibc's malloc.h: pieces from that size on go back to the system when they are freed."""
CPU = torch.device("cpu")
MEMBERS = (Participant(0, None), Participant(1, None), Participant(None, 0))
TAKER = 2
WAYS = ("memory", "broadcast", "folder", "folder of masters")


def status(field: str) -> int:
    """Return a size that Linux tells of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def load(
    path: str, rendezvous: Rendezvous, name: str, place: int, dtype: str = "float32"
) -> tuple[ModelShard, SharedWeights | None]:
    """Load the half of a sender, into memory that others can read, as an actor does; or all of it."""
    if place == TAKER:
        return load_policy(path, dtype="float32"), None
    mesh = DeviceMesh.connect(rendezvous, name, place, {"dp_shard": 2}, timeout_s=60)
    shard = load_policy(path, dtype=dtype, mesh=mesh)
    return shard, share_trained(shard.model) if dtype == "float32" else None


def held_by(shard: ModelShard, rank: int) -> dict[str, Held]:
    """Return what a sender has: half of the rows of every tensor."""
    wholes = {name: Part.whole(part.shape) for name, part in shard.parts.items()}
    return {
        name: Held(torch.float32, whole.rows(rank * (whole.shape[0] // 2), (rank + 1) * (whole.shape[0] // 2)))
        for name, whole in wholes.items()
    }


def measured(publish: Callable[[], None]) -> dict[str, int]:
    """Return what a publish takes of this process's memory, without what the C library keeps of freed tensors."""
    give_back(CPU)
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**16)
    Path("/proc/self/clear_refs").write_text("5")
    resident, mapped, private = status("VmRSS"), status("RssShmem"), resident_bytes(CPU)
    publish()
    peak, mapped = status("VmHWM") - resident, status("RssShmem") - mapped
    give_back(CPU)
    return {"peak": peak, "mapped": mapped, "kept": resident_bytes(CPU) - private}


class Process:
    """What one of the processes has."""

    def __init__(self, place: int, rendezvous: Rendezvous, into: Path) -> None:
        self.place, self.rendezvous, self.into = place, rendezvous, into
        self.shard, self.memory = load(str(into / "model"), rendezvous, "actor", place)
        self.masters = self.shard
        self.tensors, self.halves = self.shard.trained(), [held_by(self.shard, rank) for rank in (0, 1)]
        self.lines: dict[str, Transport] = {}

    def load_masters(self) -> None:
        """Have the half of a model that is published in a smaller type, where it is sent."""
        if self.place != TAKER:
            self.masters, _ = load(str(self.into / "model"), self.rendezvous, "masters", self.place, "bfloat16")

    def publish(self, way: str, version: int) -> None:
        """Take part in a publish."""
        kind = TRANSPORT_KINDS.get(way)
        if kind is None or not kind.is_streamed:
            self.publish_folder(self.shard if way == "folder" else self.masters, version)
            return
        manifest = Manifest.of(self.halves, bucket_bytes=kind.bucket_mib[0] * 2**20 + HEADER_BYTES)
        if way not in self.lines:
            exposed = None if self.memory is None else self.memory.exposed(self.halves[self.place], self.tensors)
            plan = TransferPlan(way, MEMBERS, manifest, 60.0)
            self.lines[way] = join(kind, self.rendezvous, plan, self.place, device="cpu", exposed=exposed)
        if self.place == TAKER:
            sink = Receiver(manifest, self.tensors, version)
            self.lines[way].run(version, None, sink, lambda: None)
            sink.finish()
        else:
            self.lines[way].run(version, Sender(self.tensors), None, lambda: None)

    def publish_folder(self, shard: ModelShard, version: int) -> None:
        """Write a folder, or read it when it is there."""
        if self.place != TAKER:
            published_folder.write(shard, self.into, version, base=str(self.into / "model"))
            return
        where = published_folder.version_folder(self.into, version)
        while not where.exists():
            time.sleep(0.01)
        published_folder.read(shard, where, version)


def main(small: str, into: Path, place: int) -> None:
    rendezvous = open_meeting(into)
    load(small, rendezvous, "small", place)  # with all the code that this takes
    give_back(CPU)
    before = resident_bytes(CPU)
    me = Process(place, rendezvous, into)
    give_back(CPU)
    told: dict[str, object] = {"own": sum(tensor.nbytes for tensor in me.tensors.values())}
    told["loaded"] = resident_bytes(CPU) - before
    me.load_masters()
    for version, (way, turn) in enumerate(itertools.product(WAYS, ("first", "second")), 1):
        if place != TAKER:
            for tensor in (*me.tensors.values(), *me.masters.trained().values()):
                tensor.detach().fill_(version)
        told[f"{way}, {turn}"] = measured(lambda way=way, version=version: me.publish(way, version))
        assert all(bool((tensor == version).all()) for tensor in me.tensors.values())
    (into / f"told by {place}.json").write_text(json.dumps(told))
