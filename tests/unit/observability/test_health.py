import math
import re

import pytest

from rallypoint.config import RECIPES, RunConfig, leaves
from rallypoint.config.fields import sections_in
from rallypoint.config.recipes import unread_by
from rallypoint.observability.health import MUST_BE_FINITE, health, rules

SOUND = {
    "reward/mean": 0.5,
    "reward/std": 0.3,
    "reward/failed": 0.0,
    "rollout/response_length": 7.0,
    "rollout/truncated": 0.0,
    "rollout/failed": 0.0,
    "rollout/logprob_gap_mean": 1e-6,
    "rollout/logprob_gap_max": 1e-5,
    "actor/loss": 0.01,
    "actor/grad_norm": 0.5,
    "actor/clip_fraction": 0.1,
    "actor/approx_kl": 0.01,
    "actor/entropy": 1.5,
    "actor/ratio_error": 1e-6,
    "actor/without_signal": 0.3,
    "kl/reference_mean": 0.5,
    "critic/loss": 0.1,
    "critic/explained_variance": 0.7,
    "critic/grad_norm": 0.5,
}


def words(scalars: dict[str, float]) -> list[tuple[str, str]]:
    return [(item.level, item.words) for item in health(scalars)]


def test_a_sound_step_is_healthy() -> None:
    assert words(SOUND) == [("ok", "healthy")]


def test_missing_scalars_are_fine_because_not_every_algorithm_has_a_critic() -> None:
    assert words({}) == [("ok", "healthy")]


@pytest.mark.parametrize(
    ("name", "value", "level", "expected"),
    [
        ("actor/entropy", 0.05, "watch", "entropy collapsed"),
        ("actor/entropy", 0.001, "bad", "entropy collapsed"),
        ("actor/approx_kl", 0.1, "watch", "update kl high"),
        ("actor/approx_kl", 0.5, "bad", "update kl high"),
        ("actor/clip_fraction", 0.4, "watch", "clipping a lot"),
        ("rollout/truncated", 0.3, "watch", "rollouts truncated"),
        ("rollout/failed", 1, "bad", "rollouts failing"),
        ("reward/failed", 0.01, "watch", "rewards failing"),
        ("reward/failed", 3, "bad", "rewards failing"),
        ("rollout/logprob_gap_mean", 0.05, "watch", "rollout/train gap"),
        ("rollout/logprob_gap_max", 6.0, "bad", "rollout/train outlier"),
        ("critic/explained_variance", -0.2, "watch", "critic blind"),
        ("actor/ratio_error", 0.1, "bad", "ratio not 1 at first"),
        ("kl/reference_mean", 5.0, "watch", "far from reference"),
        ("reward/std", 0.0, "bad", "rewards all equal"),
        ("actor/without_signal", 0.6, "watch", "groups without signal"),
        ("actor/teacher_judged", 0.0, "watch", "no teacher"),
        ("actor/loss", math.nan, "bad", "actor/loss not finite"),
        ("critic/grad_norm", math.inf, "bad", "critic/grad_norm not finite"),
    ],
)
def test_an_odd_number_gets_its_word_its_value_and_advice(name: str, value: float, level: str, expected: str) -> None:
    (finding,) = health({**SOUND, name: value})
    assert (finding.level, finding.words, finding.name) == (level, expected, name)
    assert finding.value == value or math.isnan(value)
    assert finding.advice


def test_the_worst_comes_first() -> None:
    scalars = {**SOUND, "actor/approx_kl": 0.1, "rollout/truncated": 0.9}
    assert words(scalars) == [("bad", "rollouts truncated"), ("watch", "update kl high")]


def test_a_policy_that_is_right_may_be_certain() -> None:
    solved = {"reward/mean": 0.99, "reward/std": 0.0, "actor/entropy": 0.001, "critic/explained_variance": -3.0}
    assert words(solved) == [("ok", "healthy")]


def test_a_student_of_a_teacher_needs_no_rewards() -> None:
    without = {"reward/mean": 0.0, "reward/std": 0.0, "actor/without_signal": 1.0, "reward/flat_steps": 200.0}
    assert {item.words for item in health(without)} == {"rewards all equal", "groups without signal", "not learning"}
    assert [item.words for item in health({**without, "actor/teacher_judged": 0.3})] == ["healthy"]


def test_a_value_on_the_threshold_is_not_beyond_it() -> None:
    for rule in rules():
        watch, bad = rule.above or rule.below or (math.nan, math.nan)
        assert rule.level(watch) == "ok"
        assert rule.level(bad) == "watch"
        assert rule.level(math.nan) == "ok"


MEASURED = {
    "critic/": "critic",
    "kl/": "kl",
    "actor/teacher": "teacher",
    "actor/loss": "actor",
    "actor/grad_norm": "actor",
}
"""Beginning of a scalar's name -> what a recipe reads that measures it; all others come with sampling."""

FINDINGS = [
    *((rule.name, rule.advice) for rule in rules()),
    *((name, health({name: math.nan})[0].advice) for name in MUST_BE_FINITE),
]


@pytest.mark.parametrize(("name", "advice"), FINDINGS, ids=[name for name, _ in FINDINGS])
def test_every_advice_says_which_key_to_turn_and_how_in_each_recipe_that_gives_it(name: str, advice: str) -> None:
    keys = re.findall(r"(?<![\w/])[a-z_]+(?:\.[a-z_]+)+", advice)
    assert keys
    assert set(keys) <= {*leaves(RunConfig), *sections_in(RunConfig)}
    assert re.search(r"\b(raise|lower|set|mend|add|let)\b", advice)
    part = next((part for prefix, part in MEASURED.items() if name.startswith(prefix)), "rollout")
    recipes = [spec.name for spec in RECIPES.values() if spec.reads(part)]
    assert recipes
    for recipe in recipes:
        assert not {key.partition(".")[0] for key in keys} & set(unread_by(recipe)), recipe


def test_every_threshold_has_a_reason_and_every_advice_fits_a_line_of_the_panel() -> None:
    for rule in rules():
        assert rule.reason
        assert 0 < len(rule.advice) <= 62
        assert (rule.above is None) != (rule.below is None)
        watch, bad = rule.above or rule.below or (math.nan, math.nan)
        assert (bad > watch) == (rule.above is not None)
