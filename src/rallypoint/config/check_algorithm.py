"""Contradictions within an algorithm: between loss, corrections and KL; see `check.py`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rallypoint.config.fields import Problem
from rallypoint.config.sections.algorithms import (
    ClipConfig,
    ClipCovConfig,
    DecoupledConfig,
    GSPOConfig,
    IcePopConfig,
    MaskConfig,
)

if TYPE_CHECKING:
    from rallypoint.config.tree import RunConfig


def check_correction(config: RunConfig) -> Iterator[Problem]:
    """Yield corrections that count a gap twice, and bounds that leave nothing."""
    weighs = [item.name for item in config.correction if item.name in {"tis", "icepop"}]
    loss = config.loss
    instead = "loss.name=clip" if loss.name == "decoupled" else "loss.anchor=old"
    anchored = loss.name == "decoupled" or getattr(loss, "anchor", "old") == "rollout"
    if len(weighs) > 1:
        yield Problem(
            ("correction",),
            f"correction has {' and '.join(weighs)}, and each weighs tokens with old / rollout: that counts the gap "
            "twice; expected one of them, others may be masks",
        )
    if weighs and anchored:
        yield Problem(
            ("correction", "loss"),
            f"correction has {weighs[0]}, but loss.name={loss.name} is weighed back to the sampler already: that "
            f"counts the gap twice; expected masks only, or {instead}",
        )
    masks = [item for item in config.correction if isinstance(item, IcePopConfig | MaskConfig)]
    masks = [item.name for item in masks if isinstance(item, IcePopConfig) or item.level == "token"]
    if masks and loss.name in {"gspo", "gmpo"}:
        yield Problem(
            ("correction", "loss.name"),
            f"correction has {masks[0]} by token, but loss.name={loss.name} has one ratio a row, in which tokens that "
            "are masked still count; expected a mask of rows such as `{name: mask, level: geometric}`, a weight such "
            "as `{name: tis}`, or loss.name=clip",
        )
    staleness = config.rollout.max_staleness
    if staleness and not anchored and not config.correction:
        yield Problem(
            ("rollout.max_staleness", "loss.name", "correction"),
            f"rollout.max_staleness={staleness} trains on rollouts of older weights, which loss.name={loss.name} takes "
            "for its own: such runs collapse; expected loss.name=decoupled, loss.name=dppo, or "
            "'correction=[{name: tis, cap: 2.0}]'",
        )
    for item in config.correction:
        if isinstance(item, IcePopConfig | MaskConfig) and item.low >= item.high:
            yield Problem(
                ("correction",),
                f"correction: {item.name} has low={item.low:g} and high={item.high:g}; expected low below high",
            )


def check_kl(config: RunConfig) -> Iterator[Problem]:
    """Yield estimators whose gradient is not that of the KL where they are placed, and what would never happen."""
    kl, every = config.kl, config.reference.refresh_every_steps
    if kl is None:
        return
    estimator = kl.estimator_used
    keys = ("kl.estimator", "kl.placement", "kl.importance_corrected")
    if kl.importance_corrected and kl.placement == "reward":
        yield Problem(
            ("kl.importance_corrected", "kl.placement"),
            "kl.importance_corrected=true corrects a gradient, and kl.placement=reward has none: the KL is part of the "
            "advantages there; expected kl.importance_corrected=false, or kl.placement=loss",
        )
    elif kl.importance_corrected and estimator not in {"k1", "k3"}:
        yield Problem(
            keys,
            f"kl.estimator={estimator!r} has the gradient of no divergence with kl.importance_corrected=true; expected "
            "k1 or k3, or kl.importance_corrected=false",
        )
    elif kl.placement == "loss" and estimator == "k1" and not kl.importance_corrected:
        yield Problem(
            keys,
            "kl.estimator='k1' does not pull towards the reference when kl.placement=loss (the mean of its gradient is "
            "zero); expected k2 or k3, or kl.placement=reward, or kl.importance_corrected=true",
        )
    elif kl.placement == "reward" and estimator != "k1":
        yield Problem(
            keys,
            f"kl.estimator={estimator!r} does not pull towards the reference when kl.placement=reward (only k1 has "
            "the gradient of the KL there); expected k1, or kl.placement=loss",
        )
    if kl.adaptive is not None and kl.adaptive.horizon < config.num_rows:
        yield Problem(
            ("kl.adaptive.horizon", "rollout.num_prompts", "rollout.group_size"),
            f"kl.adaptive.horizon={kl.adaptive.horizon} is less than the {config.num_rows} rollouts of a step "
            f"(rollout.num_prompts={config.rollout.num_prompts} x rollout.group_size={config.rollout.group_size}): the "
            f"coefficient would jump; expected at least {config.num_rows}, usually 50 times as many",
        )
    if every is not None and every > config.trainer.num_steps:
        yield Problem(
            ("reference.refresh_every_steps", "trainer.num_steps"),
            f"reference.refresh_every_steps={every} is more than trainer.num_steps={config.trainer.num_steps}, so the "
            "reference would never be refreshed; expected less, or null",
        )


def check_clipping(config: RunConfig) -> Iterator[Problem]:
    """Yield bounds that clip nothing or everything, and losses that do not go with the number of optimizer steps."""
    loss = config.loss
    if (
        isinstance(loss, ClipConfig | DecoupledConfig | GSPOConfig | ClipCovConfig)
        and loss.dual_clip is not None
        and loss.dual_clip <= 1 + loss.clip_high
    ):
        yield Problem(
            ("loss.dual_clip", "loss.clip_high"),
            f"loss.dual_clip={loss.dual_clip} is not above the highest ratio that the clipping leaves, "
            f"1 + loss.clip_high = {1 + loss.clip_high:g}; expected more than that, usually 3, or null",
        )
    if loss.name == "policy_gradient" and not config.updates_once:
        yield Problem(
            ("loss.name", "actor.num_epochs", "actor.num_mini_batches"),
            "loss.name=policy_gradient is right for the first optimizer step of a batch alone, and "
            f"actor.num_epochs={config.actor.num_epochs} x actor.num_mini_batches={config.actor.num_mini_batches} "
            "are several; expected 1 of each, or loss.name=clip",
        )
    if loss.name == "kl_cov" and config.updates_once:
        yield Problem(
            ("loss.name", "actor.num_epochs", "actor.num_mini_batches"),
            "loss.name=kl_cov holds tokens to the policy at the start of a step, which one optimizer step does not "
            "leave; expected actor.num_mini_batches above 1, or loss.name=clip_cov",
        )
    if isinstance(loss, ClipCovConfig) and loss.covariance_low >= loss.covariance_high:
        yield Problem(
            ("loss.covariance_low", "loss.covariance_high"),
            f"loss.covariance_low={loss.covariance_low:g} is not below "
            f"loss.covariance_high={loss.covariance_high:g}, so no token is between them; expected 1 and 5, or so",
        )
