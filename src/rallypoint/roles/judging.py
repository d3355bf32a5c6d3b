"""The logprobs of sampler, trainer and reference for the same tokens, compared.

Owns: the gap between rollout_ and old_logprobs, its worst token and its bound; the KL to the reference before an
update, and the ratio at its start. Must not know: which pass computed the old logprobs; see
docs/decisions/0019-one-pass-for-one-update.md.

Sampler and trainer can be compared only where both have the same weights. So the gap is that of tokens that
the actor's own weights have sampled. In a run that samples ahead the others have a drift: the gap, and what the policy
has moved.
"""

from __future__ import annotations

import dataclasses

from torch import Tensor

from rallypoint.algorithms import gap_metrics, kl_penalty
from rallypoint.config.sections.frame import CheckConfig
from rallypoint.errors import OffPolicyError
from rallypoint.run.agreement import (
    DRIFT,
    GAP_MAX,
    GAP_MEAN,
    WORST_OLD,
    WORST_PLACE,
    WORST_PROMPT,
    WORST_ROLLOUT,
    WORST_SAMPLE,
    WORST_TOKEN,
)
from rallypoint.types import ActorBatch, AtMaximum, JudgedBatch, Maximum, Mean, Metric, Metrics, merge

REFERENCE_KL = "kl/reference_mean"
"""Name of the KL to the reference (k3) before the update."""
_FEWEST_TOKENS = 32
"""Tokens whose mean gap is checked alone where others have a drift: rounding may move a single one by a nat."""


def compare(
    batch: JudgedBatch | ActorBatch, at: Tensor, old_logprobs: Tensor, reference_logprobs: Tensor | None
) -> Metrics:
    """Measure the gap between sampler and trainer, and the KL to the reference.

    Args:
        batch: any rows.
        at: [N] positions of their trained tokens.
        old_logprobs: [N] of these tokens, by the weights at the start of the update.
        reference_logprobs: [N], or None in a run without KL.

    Returns:
        The gap of tokens that the actor's weights have sampled, with the place of its maximum, and the drift of those
        that were sampled some steps ago; of all tokens how much the two distributions differ (see `gap_metrics`), and
        the KL (k3) to the reference. Nothing if no token is trained.
    """
    if not len(at):
        return Metrics()
    rollout_logprobs = batch.rollout_logprobs[at]
    gap = (rollout_logprobs - old_logprobs).abs()
    behind = at.new_zeros(len(at)) if batch.steps_behind is None else batch.steps_behind[at]
    metrics: dict[str, Metric] = {
        f"{DRIFT}{steps}": Mean(float(gap[behind == steps].double().sum()), int((behind == steps).sum()))
        for steps in behind[behind > 0].unique().tolist()
    }
    if bool((behind == 0).any()):
        metrics |= _gap(batch, at[behind == 0], rollout_logprobs[behind == 0], old_logprobs[behind == 0])
    if reference_logprobs is not None:
        kl = kl_penalty(old_logprobs, reference_logprobs, "k3")
        metrics[REFERENCE_KL] = Mean(float(kl.double().sum()), len(at))
    return merge(metrics, gap_metrics(rollout_logprobs, old_logprobs))


def _gap(
    batch: JudgedBatch | ActorBatch, at: Tensor, rollout_logprobs: Tensor, old_logprobs: Tensor
) -> dict[str, Metric]:
    """Return the gap at these tokens, its maximum, and where that is."""
    gap = (rollout_logprobs - old_logprobs).abs()
    largest, worst = float(gap.max()), int(gap.argmax())
    token = int(at[worst])
    row = int(batch.row_of_token[token])
    return {
        GAP_MEAN: Mean(float(gap.double().sum()), len(at)),
        GAP_MAX: Maximum(largest),
        WORST_PROMPT: AtMaximum(int(batch.prompt_index[row]), of=largest),
        WORST_SAMPLE: AtMaximum(int(batch.sample_index[row]), of=largest),
        WORST_PLACE: AtMaximum(token - int(batch.offsets[row]), of=largest),
        WORST_TOKEN: AtMaximum(int(batch.tokens[token]), of=largest),
        WORST_ROLLOUT: AtMaximum(float(rollout_logprobs[worst]), of=largest),
        WORST_OLD: AtMaximum(float(old_logprobs[worst]), of=largest),
    }


def check_gap(metrics: Metrics, checks: CheckConfig) -> None:
    """Check the gap and the drifts that `compare` found in all rows of a step.

    The gap has the same bound in every run. Together with the drifts it may be larger by as much for each step that a
    token is behind on average. That only bounds how far training moves the policy, and may hide a wrong sampler.

    Raises:
        OffPolicyError: the two disagree so much that the rollouts are of another policy; names the worst token.
    """
    found = metrics.scalars()
    gap = _total(metrics, GAP_MEAN)
    drifts = {int(name.removeprefix(DRIFT)): _total(metrics, name) for name in metrics if name.startswith(DRIFT)}
    if not gap.total <= checks.rollout_gap * gap.weight and (gap.weight >= _FEWEST_TOKENS or not drifts):
        raise OffPolicyError(
            f"rollout_logprobs and old_logprobs differ by {found[GAP_MEAN]:.3g} nats on average "
            f"(checks.rollout_gap={checks.rollout_gap:g}); worst at prompt {found[WORST_PROMPT]:.0f} sample "
            f"{found[WORST_SAMPLE]:.0f}, token {found[WORST_PLACE]:.0f} of its row: "
            f"{found[WORST_ROLLOUT]:.3f} sampled, {found[WORST_OLD]:.3f} recomputed"
        )
    total = sum((drift.total for drift in drifts.values()), gap.total)
    weight = sum((drift.weight for drift in drifts.values()), gap.weight)
    behind = sum(steps * drift.weight for steps, drift in drifts.items()) / max(1.0, weight)
    if not total <= checks.rollout_gap * (1 + behind) * weight:
        raise OffPolicyError(
            f"rollout_logprobs and old_logprobs differ by {total / weight:.3g} nats on average, of tokens that are "
            f"{behind:.1f} steps behind: expected at most checks.rollout_gap={checks.rollout_gap:g}, and as much for "
            "each step. Training moves the policy too far: lower actor.optimizer.lr or rollout.max_staleness"
        )


def _total(metrics: Metrics, name: str) -> Mean:
    found = metrics.get(name, Mean(0.0, 0.0))
    assert isinstance(found, Mean), "`compare` makes them"
    return found


def check_judged(batch: JudgedBatch, checks: CheckConfig) -> Metrics:
    """Compare rollout_logprobs with old_logprobs, and measure the KL.

    A batch without old_logprobs is compared by the update, in its first pass. Tokens whose old_logprobs are not finite
    stay out: all of a row that was not judged, or what a broken model said. The update leaves such rows out, or itself.

    Args:
        batch: any rows.
        checks: with the bound.

    Raises:
        OffPolicyError: the two disagree so much that the rollouts are of another policy; names the worst token.
    """
    if batch.old_logprobs is None:
        return Metrics()
    at = (batch.loss_mask & batch.old_logprobs.isfinite()).nonzero().flatten()
    reference = None if batch.reference_logprobs is None else batch.reference_logprobs[at]
    metrics = compare(batch, at, batch.old_logprobs[at], reference)
    check_gap(metrics, checks)
    return metrics


@dataclasses.dataclass(frozen=True, slots=True)
class _Rounding:
    """The difference that logprobs of equal weights may have, for a type of weights."""

    tolerance: float
    """Bound of |ratio - 1|: of every token, or of the mean if outliers are allowed."""
    most_outliers: float = 0.0
    """Share of tokens that may exceed five times the tolerance; 0 if every token must be within it."""


_ROUNDING = {
    "float32": _Rounding(1e-2),
    # Sums in another order (another kernel, other rows in the batch) move random models of 4 to 28 layers by 0.001 to
    # 0.077 in the mean, 0.008 to 0.43 in the 99.9th percentile: measured with products whose inner dimension is summed
    # in two halves. A row that got another row's numbers has most of its tokens beyond.
    "bfloat16": _Rounding(0.1, most_outliers=2e-3),
}
_OUTLIER = 5.0
_FEWEST_OUTLIERS = 2
"""Outliers that are allowed in a batch of any size."""


def check_ratio(
    batch: ActorBatch, at: Tensor, logprobs: Tensor, old_logprobs: Tensor, checks: CheckConfig, *, dtype: str
) -> Metrics:
    """Refuse to train if equal weights give different logprobs in two passes; return the difference.

    In float32 every token is checked. In bfloat16 a sound token may differ by a half, so the mean of all rows and the
    share of outliers are checked. The engine leaves an update out whose numbers are not finite.

    Args:
        batch: any rows.
        at: [N] positions of their trained tokens.
        logprobs: [N] by the update's first pass.
        old_logprobs: [N] by the pass that judged.
        checks: with the tolerance.
        dtype: of the weights.

    Raises:
        OffPolicyError: they differ by more; names the worst token.
    """
    rounding = _ROUNDING[dtype]
    tolerance = rounding.tolerance if checks.ratio_tolerance is None else checks.ratio_tolerance
    error = (logprobs - old_logprobs).expm1().abs()
    largest, mean = float(error.max()), float(error.double().mean())
    if rounding.most_outliers:
        num_outliers = int((~(error <= _OUTLIER * tolerance)).sum())
        is_wrong = not mean <= tolerance or num_outliers > max(_FEWEST_OUTLIERS, rounding.most_outliers * len(at))
        found = (
            f", by {mean:.2g} on average, and {num_outliers} of {len(at)} tokens by more than {_OUTLIER * tolerance:g},"
        )
    else:
        is_wrong, found = not largest <= tolerance, ""
    if is_wrong and not bool(logprobs.isnan().any() or old_logprobs.isnan().any()):
        worst = int(error.argmax())
        row = int(batch.row_of_token[at[worst]])
        raise OffPolicyError(
            f"the ratio must be 1 in the first update of a step, but differs by {largest:.2g}{found} "
            f"(checks.ratio_tolerance={tolerance:g}) for prompt {int(batch.prompt_index[row])} sample "
            f"{int(batch.sample_index[row])}, token {int(at[worst] - batch.offsets[row])} of its row"
        )
    judged = Mean(mean * len(at), len(at)) if rounding.most_outliers else Maximum(largest)
    return Metrics({"ratio_error": judged, "ratio_error_max": Maximum(largest)})
