"""What the tests of this folder share: rows to learn from, and ranks that are processes of their own.

Processes are started once for many cases, and forked from one that has imported torch and transformers, because these
imports take longer than most cases. A rank's program is a module whose `main` takes the model's folder, the folder to
write to, which also holds the rendezvous, and its rank.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import pickle
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from fork_server import fork_context
from torch import Tensor

from rallypoint.cluster.rendezvous import Rendezvous, open_rendezvous
from rallypoint.config import OptimizerConfig
from rallypoint.types import (
    ActorBatch,
    CriticBatch,
    DistilledBatch,
    Mean,
    Metrics,
    PairBatch,
    Sequences as Rows,
    offsets_from_lengths,
)

LENGTHS = (9, 2, 17, 40, 1, 6, 33, 8)
PAIR_LENGTHS = (9, 12, 17, 24, 11, 6, 20, 8, 24, 24)
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
TOLERANCES = {"float64": 1e-10, "float32": 1e-5}
CONFIG = OptimizerConfig(lr=1e-2, weight_decay=0.1, max_grad_norm=0.5)
# A large eps keeps Adam's division well conditioned: noise in a gradient of zero is not blown up to a step of lr.
EPS = 1e-3


def make_rows(lengths: Sequence[int] = LENGTHS) -> Rows:
    """Rows of different lengths, two of a group, which begin alike; with holes in their masks, nothing of row 1."""
    generator = torch.Generator().manual_seed(0)
    offsets = offsets_from_lengths(torch.tensor(lengths))
    num_tokens = int(offsets[-1])
    loss_mask = torch.rand(num_tokens, generator=generator) < 0.7
    loss_mask[offsets[:-1]] = False
    loss_mask[offsets[1] : offsets[2]] = False
    tokens, rows = torch.randint(20, (num_tokens,), generator=generator), torch.arange(len(lengths))
    for row in rows[1::2].tolist():
        shared = min(7, lengths[row - 1], lengths[row])
        first, second = offsets[row - 1 : row + 1].tolist()
        tokens[second : second + shared] = tokens[first : first + shared]
    return Rows(offsets=offsets, tokens=tokens, loss_mask=loss_mask, prompt_index=rows // 2, sample_index=rows % 2)


def make_actor_batch(lengths: Sequence[int] = LENGTHS) -> ActorBatch:
    """What an actor learns from; the numbers are far enough apart for some tokens to be clipped."""
    rows, (one, two, three) = make_rows(lengths), _numbers(lengths)
    old, reference = one * 0.3 - 3, two * 0.3 - 3
    return rows.widen(
        ActorBatch, rollout_logprobs=old, old_logprobs=old, reference_logprobs=reference, advantages=three
    )


def make_critic_batch(lengths: Sequence[int] = LENGTHS) -> CriticBatch:
    """What a critic learns from."""
    rows, (one, two, _) = make_rows(lengths), _numbers(lengths)
    return rows.widen(CriticBatch, values=one, returns=two)


def make_pair_batch() -> PairBatch:
    """Pairs of answers to one prompt each, and what a reference says of them."""
    rows = make_rows(PAIR_LENGTHS)
    reference = torch.linspace(-90, -10, len(rows), dtype=torch.float64)
    mask = torch.ones(rows.num_tokens, dtype=torch.bool)
    within = torch.arange(rows.num_tokens) - rows.offsets[:-1][rows.row_of_token]
    return dataclasses.replace(rows, loss_mask=mask & (within > 2)).widen(PairBatch, reference_logprobs=reference)


def make_distilled_batch(lengths: Sequence[int] = LENGTHS) -> DistilledBatch:
    """What a student learns from a teacher's four likeliest tokens; one row has no teacher."""
    rows, generator = make_actor_batch(lengths), torch.Generator().manual_seed(2)
    teacher = torch.randn(rows.num_tokens, 20, generator=generator, dtype=torch.float64).log_softmax(1)
    top = teacher.topk(4, dim=1)
    said = teacher.gather(1, rows.tokens.unsqueeze(1)).squeeze(1)
    said[rows.row_of_token == 3] = torch.nan
    return rows.widen(DistilledBatch, teacher_logprobs=said, top_logprobs=top.values, top_tokens=top.indices)


def _numbers(lengths: Sequence[int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(sum(lengths), generator=generator, dtype=torch.float64) for _ in range(3)]


def loss_from(
    outputs: Callable[[Rows, Tensor], Tensor],
) -> Callable[[ActorBatch, Tensor], tuple[Tensor, Metrics]]:
    """Return a clipped policy gradient over what a model says of tokens, whatever that is."""

    def loss(part: ActorBatch, at: Tensor) -> tuple[Tensor, Metrics]:
        found = outputs(part, at)
        ratio = (found - part.old_logprobs[at]).exp().clamp(0.8, 1.2)
        total = -(ratio * part.advantages[at] + 0.3 * found).sum()
        return total, Metrics({"loss": Mean(float(total.detach()), len(at))})

    return loss


def loss_and_norm(metrics: Metrics) -> tuple[float, float]:
    """Return the sum of this rank's loss, and the norm of all gradients; a rank may have no row."""
    loss, norm = metrics.get("loss", Mean(0.0, 0.0)), metrics["grad_norm"]
    assert isinstance(loss, Mean)
    assert isinstance(norm, Mean)
    return loss.total, norm.scalar


def open_meeting(folder: Path) -> Rendezvous:
    """Return the place where the ranks that write to a folder meet."""
    return pickle.loads((folder / "rendezvous").read_bytes())


def run_ranks(program: str, model: str, folder: Path, *, statuses: Sequence[int], limit_s: float = 100) -> None:
    """Run a program of this folder on every rank, to the end.

    Args:
        program: module of this folder.
        model: folder that the ranks load.
        folder: where they write to; what rank R prints goes to `R.log`.
        statuses: exit status that each rank must end with.
        limit_s: seconds that they may take together.
    """
    context = fork_context()
    with open_rendezvous("tcp", folder.name, lease_s=3) as rendezvous:
        (folder / "rendezvous").write_bytes(pickle.dumps(rendezvous))
        ranks = [context.Process(target=_run, args=(program, model, folder, rank)) for rank in range(len(statuses))]
        until = time.monotonic() + limit_s
        try:
            for rank in ranks:
                rank.start()
            for rank in ranks:
                rank.join(max(until - time.monotonic(), 0.0))
            ended = [rank.exitcode for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.join()
    said = [(folder / f"{rank}.log").read_text() for rank in range(len(ranks))]
    assert ended == list(statuses), f"exit statuses {ended}, None for a rank that did not end\n" + "\n".join(said)


def _run(program: str, model: str, folder: Path, rank: int) -> None:
    """Be a rank: compute in one thread, with all that is printed in a file."""
    log = os.open(folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT, 0o600)
    for stream in (1, 2):
        os.dup2(log, stream)
    torch.set_num_threads(1)
    importlib.import_module(program).main(model, folder, rank)
