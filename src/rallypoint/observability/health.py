"""A step's numbers in a few words for a person: what looks wrong, how much, and what to do about it.

The thresholds stand in one table, each with the reason for its height. They are rules of thumb: they
colour a word on the screen and stop nothing. What must stop a run raises where it is computed.

>>> [f"{item.level}: {item.words}" for item in health({"actor/clip_fraction": 0.4, "rollout/truncated": 0.7})]
['bad: rollouts truncated', 'watch: clipping a lot']
>>> health({"actor/clip_fraction": 0.1})[0].words
'healthy'
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Literal

Level = Literal["ok", "watch", "bad"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Health:
    """One finding about a step."""

    words: str
    """What a person would say: `entropy collapsed`."""
    level: Level
    name: str = ""
    """The scalar it was read from; empty for `healthy`."""
    value: float = math.nan
    """The scalar's value; NaN for `healthy`."""
    advice: str = ""
    """Key of the config to turn, and which way: at most 62 characters, a line of the panel at 80 columns."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """When a scalar deserves a word, and why just there."""

    name: str
    words: str
    above: tuple[float, float] | None = None
    """Where it begins to be watched, and to be bad, if high values are worse."""
    below: tuple[float, float] | None = None
    """Likewise, if low values are worse."""
    advice: str
    reason: str
    """Why the thresholds are where they are."""
    unless_reward: float = math.inf
    """Said only while `reward/mean` is lower than this (scores from 0 to 1): being good excuses it."""
    unless_taught: bool = False
    """Said only without a teacher, which judges every token, whatever the rewards are."""

    def level(self, value: float) -> Level:
        """Return how bad a value is; equal to a threshold is not beyond it."""
        sign, (watch, bad) = (1.0, self.above) if self.above else (-1.0, self.below or (-math.inf, -math.inf))
        if sign * value > sign * bad:
            return "bad"
        return "watch" if sign * value > sign * watch else "ok"


RULES: tuple[Rule, ...] = (
    Rule(
        name="reward/failed",
        words="rewards failing",
        above=(0.0, 0.5),
        advice="mend reward.function: logs/train.log has samples and reasons",
        reason="a failure is a bug in somebody's code: none is normal; a count of one is past both thresholds",
    ),
    Rule(
        name="rollout/failed",
        words="rollouts failing",
        above=(0.0, 0.5),
        advice="mend rollout.episode, or rollout.engine: logs/train.log has samples and reasons",
        reason="a failure is a bug in somebody's code: none is normal; a count of one is past both thresholds",
    ),
    Rule(
        name="rollout/logprob_gap_mean",
        words="rollout/train gap",
        above=(0.02, 0.1),
        advice="set model.dtype=float32 to see if rounding is the cause",
        reason="two bf16 engines differ by 0.003 to 0.01 per token on average; more is another policy",
    ),
    Rule(
        name="rollout/logprob_gap_max",
        words="rollout/train outlier",
        above=(2.0, 5.0),
        advice="set model.dtype=float32; if it stays, look at the masks",
        reason="rounding moves a rare token by up to about 1 nat; 5 nats is a factor of 150",
    ),
    Rule(
        name="actor/ratio_error",
        words="ratio not 1 at first",
        above=(0.03, 0.08),
        advice="set model.dtype=float32; if it stays, it is a bug",
        reason="float32 stops at 0.01; in bf16 sums in another order move the mean by 0.001 to 0.08",
    ),
    Rule(
        name="actor/approx_kl",
        words="update kl high",
        above=(0.05, 0.2),
        advice="far in a step: lower actor.optimizer.lr or actor.num_epochs",
        reason="PPO is commonly stopped early at 0.015 to 0.03; at 0.2 the clipped surrogate means nothing",
    ),
    Rule(
        name="actor/clip_fraction",
        words="clipping a lot",
        above=(0.3, 0.5),
        advice="no gradient there: lower actor.optimizer.lr, actor.num_epochs",
        reason="0.05 to 0.2 is usual; beyond a half most of the batch is thrown away",
    ),
    Rule(
        name="actor/entropy",
        words="entropy collapsed",
        below=(0.1, 0.02),
        advice="nothing new: raise rollout.temperature or actor.entropy_coef",
        reason="0.02 nats is one surprise in some 300 tokens: all rollouts of a group are the same text",
        unless_reward=0.8,
    ),
    Rule(
        name="kl/reference_mean",
        words="far from reference",
        above=(4.0, 10.0),
        advice="raise kl.coef, unless the reference knew nothing",
        reason="from random weights a policy ends ln(V) away, 2.8 nats for 16 tokens; beyond 4 language decays",
    ),
    Rule(
        name="rollout/truncated",
        words="rollouts truncated",
        above=(0.2, 0.6),
        advice="raise rollout.max_response_tokens, or set reward.overlong",
        reason="a few long answers are normal; when most are cut, the score measures the limit",
    ),
    Rule(
        name="rollout/hidden_tokens",
        words="hidden tokens",
        above=(0.02, 0.2),
        advice="special tokens are an easy hack: let reward.function see them",
        reason="a trained model has none inside a response; one token in five is a way around the reward",
    ),
    Rule(
        name="reward/std",
        words="rewards all equal",
        below=(1e-3, 1e-6),
        advice="raise rollout.temperature, or choose easier or harder prompts",
        reason="a score from 0 to 1 that differs in one rollout of a thousand still has a deviation of 0.03",
        unless_reward=0.95,
        unless_taught=True,
    ),
    Rule(
        name="actor/without_signal",
        words="groups without signal",
        above=(0.5, 0.9),
        advice="set rollout.dynamic_sampling; easier prompts, harder if solved",
        reason="8 answers of a prompt that is solved 5 or 95 times of 100 are all equal in 66 of 100 groups",
        unless_reward=0.95,
        unless_taught=True,
    ),
    Rule(
        name="reward/flat_steps",
        words="not learning",
        above=(60.0, 120.0),
        advice="raise actor.optimizer.lr? rewards all equal, or never earned?",
        reason="steps without a rise (trend.py): recipes that work rise within 40; 60 leaves a slow start some room",
        unless_reward=0.9,
        unless_taught=True,
    ),
    Rule(
        name="actor/teacher_judged",
        words="no teacher",
        below=(1e-9, -math.inf),
        advice="nobody judged: add this data's source to teacher.by_source",
        reason="a share of the trained tokens; with none the teacher's loss is 0, and the step taught nothing",
    ),
    Rule(
        name="critic/explained_variance",
        words="critic blind",
        below=(0.0, -1.0),
        advice="normal in the first steps; later, raise critic.optimizer.lr",
        reason="0 is a critic that knows only the mean; below, its values add noise to the advantages",
        unless_reward=0.95,
    ),
)

MUST_BE_FINITE = (
    "reward/mean",
    "actor/loss",
    "actor/grad_norm",
    "actor/approx_kl",
    "actor/entropy",
    "critic/loss",
    "critic/grad_norm",
)
"""Scalars that are a number in every sound step. Others may be NaN: nothing was counted."""

_SEVERITY: dict[Level, int] = {"bad": 0, "watch": 1, "ok": 2}


def health(scalars: Mapping[str, float]) -> tuple[Health, ...]:
    """Return what is worth saying about a step, worst first; `healthy` alone when nothing is.

    Scalars that are missing are fine: GRPO has no critic.
    """
    findings = [_not_finite(name, scalars[name]) for name in MUST_BE_FINITE if _is_odd(scalars.get(name))]
    reward, is_taught = scalars.get("reward/mean", math.nan), "actor/teacher_judged" in scalars
    for rule in RULES:
        value = scalars.get(rule.name, math.nan)
        level, is_excused = rule.level(value), reward >= rule.unless_reward or (is_taught and rule.unless_taught)
        if level != "ok" and not is_excused:
            findings.append(Health(words=rule.words, level=level, name=rule.name, value=value, advice=rule.advice))
    if not findings:
        return (Health(words="healthy", level="ok"),)
    return tuple(sorted(findings, key=lambda finding: _SEVERITY[finding.level]))


def _is_odd(value: float | None) -> bool:
    return value is not None and not math.isfinite(value)


def _not_finite(name: str, value: float) -> Health:
    role = name.partition("/")[0]
    lower = f"stop, and lower {role}.optimizer.lr; or was a batch empty?"
    advice = "nothing was scored: mend reward.function, see logs/train.log" if role == "reward" else lower
    return Health(words=f"{name} not finite", level="bad", name=name, value=value, advice=advice)
