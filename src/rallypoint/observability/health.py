"""A step's numbers in a few words for a person: what looks wrong, how much, and what to do about it.

The thresholds stand in one table, `health.yaml`, each with the reason for its height. They are rules of thumb: they
colour a word on the screen and stop nothing. What must stop a run raises where it is computed.

>>> [f"{item.level}: {item.words}" for item in health({"actor/clip_fraction": 0.4, "rollout/truncated": 0.7})]
['bad: rollouts truncated', 'watch: clipping a lot']
>>> health({"actor/clip_fraction": 0.1})[0].words
'healthy'
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from importlib.resources import files
from typing import Literal

import yaml

from rallypoint.observability.numbers import number

Level = Literal["ok", "watch", "bad"]
SHARES = {"actor/without_signal", "actor/clip_fraction", "rollout/truncated", "rollout/hidden_tokens"}
"""Scalars that are said in percent."""


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

    @property
    def limit(self) -> str:
        """Beyond what the scalar is watched, as ` above 0.5`; empty if it is not a number."""
        rule = self._rule
        if rule is None or not math.isfinite(self.value):
            return ""
        side, (watch, _) = ("above", rule.above) if rule.above else ("below", rule.below or (math.nan, 0.0))
        return f" {side} {in_percent(self.name, watch)}"

    @property
    def distance(self) -> float:
        """How far the value is beyond its threshold, for one metric."""
        if self._rule is None or not math.isfinite(self.value):
            return math.inf
        return -self.value if self._rule.above is None else self.value

    @property
    def _rule(self) -> Rule | None:
        return next((rule for rule in rules() if rule.name == self.name), None)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """When a scalar deserves a word, and why just there."""

    name: str
    signal: str = ""
    """What the scalar is about, whatever it is; empty: its name says so."""
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


@functools.cache
def rules() -> tuple[Rule, ...]:
    """Return the rules of `health.yaml`."""
    from pydantic import TypeAdapter  # here, as it takes long and few of those who import this ask

    text = files("rallypoint.observability").joinpath("health.yaml").read_text(encoding="utf-8")
    return TypeAdapter(tuple[Rule, ...]).validate_python(yaml.safe_load(text))


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
    for rule in rules():
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


def in_percent(name: str, value: float) -> str:
    """Write a scalar, in percent if it is a share."""
    return f"{value:.0%}" if name in SHARES and math.isfinite(value) else number(value)
