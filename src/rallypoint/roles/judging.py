"""What sampler, trainer and reference say of the same tokens, beside each other.

Owns: the gap between rollout_ and old_logprobs, its worst token and its bound; the KL to the reference before an
update, and the ratio at its start. Must not know: which pass found the old logprobs, or when there are two of them; see
docs/decisions/0019-one-pass-for-one-update.md.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rallypoint.algorithms import kl_penalty
from rallypoint.config import CheckConfig
from rallypoint.errors import OffPolicyError
from rallypoint.observability.agreement import (
    GAP_MAX,
    GAP_MEAN,
    WORST_OLD,
    WORST_PLACE,
    WORST_PROMPT,
    WORST_ROLLOUT,
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
        WORST_ROLLOUT: AtMaximum(float(batch.rollout_logprobs[token]), of=largest),
        WORST_OLD: AtMaximum(float(old_logprobs[worst]), of=largest),
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
            f"{found[WORST_SAMPLE]:.0f}, token {found[WORST_PLACE]:.0f} of its row: "
            f"{found[WORST_ROLLOUT]:.3f} sampled, {found[WORST_OLD]:.3f} recomputed"
        )


_FEWEST_TOKENS = 16
"""A row of fewer is judged as one of so many: what rounding does to a single token is no mean."""


def check_ratio(
    batch: ActorBatch, at: Tensor, logprobs: Tensor, old_logprobs: Tensor, checks: CheckConfig, *, is_half: bool
) -> Metrics:
    """Refuse to train when the same weights give other logprobs than a moment ago; return by how much they differ.

    In bfloat16 products round otherwise in other company, and one token in a thousand by some percent; but the mean of
    a row is as small as ever, unless the row is wrong. Logprobs that are NaN are the engine's to refuse.

    Args:
        batch: any rows.
        at: [N] positions of their trained tokens.
        logprobs: [N] by the update's first pass.
        old_logprobs: [N] by the pass that judged.
        checks: with the tolerance.
        is_half: whether the model is in bfloat16.

    Raises:
        OffPolicyError: they differ by more; names the worst token.
    """
    error = (logprobs - old_logprobs).expm1().abs()
    rows = batch.row_of_token[at]
    off, mean = error, ""
    if is_half:
        counts = torch.bincount(rows).clamp(min=_FEWEST_TOKENS)
        off = (torch.bincount(rows, weights=error) / counts)[rows]
        mean = f", and by {float(off.max()):.2g} in the mean of its row"
    largest = float(off.max())
    if not largest <= checks.ratio_tolerance and not bool(logprobs.isnan().any()):
        row = int(rows[off.argmax()])
        worst = int(torch.where(rows == row, error, -1.0).argmax())
        raise OffPolicyError(
            f"the ratio must be 1 in the first update of a step, but differs by {float(error[worst]):.2g}{mean} "
            f"(checks.ratio_tolerance={checks.ratio_tolerance:g}) for prompt {int(batch.prompt_index[row])} sample "
            f"{int(batch.sample_index[row])}, token {int(at[worst] - batch.offsets[row])} of its row"
        )
    return Metrics({"ratio_error": Maximum(largest), "ratio_error_max": Maximum(float(error.max()))})
