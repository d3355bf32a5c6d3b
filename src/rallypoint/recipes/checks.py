"""What every recipe looks at before it learns from a batch."""

from __future__ import annotations

from rallypoint.algorithms import KL, kl_penalty
from rallypoint.config import CheckConfig, RunConfig
from rallypoint.errors import OffPolicyError
from rallypoint.observability.agreement import (
    GAP_MAX,
    GAP_MEAN,
    WORST_PLACE,
    WORST_PROMPT,
    WORST_SAMPLE,
    WORST_TOKEN,
)
from rallypoint.types import JudgedBatch, Last, Maximum, Mean, Metrics


def kl_of(config: RunConfig) -> KL | None:
    """Return the pull to the reference, as the algorithms take it."""
    if config.kl is None:
        return None
    return KL(coef=config.kl.coef, estimator=config.kl.estimator, placement=config.kl.placement)


def check_judged(batch: JudgedBatch, checks: CheckConfig) -> Metrics:
    """Compare what was sampled with what the training forward pass says, and measure the KL.

    Raises:
        OffPolicyError: the two disagree so much that the rollouts are of another policy; names the worst token.
    """
    mask = batch.loss_mask
    gap = (batch.rollout_logprobs - batch.old_logprobs).abs() * mask
    num_tokens = batch.num_loss_tokens
    mean_gap = float(gap.double().sum()) / max(1, num_tokens)
    worst = int(gap.argmax())
    row = int(batch.row_of_token[worst])
    place = worst - int(batch.offsets[row])
    if not mean_gap <= checks.rollout_gap:
        raise OffPolicyError(
            f"rollout_logprobs and old_logprobs differ by {mean_gap:.3g} nats on average "
            f"(checks.rollout_gap={checks.rollout_gap:g}); worst at prompt {int(batch.prompt_index[row])} sample "
            f"{int(batch.sample_index[row])}, token {place} of its row: "
            f"{float(batch.rollout_logprobs[worst]):.3f} sampled, {float(batch.old_logprobs[worst]):.3f} recomputed"
        )
    metrics = {
        GAP_MEAN: Mean(float(gap.double().sum()), num_tokens),
        GAP_MAX: Maximum(float(gap[worst])),
        WORST_PROMPT: Last(int(batch.prompt_index[row])),
        WORST_SAMPLE: Last(int(batch.sample_index[row])),
        WORST_PLACE: Last(place),
        WORST_TOKEN: Last(int(batch.tokens[worst])),
    }
    if batch.reference_logprobs is None:
        return Metrics(metrics)
    kl = kl_penalty(batch.old_logprobs[mask], batch.reference_logprobs[mask], "k3")
    return Metrics(metrics | {"kl/reference_mean": Mean(float(kl.double().sum()), num_tokens)})
