"""One rank of the parity tables: takes steps in every case that has a place for it and writes what it got."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from pathlib import Path

import safetensors.torch
import torch
from ranks import (
    CONFIG,
    EPS,
    loss_and_norm,
    make_actor_batch,
    make_critic_batch,
    make_distilled_batch,
    make_pair_batch,
    open_meeting,
)
from torch import Tensor

from rallypoint.algorithms import DistillationLoss, LossInputs, PreferenceLoss
from rallypoint.algorithms.critic_losses import value_loss
from rallypoint.algorithms.losses import entropy_bonus, kl_loss, policy_loss
from rallypoint.algorithms.policy_losses import Clip
from rallypoint.cluster.mesh import Mesh
from rallypoint.engine import TrainingEngine, critic_values, policy_outputs
from rallypoint.model_files import load_critic, load_policy
from rallypoint.models import ModelShard
from rallypoint.models.shard import gather
from rallypoint.parallel import DeviceMesh
from rallypoint.roles.dealing import deal
from rallypoint.types import ActorBatch, CriticBatch, DistilledBatch, Mean, Metrics, PairBatch, Sequences

MESHES: dict[str, dict[str, int]] = {
    "1 process": {},
    "dp2": {"dp_replicate": 2},
    "dp4": {"dp_replicate": 4},
    "shard2": {"dp_shard": 2},
    "shard4": {"dp_shard": 4},
    "dp2 x shard2": {"dp_replicate": 2, "dp_shard": 2},
    "tp2": {"tp": 2},
    "sp2": {"sp": 2},
    "cp2": {"cp": 2},
    "cp4": {"cp": 4},
    "dp2 x tp2": {"dp_replicate": 2, "tp": 2},
    "dp2 x sp2": {"dp_replicate": 2, "sp": 2},
    "shard2 x tp2": {"dp_shard": 2, "tp": 2},
    "shard2 x sp2": {"dp_shard": 2, "sp": 2},
    "sp2 x tp2": {"sp": 2, "tp": 2},
    "shard2 x cp2": {"dp_shard": 2, "cp": 2},
    "cp2 x sp2": {"cp": 2, "sp": 2},
    "cp2 x tp2": {"cp": 2, "tp": 2},
}
EXPERT_MESHES: dict[str, dict[str, int]] = {
    "ep2": {"ep": 2},
    "ep4": {"ep": 4},
    "dp2 x ep2": {"dp_replicate": 2, "ep": 2},
    "shard2 x ep2": {"dp_shard": 2, "ep": 2},
    "ep2 x sp2": {"ep": 2, "sp": 2},
    "ep2 x tp2": {"ep": 2, "tp": 2},
}
"""Meshes of mixtures of experts."""
OTHER_MIXTURES = ("gpt_oss",)
"""Families that have one cell of each of these meshes; Qwen3-MoE has all."""
ALL_MESHES = MESHES | EXPERT_MESHES
CAPS = {"one micro-batch": 10_000, "many": 48}
COLUMNS = (("packed", "padded"), tuple(CAPS), ("actor", "critic"), ("float64", "float32"))
"""The columns beside the mesh: rows, cut, role, dtype."""
FAMILIES = (
    "qwen3_moe",
    "gpt_oss",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "qwen3_next",
    "glm4_moe",
    "deepseek_v3",
    "gemma",
    "gemma2",
    "gemma3_text",
    "mistral",
    "qwen2",
)
"""Beside Qwen3, which all cells are of."""
OF_FAMILIES = (
    ("1 process", "packed", "one micro-batch"),
    ("1 process", "padded", "many"),
    ("shard2", "packed", "many"),
    ("tp2", "packed", "many"),
    ("sp2", "packed", "many"),
    ("sp2", "padded", "one micro-batch"),
    ("cp4", "packed", "many"),
)
"""The cells that other families have too: an actor's, in float64. Several axes at a time know nothing of families."""
OF_OTHERS = ("gemma", "mistral", "qwen2")
"""Families whose layers have nothing that no other has: Gemma 2's norms, Gemma 2's windows, gpt-oss's biases. Of their
cells a few are enough beside the whole table."""
OF_LOSSES = (
    ("1 process", "packed", "one micro-batch"),
    ("1 process", "packed", "many"),
    ("dp2", "packed", "many"),
    ("shard2", "packed", "many"),
    ("tp2", "packed", "many"),
    ("sp2", "packed", "many"),
    ("dp2 x tp2", "packed", "one micro-batch"),
    ("sp2 x tp2", "packed", "many"),
)
"""The cells of pairs, and of a teacher's likeliest tokens, in float64: other losses ask more of rows and head."""
LOSSES = {
    "pairs": PreferenceLoss(name="sigmoid", beta=0.5),
    "top k": DistillationLoss(name="mixed", objective=Clip(clip_low=0.2, clip_high=0.2, dual_clip=None)),
}
BASE = ("1 process", "packed", "one micro-batch")
"""The cell that others are compared with."""
BASES = tuple((*BASE, role, dtype) for role in COLUMNS[2] for dtype in COLUMNS[3])
WHOLE = "whole"
"""File that asks for the whole table."""
NUM_STEPS = 3
FEW_STEPS = 2
"""Of what is no part of the whole table: the second step is the first with a state of the optimizer."""
TEMPERATURE = 0.9
LENGTHS = (9, 2, 17, 40, 1, 6, 33, 8, 24, 24, 3)


@dataclasses.dataclass(frozen=True)
class Case:
    """One cell of the table."""

    mesh: str
    rows: str
    cut: str
    role: str
    dtype: str
    family: str = "qwen3"

    def __str__(self) -> str:
        return ", ".join(dataclasses.astuple(self))


def cases(*, whole: bool) -> Iterator[Case]:
    """Yield the cells of the table: all of them, or so many that every two values of different columns meet.

    Args:
        whole: yield all, which takes four times as long.
    """
    of_qwen3 = list(itertools.product(MESHES, *COLUMNS)) if whole else [*pairwise(), *BASES]
    yield from (Case(*cell) for cell in dict.fromkeys(of_qwen3))
    for place, family in enumerate(FAMILIES):
        # Few: whoever shares rows (sp) does it in every family, but either packed or padded; then every other mesh.
        few = [BASE, *(cell for number, cell in enumerate(OF_FAMILIES[2:]) if number != 2 + place % 2)]
        few = [BASE, *few[1 + place % 2 :: 2]] if family in OF_OTHERS else few
        yield from (Case(*cell, "actor", "float64", family) for cell in (OF_FAMILIES if whole else few))
    for place, mesh in enumerate(EXPERT_MESHES):
        yield from (Case(mesh, "packed", "many", "actor", "float64", family) for family in OTHER_MIXTURES)
        for role in COLUMNS[2] if whole else COLUMNS[2][place % 2 : place % 2 + 1]:
            yield Case(*BASE, role, "float64", "qwen3_moe")
            few = [("padded", "one micro-batch"), *[("packed", "many")] * (mesh == "ep4")]
            for rows, cut in itertools.product(*COLUMNS[:2]) if whole else few:
                yield Case(mesh, rows, cut, role, "float64", "qwen3_moe")
    for place, role in enumerate(LOSSES):
        few = [cell for cell in OF_LOSSES if cell != OF_LOSSES[-1 - place]]  # of two meshes of two axes each has one
        yield from (Case(*cell, role, "float64") for cell in (OF_LOSSES if whole else few))


def pairwise() -> Iterator[tuple[str, ...]]:
    """Yield two cells of each mesh that have no value of another column in common; with the next mesh others meet.

    >>> cells = list(pairwise())
    >>> two_columns = itertools.combinations((MESHES, *COLUMNS), 2)
    >>> wanted = {pair for columns in two_columns for pair in itertools.product(*columns)}
    >>> len(cells), wanted <= {pair for cell in cells for pair in itertools.combinations(cell, 2)}
    (36, True)
    """
    for place, mesh in enumerate(MESHES):
        for flipped in (0, 1):
            yield (mesh, *(column[(place >> bit & 1) ^ flipped] for bit, column in enumerate(COLUMNS)))


def make_batch(role: str) -> ActorBatch | CriticBatch | PairBatch:
    """Return what the role learns from."""
    if role == "pairs":
        return make_pair_batch()
    if role == "top k":
        return make_distilled_batch(LENGTHS)
    return make_actor_batch(LENGTHS) if role == "actor" else make_critic_batch(LENGTHS)


def loss_of(shard: ModelShard, part: Sequences, at: Tensor) -> tuple[Tensor, Metrics]:
    """Return what PPO minimises: policy loss, entropy bonus and KL, or the value loss; or one of `LOSSES`."""
    device = shard.model.device
    everything = torch.ones(len(at), dtype=torch.bool, device=device)
    if isinstance(part, PairBatch | DistilledBatch):
        beside = part.top_tokens[at] if isinstance(part, DistilledBatch) and part.top_tokens is not None else None
        outputs = policy_outputs(shard, part, at, TEMPERATURE, beside)
        inputs = LossInputs(part, at, lambda tensor: tensor.to(device), is_first_step=True)
        total, _ = LOSSES["pairs" if beside is None else "top k"](outputs, inputs)
    elif isinstance(part, ActorBatch):
        outputs = policy_outputs(shard, part, at, TEMPERATURE)
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


class Models:
    """The models of one mesh. Each is loaded once, and every case begins with the weights that were loaded."""

    def __init__(self, folder: str, mesh: DeviceMesh) -> None:
        self.folder, self.mesh = folder, mesh
        self._loaded: dict[tuple[str, ...], tuple[ModelShard, dict[str, Tensor]]] = {}

    @torch.no_grad()
    def of(self, case: Case) -> ModelShard:
        """Return a case's model as it is in its folder."""
        key = (case.family, case.role, case.dtype)
        if key not in self._loaded:
            load = load_critic if case.role == "critic" else load_policy
            shard = load(f"{self.folder}/{case.family}", dtype=case.dtype, mesh=self.mesh)
            self._loaded[key] = shard, {name: tensor.clone() for name, tensor in shard.tensors().items()}
        shard, loaded = self._loaded[key]
        for name, tensor in shard.tensors().items():
            tensor.copy_(loaded[name])
        return shard


def run(
    case: Case,
    models: Models,
    part: ActorBatch | CriticBatch | PairBatch,
    denominator: float,
    num_steps: int = FEW_STEPS,
) -> dict[str, Tensor]:
    """Take the steps of a case and return this rank's numbers: `loss`, `grad_norm`, and its part of every weight."""
    shard = models.of(case)
    engine = TrainingEngine(
        shard,
        optimizer=CONFIG,
        eps=EPS,
        max_tokens_per_micro_batch=CAPS[case.cut],
        padded=case.rows == "padded",
    )
    for step in range(1, num_steps + 1):
        metrics = engine.train(
            part,
            lambda rows, at: loss_of(shard, rows, at),
            denominator=denominator,
            step=step,
            num_steps=num_steps,
        )
    numbers = dict(zip(("loss", "grad_norm"), loss_and_norm(metrics), strict=True))
    tensors = {name: torch.tensor(number, dtype=torch.float64) for name, number in numbers.items()}
    held = {f"held/{name}": tensor for name, tensor in shard.tensors().items()}
    whole = {name: tensor.detach() for name, tensor in gather(shard.tensors(), shard.parts, models.mesh)}
    return {name: tensor.clone() for name, tensor in (tensors | held | whole).items()}


def main(model_folder: str, folder: Path, rank: int) -> None:
    rendezvous, whole = open_meeting(folder), (folder / WHOLE).exists()
    # The largest meshes first: nobody waits for ranks that are busy with smaller ones.
    ordered = sorted(
        dict.fromkeys(cases(whole=whole)),
        key=lambda case: (-math.prod(ALL_MESHES[case.mesh].values()), case.mesh),
    )
    for name, of_mesh in itertools.groupby(ordered, lambda case: case.mesh):
        grid = Mesh(ALL_MESHES[name] or {"dp": 1})
        if rank >= grid.size:
            continue
        models = Models(model_folder, DeviceMesh.connect(rendezvous, name, rank, ALL_MESHES[name], timeout_s=120))
        for case in of_mesh:
            batch = make_batch(case.role)
            part = deal(batch, grid.num_parts, 0.01)[0][grid.part(rank)]
            loss = LOSSES.get(case.role)
            denominator = loss.denominator(batch) if loss else batch.num_loss_tokens
            got = run(case, models, part, denominator, NUM_STEPS if whole else FEW_STEPS)
            safetensors.torch.save_file(got, folder / f"{case}, {rank}.safetensors")
