"""What every recipe looks at before it learns from a batch."""

from __future__ import annotations

from rallypoint.algorithms import KL
from rallypoint.config import CheckConfig, RunConfig
from rallypoint.roles.judging import check_gap, compare
from rallypoint.types import JudgedBatch, Metrics


def kl_of(config: RunConfig) -> KL | None:
    """Return the pull to the reference, as the algorithms take it."""
    if config.kl is None:
        return None
    return KL(coef=config.kl.coef, estimator=config.kl.estimator_used, placement=config.kl.placement)


def check_judged(batch: JudgedBatch, checks: CheckConfig) -> Metrics:
    """Compare what was sampled with what the training forward pass says, and measure the KL.

    A batch that nobody has judged yet is compared by the update, in its own pass.

    Raises:
        OffPolicyError: the two disagree so much that the rollouts are of another policy; names the worst token.
    """
    if batch.old_logprobs is None:
        return Metrics()
    at = batch.loss_mask.nonzero().flatten()
    reference = None if batch.reference_logprobs is None else batch.reference_logprobs[at]
    metrics = compare(batch, at, batch.old_logprobs[at], reference)
    check_gap(metrics, checks)
    return metrics
