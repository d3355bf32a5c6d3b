"""One rank of `test_lora.py`: trains adapters in every case that has a place for it and writes what it got."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import safetensors.torch
import torch
from ranks import CONFIG, EPS, loss_and_norm, make_actor_batch, open_meeting
from torch import Tensor

from rallypoint.cluster import Mesh
from rallypoint.config import LoRAConfig
from rallypoint.engine import TrainingEngine, critic_values, optimizer_tensors, policy_outputs
from rallypoint.model_files import load_critic, load_policy, read_adapter, save_adapter
from rallypoint.models import ModelShard
from rallypoint.models.shard import gather
from rallypoint.parallel import DeviceMesh
from rallypoint.roles.dealing import deal
from rallypoint.types import ActorBatch, Mean, Metrics, Sequences

MESHES: dict[str, dict[str, int]] = {
    "1 process": {},
    "dp2": {"dp_replicate": 2},
    "shard2": {"dp_shard": 2},
    "tp2": {"tp": 2},
    "sp2": {"sp": 2},
    "shard2 x tp2": {"dp_shard": 2, "tp": 2},
}
ROLES = {"actor": load_policy, "critic": load_critic}
PRECISIONS = ("float64", "float32", "bfloat16")
WHOLE = "whole"
"""File that asks for the whole grid."""
LORA = LoRAConfig(rank=3, alpha=5, rslora=True)
NUM_STEPS = 3


def cases(*, whole: bool) -> Iterator[tuple[str, str, str]]:
    """Yield mesh, role and precision: all of them, or so many that any two of them meet.

    One process, which others are compared with, has all roles and precisions.
    """
    for place, name in enumerate(MESHES):
        few = (("actor", "float32"), ("critic", "float64"), (tuple(ROLES)[place % 2], "bfloat16"))
        for case in itertools.product(ROLES, PRECISIONS):
            if whole or name == "1 process" or case in few:
                yield name, *case


def outputs_of(shard: ModelShard, role: str) -> Callable[[Sequences, Tensor], Tensor]:
    """Return what the loss is made from."""
    if role == "critic":
        return lambda part, at: critic_values(shard, part, at)
    return lambda part, at: policy_outputs(shard, part, at, 0.7).logprobs


@torch.no_grad()
def excite(shard: ModelShard) -> None:
    """Give all that is trained other values than zero, whatever part of it is here."""
    generator = torch.Generator().manual_seed(3)
    for name, tensor in shard.trained().items():
        part = shard.parts[name]
        whole = torch.randn(part.shape, generator=generator) * 0.1
        tensor.copy_(whole[tuple(slice(a, a + n) for a, n in zip(part.starts, part.sizes, strict=True))])


def run(role: str, dtype: str, mesh: DeviceMesh, model_folder: str, folder: Path, part: int) -> dict[str, Tensor]:
    """Take some steps; write the adapter and read it again. Return numbers, masters, and outputs of either model."""
    shard = ROLES[role](model_folder, dtype=dtype, mesh=mesh, lora=LORA)
    excite(shard)
    engine = TrainingEngine(shard, optimizer=CONFIG, eps=EPS, max_tokens_per_micro_batch=48)
    batch = make_actor_batch()
    num_parts = mesh.sizes["dp_replicate"] * mesh.sizes["dp_shard"]
    rows = deal(batch, num_parts, 0.01)[0][part]
    frozen = {name: weight.clone() for name, weight in shard.tensors().items() if name not in shard.trained()}
    outputs = outputs_of(shard, role)

    def loss(part: ActorBatch, at: Tensor) -> tuple[Tensor, Metrics]:
        # Nothing is clipped: rounding changes it by little.
        total = -(outputs(part, at) * part.advantages[at]).sum()
        return total, Metrics({"loss": Mean(float(total.detach()), len(at))})

    steps = [
        engine.train(rows, loss, denominator=batch.num_loss_tokens, step=step, num_steps=NUM_STEPS)
        for step in range(1, NUM_STEPS + 1)
    ]
    assert all(torch.equal(shard.tensors()[name], weight) for name, weight in frozen.items())
    assert engine.optimizer is not None, "it was made with one"
    losses, norms = zip(*map(loss_and_norm, steps), strict=True)
    state = optimizer_tensors(engine.weights, engine.optimizer)
    stepped = {name: state.get(f"{name}/master", tensor) for name, tensor in shard.trained().items()}
    weights = {
        f"weight/{name}": tensor
        for name, tensor in gather(stepped, {name: shard.parts[name] for name in stepped}, mesh)
    }
    save_adapter(shard, folder, base=model_folder)
    again = ROLES[role](model_folder, dtype=dtype, mesh=mesh, lora=LoRAConfig(path=str(folder)), frozen=True)
    read_adapter(shard, folder)
    evaluated = [
        TrainingEngine(one, optimizer=None, max_tokens_per_micro_batch=48).evaluate(rows, outputs_of(one, role)).values
        for one in (shard, again)
    ]
    held = {f"bytes/{name}": torch.tensor(tensor.nbytes) for name, tensor in again.tensors().items()}
    numbers = {"losses": torch.tensor(losses, dtype=torch.float64), "norms": torch.tensor(norms, dtype=torch.float64)}
    said = dict(zip(("outputs", "outputs again"), evaluated, strict=True))
    return {name: tensor.detach().clone() for name, tensor in (numbers | said | weights | held).items()}


def main(model_folder: str, folder: Path, rank: int) -> None:
    rendezvous = open_meeting(folder)
    for name, sizes in sorted(MESHES.items(), key=lambda item: -math.prod(item[1].values())):
        grid = Mesh({"dp_replicate": 1, "dp_shard": 1, "sp": 1, "tp": 1} | sizes)
        if rank >= grid.size:
            continue
        mesh = DeviceMesh.connect(rendezvous, name, rank, sizes, timeout_s=120)
        for of_mesh, role, dtype in cases(whole=(folder / WHOLE).exists()):
            if of_mesh != name:
                continue
            case = f"{name}, {role}, {dtype}"
            got = run(role, dtype, mesh, model_folder, folder / case, grid.part(rank))
            safetensors.torch.save_file(got, folder / f"{case}, {rank}.safetensors")
