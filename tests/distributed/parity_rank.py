"""One rank of the parity table: takes three steps in every case that has a place for it and writes what it got.

Its arguments are the model's folder, the folder to write to, which also holds the rendezvous, and the rank.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

from rallypoint.algorithms import entropy_bonus, kl_loss, policy_loss, value_loss
from rallypoint.cluster.mesh import Mesh
from rallypoint.config import OptimizerConfig
from rallypoint.engine import Engine, critic_values, policy_outputs
from rallypoint.models import ModelShard, gather, load_critic, load_policy
from rallypoint.parallel import DeviceMesh
from rallypoint.roles.dealing import deal
from rallypoint.types import ActorBatch, CriticBatch, Last, Mean, Metrics, Sequences, offsets_from_lengths

MESHES: dict[str, dict[str, int]] = {
    "1 process": {},
    "dp2": {"dp_replicate": 2},
    "dp4": {"dp_replicate": 4},
    "shard2": {"dp_shard": 2},
    "shard4": {"dp_shard": 4},
    "dp2 x shard2": {"dp_replicate": 2, "dp_shard": 2},
    "tp2": {"tp": 2},
    "sp2": {"sp": 2},
    "dp2 x tp2": {"dp_replicate": 2, "tp": 2},
    "dp2 x sp2": {"dp_replicate": 2, "sp": 2},
    "shard2 x tp2": {"dp_shard": 2, "tp": 2},
    "shard2 x sp2": {"dp_shard": 2, "sp": 2},
    "sp2 x tp2": {"sp": 2, "tp": 2},
}
CAPS = {"one micro-batch": 10_000, "many": 48}
NUM_STEPS = 3
LENGTHS = [9, 2, 17, 40, 1, 6, 33, 8, 24, 24, 3]
CONFIG = OptimizerConfig(lr=1e-2, weight_decay=0.1, max_grad_norm=0.5)
# A large eps keeps Adam's division well conditioned: noise in a gradient of zero is not blown up to a step of lr.
EPS = 1e-3


@dataclasses.dataclass(frozen=True)
class Case:
    """One cell of the table."""

    mesh: str
    rows: str
    cut: str
    role: str
    dtype: str

    def __str__(self) -> str:
        return ", ".join(dataclasses.astuple(self))


def cases() -> Iterator[Case]:
    """Yield every cell; those of one mesh are neighbours."""
    for cell in itertools.product(MESHES, ("packed", "padded"), CAPS, ("actor", "critic"), ("float64", "float32")):
        yield Case(*cell)


def make_rows() -> Sequences:
    """Rows of different lengths, with holes in their masks; nothing is trained in row 1."""
    generator = torch.Generator().manual_seed(0)
    offsets = offsets_from_lengths(torch.tensor(LENGTHS))
    num_tokens = int(offsets[-1])
    loss_mask = torch.rand(num_tokens, generator=generator) < 0.7
    loss_mask[offsets[:-1]] = False
    loss_mask[offsets[1] : offsets[2]] = False
    return Sequences(
        offsets=offsets,
        tokens=torch.randint(20, (num_tokens,), generator=generator),
        loss_mask=loss_mask,
        prompt_index=torch.arange(len(LENGTHS)),
        sample_index=torch.zeros(len(LENGTHS), dtype=torch.int64),
    )


def make_batch(role: str) -> ActorBatch | CriticBatch:
    """What the role learns from; the numbers are far enough apart for some tokens to be clipped."""
    rows, generator = make_rows(), torch.Generator().manual_seed(1)
    one, two, three = (torch.randn(rows.num_tokens, generator=generator, dtype=torch.float64) for _ in range(3))
    if role == "actor":
        return rows.widen(ActorBatch, old_logprobs=one * 0.3 - 3, reference_logprobs=two * 0.3 - 3, advantages=three)
    return rows.widen(CriticBatch, values=one, returns=two)


def loss_of(shard: ModelShard, part: Sequences, at: Tensor) -> tuple[Tensor, Metrics]:
    """Return what PPO minimises: policy loss, entropy bonus and KL, or the value loss."""
    device = shard.model.device
    everything = torch.ones(len(at), dtype=torch.bool, device=device)
    if isinstance(part, ActorBatch):
        outputs = policy_outputs(shard, part, at, 0.9)
        policy = policy_loss(
            outputs.logprobs,
            part.old_logprobs[at].to(device),
            part.advantages[at].to(device),
            everything,
            clip_low=0.2,
            clip_high=0.3,
            dual_clip=None,
        )
        assert part.reference_logprobs is not None
        kl = kl_loss(outputs.logprobs, part.reference_logprobs[at].to(device), everything, estimator="k3")
        total = policy.sum - 0.1 * entropy_bonus(outputs.entropy, everything).sum + 0.1 * kl.sum
    else:
        assert isinstance(part, CriticBatch)
        values = critic_values(shard, part, at)
        total = value_loss(values, part.values[at].to(device), part.returns[at].to(device), everything, clip=0.2).sum
    return total, Metrics({"loss": Mean(float(total.detach()), len(at))})


def run(
    case: Case, mesh: DeviceMesh, model_folder: str, part: ActorBatch | CriticBatch, denominator: int
) -> dict[str, Tensor]:
    """Take the steps of a case and return this rank's numbers: `loss`, `grad_norm`, and its part of every weight."""
    load = load_policy if case.role == "actor" else load_critic
    shard = load(model_folder, dtype=case.dtype, mesh=mesh)
    engine = Engine(
        shard,
        optimizer=CONFIG,
        eps=EPS,
        max_tokens_per_micro_batch=CAPS[case.cut],
        padded=case.rows == "padded",
    )
    for step in range(1, NUM_STEPS + 1):
        metrics = engine.train(
            part,
            lambda rows, at: loss_of(shard, rows, at),
            denominator=denominator,
            step=step,
            num_steps=NUM_STEPS,
        )
    # A rank may have no row.
    loss, norm = metrics.get("loss", Mean(0.0, 0.0)), metrics["grad_norm"]
    assert isinstance(loss, Mean)
    assert isinstance(norm, Last)
    numbers = {"loss": loss.total, "grad_norm": norm.scalar}
    tensors = {name: torch.tensor(number, dtype=torch.float64) for name, number in numbers.items()}
    held = {f"held/{name}": tensor for name, tensor in shard.tensors().items()}
    whole = {name: tensor.detach() for name, tensor in gather(shard.tensors(), shard.parts, mesh)}
    return {name: tensor.clone() for name, tensor in (tensors | held | whole).items()}


def main(model_folder: str, folder: Path, rank: int) -> None:
    torch.set_num_threads(1)
    rendezvous = pickle.loads((folder / "rendezvous").read_bytes())
    # The largest meshes first: nobody waits for ranks that are busy with smaller ones.
    ordered = sorted(cases(), key=lambda case: -math.prod(MESHES[case.mesh].values()))
    for name, of_mesh in itertools.groupby(ordered, lambda case: case.mesh):
        grid = Mesh(MESHES[name] or {"dp": 1})
        if rank >= grid.size:
            continue
        mesh = DeviceMesh.connect(rendezvous, name, rank, MESHES[name], timeout_s=120)
        for case in of_mesh:
            batch = make_batch(case.role)
            part = deal(batch, grid.num_parts, 0.01)[0][grid.part(rank)]
            got = run(case, mesh, model_folder, part, batch.num_loss_tokens)
            safetensors.torch.save_file(got, folder / f"{case}, {rank}.safetensors")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
