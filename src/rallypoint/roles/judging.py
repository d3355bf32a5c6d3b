"""What sampler, trainer and reference say of the same tokens, beside each other.

Owns: the gap between rollout_ and old_logprobs, its worst token, its bound, and the KL to the reference before an
update. Must not know: which pass found the old logprobs; see docs/decisions/0019-one-pass-for-one-update.md.
"""

from __future__ import annotations

from torch import Tensor

from rallypoint.algorithms import kl_penalty
from rallypoint.config import CheckConfig
from rallypoint.errors import OffPolicyError
from rallypoint.observability.agreement import (
    GAP_MAX,
    GAP_MEAN,
    WORST_PLACE,
    WORST_PROMPT,
    WORST_SAMPLE,
    WORST_TOKEN,
)
from rallypoint.types import ActorBatch, AtMaximum, JudgedBatch, Maximum, Mean, Metric, Metrics


def compare(
    batch: JudgedBatch | ActorBatch, at: Tensor, old_logprobs: Tensor, reference_logprobs: Tensor | None
) -> Metrics:
    """Measure how far sampler and reference are from the trainer.

    Args:
        batch: any rows.
        at: [N] positions of their trained tokens.
        old_logprobs: [N] of these tokens, by the weights at the start of the update.
        reference_logprobs: [N], or None in a run without KL.

    Returns:
        The gap, with the place of its largest, and the KL (k3); nothing where no token is trained.
    """
    if not len(at):
        return Metrics()
    gap = (batch.rollout_logprobs[at] - old_logprobs).abs()
    largest, worst = float(gap.max()), int(gap.argmax())
    token = int(at[worst])
    row = int(batch.row_of_token[token])
    metrics: dict[str, Metric] = {
        GAP_MEAN: Mean(float(gap.double().sum()), len(at)),
        GAP_MAX: Maximum(largest),
        WORST_PROMPT: AtMaximum(int(batch.prompt_index[row]), of=largest),
        WORST_SAMPLE: AtMaximum(int(batch.sample_index[row]), of=largest),
        WORST_PLACE: AtMaximum(token - int(batch.offsets[row]), of=largest),
        WORST_TOKEN: AtMaximum(int(batch.tokens[token]), of=largest),
    }
    if reference_logprobs is not None:
        kl = kl_penalty(old_logprobs, reference_logprobs, "k3")
        metrics["kl/reference_mean"] = Mean(float(kl.double().sum()), len(at))
    return Metrics(metrics)


def check_gap(metrics: Metrics, checks: CheckConfig) -> None:
    """Look at what `compare` found in all rows of a step.

    Raises:
        OffPolicyError: the two disagree so much that the rollouts are of another policy; names the worst token.
    """
    found = metrics.scalars()
    if GAP_MEAN in found and not found[GAP_MEAN] <= checks.rollout_gap:
        raise OffPolicyError(
            f"rollout_logprobs and old_logprobs differ by {found[GAP_MEAN]:.3g} nats on average "
            f"(checks.rollout_gap={checks.rollout_gap:g}); worst at prompt {found[WORST_PROMPT]:.0f} sample "
            f"{found[WORST_SAMPLE]:.0f}, token {found[WORST_PLACE]:.0f} of its row: {found[GAP_MAX]:.3g} nats"
        )
