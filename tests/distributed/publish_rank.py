"""One process of `test_publishing.py`: two send halves of a model, two take over all of it, and one of them dies."""

import itertools
import json
import os
import signal
from pathlib import Path

import torch
from ranks import open_meeting

from rallypoint.errors import RallyError
from rallypoint.model_files import load_policy
from rallypoint.models import Part
from rallypoint.transport_kinds import BROADCAST, MEMORY
from rallypoint.weights import HEADER_BYTES, Held, Manifest, Participant, Receiver, Sender, TransferPlan, join
from rallypoint.weights.shared import share

MEMBERS = (Participant(0, None), Participant(1, None), Participant(None, 0), Participant(None, 1))
VICTIM = 3


def halves(model: dict[str, torch.Tensor]) -> list[dict[str, Part]]:
    """The rows of every tensor that each sender has."""
    middles = {name: -(-len(tensor) // 2) for name, tensor in model.items()}
    return [
        {
            name: Part.whole(tensor.shape).rows(*((0, middles[name]), (middles[name], len(tensor)))[rank])
            for name, tensor in model.items()
        }
        for rank in (0, 1)
    ]


def main(model_folder: str, folder: Path, place: int) -> None:
    rendezvous, model = open_meeting(folder), load_policy(model_folder, dtype="float32").trained()
    parts = halves(model)
    manifest = Manifest.of(
        [{name: Held(torch.float32, part) for name, part in rank.items()} for rank in parts],
        bucket_bytes=HEADER_BYTES + 1024,
    )
    own: dict[str, torch.Tensor] = {}
    exposed = None
    if place < 2:
        own = {
            name: tensor[parts[place][name].within(Part.whole(tensor.shape))].clone() for name, tensor in model.items()
        }
        memory = share(own.values())
        held = {name: Held(torch.float32, parts[place][name]) for name in own}
        exposed = None if memory is None else memory.exposed(held, own)
    first = {name: tensor.clone() for name, tensor in own.items()}
    lines = {
        kind.name: join(
            kind, rendezvous, TransferPlan(kind.name, MEMBERS, manifest, 60.0), place, device="cpu", exposed=exposed
        )
        for kind in (MEMORY, BROADCAST)
    }
    said: dict[str, str] = {}
    for version, way in ((1, "memory"), (2, "broadcast"), (3, "memory"), (3, "broadcast")):
        ticks = itertools.count()

        def tick(version: int = version, ticks: itertools.count = ticks) -> None:
            if place == VICTIM and version == 3 and next(ticks) == 5:
                os.kill(os.getpid(), signal.SIGKILL)

        source = sink = None
        if place < 2:
            for name, tensor in own.items():
                tensor.copy_(first[name] * version)
            source = Sender(own)
        else:
            taken = {name: torch.zeros_like(tensor) for name, tensor in model.items()}
            sink = Receiver(manifest, taken, version)
        try:
            lines[way].run(version, source, sink, tick)
            if sink is not None:
                sink.finish()
                assert all(torch.equal(taken[name], tensor * version) for name, tensor in model.items())
            said[f"{way} {version}"] = "arrived"
        except RallyError as error:
            said[f"{way} {version}"] = type(error).__name__
    (folder / f"said by {place}.json").write_text(json.dumps(said))
