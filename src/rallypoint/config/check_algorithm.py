"""Contradictions within an algorithm: between loss, corrections and KL; see `check.py`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rallypoint.config.fields import Problem
from rallypoint.config.sections.algorithms import (
    USUAL_AGGREGATIONS,
    ClipCovConfig,
    CorrectionConfig,
    DecoupledConfig,
    DPPOConfig,
    IcePopConfig,
    ImportanceSamplingConfig,
    KLMaskConfig,
    MaskConfig,
    OffPolicyMaskConfig,
    TISConfig,
)

if TYPE_CHECKING:
    from rallypoint.config.tree import RunConfig


_MOST_WEIGHT = 100.0
"""A bound of old / rollout above it bounds nothing: it is far beyond what a few steps move a token that is sampled."""
_FAR = 700.0
"""Nats that `exp` can take."""
_IN_BOUNDS = f"at most {_MOST_WEIGHT:g}"


def check_correction(config: RunConfig) -> Iterator[Problem]:
    """Yield corrections of a policy loss that count a gap twice, or leave an older sampler's as it is."""
    yield from _sound(config)
    weighs, loss = _weighing(config), config.loss
    instead = "loss.name=clip" if loss.name == "decoupled" else "loss.anchor=old"
    anchored = _is_anchored(config)
    if weighs and anchored:
        yield Problem.of(
            f"^correction has {weighs[0].name}, but ^loss.name={loss.name} is weighed back to the sampler already: "
            f"that counts the gap twice; expected masks only, or {instead}"
        )
    masks = [item for item in config.correction if isinstance(item, IcePopConfig | MaskConfig)]
    masks = [item.name for item in masks if isinstance(item, IcePopConfig) or item.level == "token"]
    if masks and loss.name in {"gspo", "gmpo"}:
        yield Problem.of(
            f"^correction has {masks[0]} by token, but ^loss.name={loss.name} has one ratio a row, in which tokens "
            "that are masked still count; expected a mask of rows such as `{name: mask, level: geometric}`, a "
            "weight such as `{name: tis}`, or loss.name=clip"
        )
    if config.rollout.max_staleness and not (weighs and anchored):
        yield from (_unbounded if anchored else _uncorrected)(config)


def check_quantization(config: RunConfig) -> Iterator[Problem]:
    """Yield what stands against rollouts of a policy in fewer bits than the one that is trained."""
    found = config.rollout.quantization
    if found is None:
        return
    key = f"^rollout.quantization={found}"
    if config.rollout.engine != "vllm":
        yield Problem.of(
            f"{key}: ^rollout.engine={config.rollout.engine!r} samples from weights as they are trained; expected "
            "rollout.engine=vllm, or null"
        )
    if config.cluster.device == "cpu":
        yield Problem.of(f"{key}: GPUs compute in 8 bits, and ^cluster.device=cpu does not; leave it out")
    if config.model.dtype == "float32":
        yield Problem.of(
            f"{key}: vLLM makes 8 bits of weights that have 16, and ^model.dtype=float32; expected bfloat16"
        )
    by_token = [item for item in _weighing(config) if isinstance(item, TISConfig) and item.level == "token"]
    has_no_ratio = config.recipe == "opd" and config.teachers.top_k is not None and not config.teachers.reward_coef
    if not (by_token or _is_anchored(config) or has_no_ratio):
        yield Problem.of(
            f"{key} samples from another policy than the one that is trained, so each token has to be weighed back to "
            "its sampler; expected '^correction=[{name: tis, cap: 2.0}]'"
        )


def check_taught_correction(config: RunConfig) -> Iterator[Problem]:
    """Yield the same of a student's losses: that of the teacher, and the policy loss where there is one."""
    teachers = config.teachers
    if teachers.loss == "policy_gradient" or teachers.reward_coef:
        yield from check_correction(config)
    else:
        yield from _sound(config)
    if teachers.loss == "policy_gradient":
        return
    if teachers.top_k is not None:
        if config.correction and not teachers.reward_coef:
            yield Problem.of(
                f"^correction has no effect with teacher.loss={teachers.loss} and ^teacher.top_k={teachers.top_k}: the "
                "loss of a place does not depend on the token that was sampled there; leave it out"
            )
        return
    staleness = config.rollout.max_staleness
    if staleness and not _are_bounded(_weighing(config)):
        with_rewards = " loss.name=clip" if teachers.reward_coef and _is_anchored(config) else ""
        yield Problem.of(
            f"^rollout.max_staleness={staleness} trains on tokens that older weights have sampled, and with "
            f"^teacher.loss={teachers.loss} their gradient is not that of a divergence unless each is weighed back to "
            f"its sampler, by a weight of {_IN_BOUNDS}; expected '^correction=[{{name: tis, cap: "
            f"2.0}}]'{with_rewards}, teacher.loss=policy_gradient, or a teacher.top_k, which needs none"
        )


def _sound(config: RunConfig) -> Iterator[Problem]:
    """Yield two weights of one gap, and bounds that leave nothing."""
    if len(weighs := _weighing(config)) > 1:
        yield Problem.of(
            f"^correction has {' and '.join(item.name for item in weighs)}, and each weighs tokens with old / rollout: "
            "that counts the gap twice; expected one of them, others may be masks"
        )
    for item in config.correction:
        if isinstance(item, TISConfig) and item.cap < 1:
            yield Problem.of(
                f"^correction: tis has cap={item.cap:g}, which weighs less what sampler and trainer agree on, whose "
                "ratio is 1; expected at least 1, usually 2"
            )
        if not isinstance(item, IcePopConfig | MaskConfig):
            continue
        bounds = f"^correction: {item.name} has low={item.low:g} and high={item.high:g}"
        if item.low >= item.high:
            yield Problem.of(f"{bounds}; expected low below high")
        elif not item.low <= 1 <= item.high:
            yield Problem.of(
                f"{bounds}, which leaves out what sampler and trainer agree on, whose ratio is 1; expected low of at "
                "most 1 and high of at least 1"
            )


def _is_anchored(config: RunConfig) -> bool:
    """Whether the policy loss is weighed back to the sampler by itself."""
    return config.loss.name == "decoupled" or getattr(config.loss, "anchor", "old") == "rollout"


def _weighing(config: RunConfig) -> list[TISConfig | IcePopConfig]:
    return [item for item in config.correction if isinstance(item, TISConfig | IcePopConfig)]


def _are_bounded(items: Sequence[CorrectionConfig]) -> bool:
    """Whether one of them leaves no weight that is far too large."""
    return any(_most_weight(item) <= _MOST_WEIGHT for item in items)


def _is_weighed_back(config: RunConfig) -> bool:
    """Whether KL and entropy are weighed back to the sampler: as the policy loss itself is, or by a correction."""
    return _is_anchored(config) or _are_bounded(_weighing(config))


def _most_weight(item: CorrectionConfig) -> float:
    """Return the largest old / rollout that a correction leaves, of a token or of its row."""
    match item:
        case TISConfig():
            return item.cap
        case IcePopConfig() | MaskConfig():
            return item.high
        case KLMaskConfig():
            return math.exp(min(item.max_kl, _FAR))
        case OffPolicyMaskConfig():
            return math.exp(min(item.delta, _FAR))


def _uncorrected(config: RunConfig) -> Iterator[Problem]:
    """Yield a loss that takes tokens of older weights for its own, whatever they are."""
    staleness, loss = config.rollout.max_staleness, config.loss
    if _are_bounded(config.correction):
        return
    found = "and there is no correction"
    if config.correction:
        listed = ", ".join(f"{item.name} of up to {_most_weight(item):g}" for item in config.correction)
        found = f"and correction leaves everything as it is ({listed}, where a bound is {_IN_BOUNDS})"
    yield Problem.of(
        f"^rollout.max_staleness={staleness} trains on rollouts of older weights, which ^loss.name={loss.name} takes "
        f"for its own, {found}: such runs collapse; expected loss.name=decoupled, loss.name=dppo, or "
        "'^correction=[{name: tis, cap: 2.0}]'"
    )


def _unbounded(config: RunConfig) -> Iterator[Problem]:
    """Yield a loss that weighs tokens back to the sampler by any number, so that a few decide a step."""
    staleness, loss = config.rollout.max_staleness, config.loss
    match loss:
        case DecoupledConfig():
            name, most, instead = "loss.max_weight", loss.max_weight, "loss.max_weight=5"
        case DPPOConfig():
            name, most, instead = "loss.max_ratio", loss.max_ratio, "loss.max_ratio=20"
        case ImportanceSamplingConfig():
            name, most, instead = "loss.name", None, "loss.name=decoupled, loss.name=dppo"
        case _:
            return
    masks = [item for item in config.correction if isinstance(item, MaskConfig) and item.level == "token"]
    if (most is None or most > _MOST_WEIGHT) and not any(item.high <= _MOST_WEIGHT for item in masks):
        value = loss.name if name == "loss.name" else "null" if most is None else f"{most:g}"
        yield Problem.of(
            f"^{name}={value} lets a token weigh anything, and with ^rollout.max_staleness={staleness} old / rollout "
            f"of a few can decide a step; expected a bound of {_IN_BOUNDS}: {instead}, or a mask by token such as "
            "'^correction=[{name: mask, high: 10}]'"
        )


def check_kl(config: RunConfig) -> Iterator[Problem]:
    """Yield estimators whose gradient is not that of the KL where they are placed, and what would never happen."""
    kl, every = config.kl, config.reference.refresh_every_steps
    if kl is None:
        return
    estimator = kl.estimator_used
    keys = ("kl.estimator", "kl.placement", "kl.importance_corrected")
    if kl.importance_corrected and kl.placement == "reward":
        yield Problem.of(
            "^kl.importance_corrected=true corrects a gradient, and ^kl.placement=reward has none: the KL is part of "
            "the advantages there; expected kl.importance_corrected=false, or kl.placement=loss"
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
    if config.rollout.max_staleness and kl.placement == "loss" and not _is_weighed_back(config):
        yield Problem.of(
            f"^rollout.max_staleness={config.rollout.max_staleness} trains on tokens that older weights have sampled, "
            "and with ^kl.placement=loss their gradient is not that of a divergence unless each is weighed back to "
            f"its sampler, by a weight of {_IN_BOUNDS}; expected '^correction=[{{name: tis, cap: 2.0}}]', "
            "^loss.name=decoupled, loss.name=dppo, or kl.placement=reward"
        )
    if kl.adaptive is not None and kl.adaptive.horizon < config.num_rows:
        yield Problem.of(
            f"^kl.adaptive.horizon={kl.adaptive.horizon} is less than the {config.num_rows} rollouts of a step "
            f"(^rollout.num_prompts={config.rollout.num_prompts} x ^rollout.group_size={config.rollout.group_size}): "
            f"the coefficient would jump; expected at least {config.num_rows}, usually 50 times as many"
        )
    if every is not None and every > config.trainer.num_steps:
        yield Problem.of(
            f"^reference.refresh_every_steps={every} is more than ^trainer.num_steps={config.trainer.num_steps}, so "
            "the reference would never be refreshed; expected less, or null"
        )


def check_clipping(config: RunConfig) -> Iterator[Problem]:
    """Yield bounds that clip nothing or everything, and losses that do not go with the number of optimizer steps."""
    loss = config.loss
    if loss.name == "policy_gradient" and not config.updates_once:
        yield Problem.of(
            "^loss.name=policy_gradient is right for the first optimizer step of a batch alone, and "
            f"^actor.num_epochs={config.actor.num_epochs} x ^actor.num_mini_batches={config.actor.num_mini_batches} "
            "are several; expected 1 of each, or loss.name=clip"
        )
    if loss.name == "kl_cov" and config.updates_once:
        yield Problem(
            ("loss.name", "actor.num_epochs", "actor.num_mini_batches"),
            "loss.name=kl_cov penalises moving away from the policy at the step's start, and one optimizer step never "
            "has; expected actor.num_mini_batches above 1, or loss.name=clip_cov",
        )
    if isinstance(loss, ClipCovConfig) and loss.covariance_low >= loss.covariance_high:
        yield Problem.of(
            f"^loss.covariance_low={loss.covariance_low:g} is not below "
            f"^loss.covariance_high={loss.covariance_high:g}, so no token is between them; expected 1 and 5, or so"
        )


_OF_RATIOS = ("gspo", "gmpo", "cispo", "sapo")
"""Losses that differ from others by what they do to the ratio alone."""
_BOUNDS = ("clip_low", "clip_high", "dual_clip", "tau_positive", "tau_negative", "max_ratio")


def note_ratios(config: RunConfig) -> Iterator[str]:
    """Yield what a dry run says of a loss whose ratio is always 1, and of one that is a mean of something else.

    Neither is refused: a run may be one update a batch, with bounds that wait for more.
    """
    loss = config.loss
    if config.updates_once and getattr(loss, "anchor", "old") == "old":
        fields = type(loss).model_fields
        bounds = [f"loss.{key}" for key in _BOUNDS if key in fields and getattr(loss, key) != fields[key].default]
        named = [f"loss.name={loss.name}"] if loss.name in _OF_RATIOS else []
        if idle := [*named, *bounds]:
            yield f"no effect of {', '.join(idle)}: with one optimizer"
            yield "step a batch every ratio is 1; set actor.num_mini_batches=4 or so"
    usual = USUAL_AGGREGATIONS.get(loss.name)
    if usual is not None and config.aggregation != usual:
        yield f"aggregation={config.aggregation}: the paper of loss.name={loss.name} has aggregation={usual}"
