"""What every recipe looks at before it learns from a batch."""

from __future__ import annotations

from rallypoint.algorithms import KL, kl_penalty
from rallypoint.config import CheckConfig, RunConfig
from rallypoint.errors import OffPolicyError
from rallypoint.types import JudgedBatch, Maximum, Mean, Metrics


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
    if not mean_gap <= checks.rollout_gap:
        row = int(batch.row_of_token[worst])
        raise OffPolicyError(
            f"rollout_logprobs and old_logprobs differ by {mean_gap:.3g} nats on average "
            f"(checks.rollout_gap={checks.rollout_gap:g}); worst at prompt {int(batch.prompt_index[row])} sample "
            f"{int(batch.sample_index[row])}, token {worst - int(batch.offsets[row])} of its row: "
            f"{float(batch.rollout_logprobs[worst]):.3f} sampled, {float(batch.old_logprobs[worst]):.3f} recomputed"
        )
    metrics = {
        "rollout/logprob_gap_mean": Mean(float(gap.double().sum()), num_tokens),
        "rollout/logprob_gap_max": Maximum(float(gap[worst])),
    }
    if batch.reference_logprobs is None:
        return Metrics(metrics)
    kl = kl_penalty(batch.old_logprobs[mask], batch.reference_logprobs[mask], "k3")
    return Metrics(metrics | {"kl/reference_mean": Mean(float(kl.double().sum()), num_tokens)})
