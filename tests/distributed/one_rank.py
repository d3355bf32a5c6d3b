"""One rank of `test_processes.py`: takes the steps of every case that has a place for it and writes what it got."""

import json
import os
import signal
from pathlib import Path

import safetensors.torch
import torch
from ranks import CONFIG, DTYPES, EPS, TOLERANCES, loss_and_norm, loss_from, make_actor_batch, open_meeting

from rallypoint.cluster.rendezvous import Rendezvous
from rallypoint.engine import TrainingEngine, policy_outputs
from rallypoint.engine.forward import TokenStream
from rallypoint.model_files import load_policy
from rallypoint.models import ModelShard, lm_head, named_weights
from rallypoint.parallel import DeviceMesh
from rallypoint.types import ActorBatch, Metrics, Sequences

SHARDS = {
    "2 ranks": [[0, 1, 2, 3], [4, 5, 6, 7]],
    "3 uneven ranks": [[3], [0, 1, 2, 4], [5, 6, 7]],
    "3 ranks, one without rows": [[0, 1, 2, 3], [], [4, 5, 6, 7]],
    "3 ranks, one with nothing to train": [[1], [0, 2, 3, 4], [5, 6, 7]],
}


def connect(rendezvous: Rendezvous, name: str, rank: int, size: int) -> DeviceMesh:
    return DeviceMesh.connect(rendezvous, name, rank, {"dp_replicate": size}, timeout_s=60)


def make_engine(model_folder: str, dtype: torch.dtype, cap: int, mesh: DeviceMesh) -> TrainingEngine[ActorBatch]:
    model = load_policy(model_folder, dtype="float32").model.to(dtype)
    return TrainingEngine(ModelShard.whole(model, mesh), optimizer=CONFIG, eps=EPS, max_tokens_per_micro_batch=cap)


def take_steps(engine: TrainingEngine[ActorBatch], part: ActorBatch, denominator: int) -> Metrics:
    """Take two steps of a clipped policy gradient, in the model's own precision throughout."""

    def outputs(part: Sequences, at: torch.Tensor) -> torch.Tensor:
        if engine.model.dtype != torch.float64:
            return policy_outputs(engine.shard, part, at, 1.0).logprobs
        stream = TokenStream(engine.shard, part, at)
        everything = lm_head(engine.model)(stream.join(stream.states())).log_softmax(-1)
        return everything.gather(-1, part.tokens[at].unsqueeze(-1)).squeeze(-1)

    for step in (1, 2):
        metrics = engine.train(part, loss_from(outputs), denominator=denominator, step=step, num_steps=2)
    return metrics


def main(model_folder: str, folder: Path, rank: int) -> None:
    batch = make_actor_batch()
    rendezvous = open_meeting(folder)
    cases = {(name, dtype): shards for name, shards in SHARDS.items() for dtype in TOLERANCES}
    if rank == 0:
        cases |= {("1 rank", dtype): [list(range(len(batch)))] for dtype in TOLERANCES}
    for (name, dtype), shards in cases.items():
        if rank >= len(shards):
            continue
        mesh = connect(rendezvous, f"{name} in {dtype}", rank, len(shards))
        cap = 1000 if len(shards) == 1 else 45
        engine = make_engine(model_folder, DTYPES[dtype], cap, mesh)
        metrics = take_steps(engine, batch.rows(shards[rank]), batch.num_loss_tokens)
        numbers = dict(zip(("loss", "grad_norm"), loss_and_norm(metrics), strict=True))
        tensors = {key: torch.tensor(number, dtype=torch.float64) for key, number in numbers.items()}
        tensors |= {key: weight.detach() for key, weight in named_weights(engine.model).items()}
        safetensors.torch.save_file(tensors, folder / f"{name} in {dtype}, {rank}.safetensors")
    lose_a_rank(model_folder, folder, rank, batch, connect(rendezvous, "the last case", rank, 3))


def lose_a_rank(model_folder: str, folder: Path, rank: int, batch: ActorBatch, mesh: DeviceMesh) -> None:
    """The last rank dies in the middle of its step; the others say what they noticed, and whether they stepped."""
    engine = make_engine(model_folder, torch.float32, 45, mesh)
    before = {name: weight.detach().clone() for name, weight in named_weights(engine.model).items()}
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    noticed = "nothing"
    try:
        take_steps(engine, batch.split(3)[rank], batch.num_loss_tokens)
    except RuntimeError as error:
        noticed = str(error)
    same = all(torch.equal(weight, before[name]) for name, weight in named_weights(engine.model).items())
    (folder / f"death seen by {rank}.json").write_text(json.dumps({"noticed": noticed, "weights are untouched": same}))
