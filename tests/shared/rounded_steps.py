"""Steps in bfloat16 beside the same steps in float64: how far apart they are, in numbers that tell right from wrong.

Used on an accelerator by tests/gpu, and on the CPU by tests/unit/engine, where losses that are wrong have to be found
out as well.
"""

import dataclasses
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from parity_rank import NUM_STEPS, TEMPERATURE, loss_of, make_batch
from ranks import CONFIG, EPS, loss_and_norm
from tiny_models import make_tiny_model
from torch import Tensor

from rallypoint.engine import TrainingEngine, critic_values, policy_outputs
from rallypoint.model_files import load_critic, load_policy, save_model
from rallypoint.types import ActorBatch, CriticBatch

CPU = torch.device("cpu")
BOUNDS = {"losses": 0.01, "first norm": 0.01, "norms": 0.02, "changes": 0.04, "worst change": 0.06}
"""What `errors_of` may find.

bfloat16 keeps 8 bits, so that a rounding is off by up to 0.4 %. A gradient has a few dozen of them behind it, forward
and backward through two layers: in the norm of all gradients they cancel out, in the change of a single weight they add
up like a random walk, to some 2 %. Measured for an actor on a CPU, packed and padded, in one micro-batch and many:
0.0058, 0.011, 0.020 and 0.034; in the form of accelerators, whose kernels round in other places, 0.0075, 0.014, 0.036
and 0.050; for a critic less. On an H100, with rotations by operators, 0.0080, 0.014, 0.034 and 0.048, and the norm of
the first step alone 0.0018. With the advantages of one row dropped "changes" is 0.09 and more.
"""


def make_rounded_model(folder: Path) -> str:
    """Write a model whose weights bfloat16 can say, so that both precisions begin with the same numbers."""
    with tempfile.TemporaryDirectory() as exact:
        make_tiny_model(Path(exact), architecture="qwen3", hidden_size=64, intermediate_size=128, initializer_range=0.1)
        model = load_policy(exact, dtype="bfloat16")
    model.model.config.save_pretrained(folder)
    save_model(model, folder)
    return str(folder)


@dataclasses.dataclass(frozen=True)
class Steps:
    """What some steps came to."""

    losses: list[float]
    norms: list[float]
    changes: dict[str, Tensor]
    """Name of a weight -> how the last step left it, less how the first one found it; in float64 on the CPU."""


def drop_row(batch: ActorBatch | CriticBatch, row: int) -> ActorBatch | CriticBatch:
    """Return a batch in which a row has nothing to say: no advantage, or a return that is the value already."""
    mine = batch.row_of_token == row
    if isinstance(batch, ActorBatch):
        return dataclasses.replace(batch, advantages=batch.advantages.masked_fill(mine, 0.0))
    return dataclasses.replace(batch, returns=torch.where(mine, batch.values, batch.returns))


def off_the_bound(folder: str, batch: ActorBatch | CriticBatch) -> ActorBatch | CriticBatch:
    """Return a batch in which nothing is near a place where the gradient of its clipped loss jumps.

    An actor's jumps where a ratio is at its bound: one token there, which a kernel of another kind rounds to the other
    side, changes gradients by a fifth. So a third of the old logprobs are the policy's own, the others are 1 above and
    1 below. A critic's jumps where a value is 0.2 from the old one, and where it is as far from the return as its bound
    is. So a third of the old values are the critic's own, the others are half above and half below, and returns are at
    least 1 away. Otherwise one rounding decides whether a token has a gradient at all.
    """
    at = batch.loss_mask.nonzero().flatten()
    away = torch.tensor([0.0, 1.0, -1.0], dtype=torch.float64)[torch.arange(len(at)) % 3]
    if isinstance(batch, ActorBatch):
        with torch.no_grad():
            own = policy_outputs(load_policy(folder, dtype="float64"), batch, at, TEMPERATURE).logprobs
        old = batch.old_logprobs.clone()
        old[at] = own + away
        return dataclasses.replace(batch, old_logprobs=old)
    shard = load_critic(folder, dtype="float64")
    with torch.no_grad():
        own = critic_values(shard, batch, at)
    values, returns = batch.values.clone(), batch.returns.clone()
    values[at] = own + 0.5 * away
    returns[at] += own + returns[at].sign()
    return dataclasses.replace(batch, values=values, returns=returns)


def take_steps(
    folder: str,
    role: str,
    dtype: str,
    *,
    device: torch.device = CPU,
    cap: int = 10_000,
    padded: bool = False,
    sign: float = 1.0,
    change: Callable[[ActorBatch | CriticBatch], ActorBatch | CriticBatch] = lambda batch: batch,
) -> Steps:
    """Take three steps of an actor or a critic.

    Args:
        folder: of the model.
        role: "actor" or "critic".
        dtype: of the passes.
        device: where they are made.
        cap: most tokens of a micro-batch.
        padded: whether rows are padded.
        sign: what the loss is multiplied with; -1 climbs.
        change: makes the batch that is learned from.
    """
    shard = (load_policy if role == "actor" else load_critic)(folder, dtype=dtype, device=device)
    engine = TrainingEngine(shard, optimizer=CONFIG, eps=EPS, max_tokens_per_micro_batch=cap, padded=padded)
    batch = make_batch(role)
    batch = change(off_the_bound(folder, batch))

    def loss(rows, at):
        total, metrics = loss_of(shard, rows, at)
        return sign * total, metrics

    # The masters that the optimizer steps, not the weights of the passes, which are rounded after every step. In
    # float64 both are the same memory, so what was before is copied.
    weights = dict(shard.model.named_parameters())
    names = [name for name in shard.trained() if name in weights]  # biases of routers are no weights
    masters = dict(zip(names, engine.optimizer.masters, strict=True))
    before = {name: master.detach().cpu().double().clone() for name, master in masters.items()}
    losses, norms = [], []
    for step in range(1, NUM_STEPS + 1):
        metrics = engine.train(batch, loss, denominator=batch.num_loss_tokens, step=step, num_steps=NUM_STEPS)
        total, norm = loss_and_norm(metrics)
        losses.append(total / batch.num_loss_tokens)
        norms.append(norm)
    return Steps(losses, norms, {name: m.detach().cpu().double() - before[name] for name, m in masters.items()})


def errors_of(found: Steps, expected: Steps) -> dict[str, float]:
    """Return the largest error of the losses, of norms, the first apart, of each weight's change, and of all together.

    Losses in their own units, as one may be near zero; the others relative to what is expected, changes in L2.
    """
    assert found.changes.keys() == expected.changes.keys()
    names = list(expected.changes)
    everything = [torch.cat([steps.changes[name].flatten() for name in names]) for steps in (found, expected)]
    of_weights = [relative(found.changes[name], wanted) for name, wanted in expected.changes.items()]
    return {
        "losses": max(abs(a - b) for a, b in zip(found.losses, expected.losses, strict=True)),
        "first norm": abs(found.norms[0] / expected.norms[0] - 1),
        "norms": max(abs(a / b - 1) for a, b in zip(found.norms, expected.norms, strict=True)),
        "changes": relative(*everything),
        "worst change": max(of_weights),
    }


def beyond_bounds(found: Steps, expected: Steps) -> dict[str, float]:
    """Return the errors that are too large for the same steps in another precision."""
    # Written so that NaN is too large as well.
    return {name: error for name, error in errors_of(found, expected).items() if not error <= BOUNDS[name]}


def relative(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())
