"""One rank of `test_processes.py`: takes the steps of every case that has a place for it and writes what it got.

Its arguments are the model's folder, the folder to write to, which also holds the rendezvous, and the rank.
"""

import json
import os
import pickle
import signal
import sys
from pathlib import Path

import safetensors.torch
import torch

from rallypoint.cluster.rendezvous import Rendezvous
from rallypoint.config import OptimizerConfig
from rallypoint.engine import Engine, policy_outputs
from rallypoint.engine.forward import hidden_states
from rallypoint.models import ModelShard, lm_head, load_policy, named_weights
from rallypoint.parallel import DeviceMesh
from rallypoint.types import ActorBatch, Last, Mean, Metrics, offsets_from_lengths

LENGTHS = [9, 2, 17, 40, 1, 6, 33, 8]
SHARDS = {
    "2 ranks": [[0, 1, 2, 3], [4, 5, 6, 7]],
    "3 uneven ranks": [[3], [0, 1, 2, 4], [5, 6, 7]],
    "3 ranks, one without rows": [[0, 1, 2, 3], [], [4, 5, 6, 7]],
    "3 ranks, one with nothing to train": [[1], [0, 2, 3, 4], [5, 6, 7]],
}
DTYPES = {"float64": torch.float64, "float32": torch.float32}
CONFIG = OptimizerConfig(lr=1e-2, max_grad_norm=0.5)
EPS = 1e-3


def make_batch() -> ActorBatch:
    """Rows of different lengths; nothing is trained in row 1."""
    generator = torch.Generator().manual_seed(0)
    offsets = offsets_from_lengths(torch.tensor(LENGTHS))
    num_tokens = int(offsets[-1])
    loss_mask = torch.rand(num_tokens, generator=generator) < 0.7
    loss_mask[offsets[:-1]] = False
    loss_mask[offsets[1] : offsets[2]] = False
    return ActorBatch(
        offsets=offsets,
        tokens=torch.randint(20, (num_tokens,), generator=generator),
        loss_mask=loss_mask,
        prompt_index=torch.arange(len(LENGTHS)),
        sample_index=torch.zeros(len(LENGTHS), dtype=torch.int64),
        old_logprobs=torch.randn(num_tokens, generator=generator) - 3,
        reference_logprobs=None,
        advantages=torch.randn(num_tokens, generator=generator),
    )


def connect(rendezvous: Rendezvous, name: str, rank: int, size: int) -> DeviceMesh:
    return DeviceMesh.connect(rendezvous, name, rank, {"dp_replicate": size}, timeout_s=60)


def make_engine(model_folder: str, dtype: torch.dtype, cap: int, mesh: DeviceMesh) -> Engine[ActorBatch]:
    model = load_policy(model_folder, dtype="float32").model.to(dtype)
    return Engine(ModelShard.whole(model, mesh), optimizer=CONFIG, eps=EPS, max_tokens_per_micro_batch=cap)


def take_steps(engine: Engine[ActorBatch], part: ActorBatch, denominator: int) -> Metrics:
    """Take two steps of a clipped policy gradient, in the model's own precision throughout."""

    def loss(part: ActorBatch, at: torch.Tensor) -> tuple[torch.Tensor, Metrics]:
        if engine.model.dtype == torch.float64:
            everything = lm_head(engine.model)(hidden_states(engine.shard, part, at)).log_softmax(-1)
            logprobs = everything.gather(-1, part.tokens[at].unsqueeze(-1)).squeeze(-1)
        else:
            logprobs = policy_outputs(engine.shard, part, at, 1.0).logprobs
        ratio = (logprobs - part.old_logprobs[at]).exp().clamp(0.8, 1.2)
        total = -(ratio * part.advantages[at] + 0.3 * logprobs).sum()
        return total, Metrics({"loss": Mean(float(total.detach()), len(at))})

    for step in (1, 2):
        metrics = engine.train(part, loss, denominator=denominator, step=step, num_steps=2)
    return metrics


def main(model_folder: str, folder: Path, rank: int) -> None:
    torch.set_num_threads(1)
    batch = make_batch()
    rendezvous = pickle.loads((folder / "rendezvous").read_bytes())
    cases = {(name, dtype): shards for name, shards in SHARDS.items() for dtype in DTYPES}
    if rank == 0:
        cases |= {("1 rank", dtype): [list(range(len(batch)))] for dtype in DTYPES}
    for (name, dtype), shards in cases.items():
        if rank >= len(shards):
            continue
        mesh = connect(rendezvous, f"{name} in {dtype}", rank, len(shards))
        cap = 1000 if len(shards) == 1 else 45
        engine = make_engine(model_folder, DTYPES[dtype], cap, mesh)
        metrics = take_steps(engine, batch.rows(shards[rank]), batch.num_loss_tokens)
        loss = metrics.get("loss", Mean(0.0, 0.0))
        norm = metrics["grad_norm"]
        assert isinstance(loss, Mean)
        assert isinstance(norm, Last)
        numbers = {"loss": loss.total, "grad_norm": norm.scalar}
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


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
