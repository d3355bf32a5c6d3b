"""What the tests of this folder share: rows to learn from, and ranks that are processes of their own.

Processes are started once for many cases, because importing torch takes most of their time. A program of a rank is
called with the model's folder, the folder to write to, which also holds the rendezvous, and its rank.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from rallypoint.cluster.rendezvous import Rendezvous, open_rendezvous
from rallypoint.config import OptimizerConfig
from rallypoint.types import ActorBatch, CriticBatch, Last, Mean, Metrics, offsets_from_lengths
from rallypoint.types import Sequences as Rows

LENGTHS = (9, 2, 17, 40, 1, 6, 33, 8)
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
    assert isinstance(norm, Last)
    return loss.total, norm.scalar


def open_meeting(folder: Path) -> Rendezvous:
    """Return the place where the ranks that write to a folder meet."""
    return pickle.loads((folder / "rendezvous").read_bytes())


def run_ranks(program: str, model: str, folder: Path, *, statuses: Sequence[int], limit_s: float) -> None:
    """Run a program of this folder on every rank, to the end.

    Args:
        program: file name.
        model: folder that they load.
        folder: where they write to.
        statuses: what each rank has to end with.
        limit_s: how long they may take.
    """
    command = [sys.executable, str(Path(__file__).with_name(program)), model, str(folder)]
    with open_rendezvous("tcp", folder.name, lease_s=3) as rendezvous:
        (folder / "rendezvous").write_bytes(pickle.dumps(rendezvous))
        processes = [
            subprocess.Popen(
                [*command, str(rank)],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(len(statuses))
        ]
        try:
            said = [process.communicate(timeout=limit_s)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
    assert [process.returncode for process in processes] == list(statuses), "\n".join(said)
