"""A run that does not learn is told so; those that ship, and slow ones, are not."""

import io
import json
import random
from pathlib import Path

import pytest
from measured import Measured
from rich.console import Console

from rallypoint.display import PlainLines
from rallypoint.display.state import Board
from rallypoint.observability.health import health
from rallypoint.observability.trend import FLAT_STEPS, WINDOW, RewardTrend
from rallypoint.run import RunInfo, StepReport, Summary

RECORDED = json.loads(Path(__file__).with_name("rewards.json").read_text())
"""Mean and deviation of the rewards of each step, as real runs of seed 0 had them."""
FLAT = "digits with lr=1e-6, 150 steps"


def words_along(course: list[list[float]], **info: int) -> list[tuple[str, ...]]:
    """The health words of every step."""
    board, words = Board(lambda: 0.0), list[tuple[str, ...]]()
    board.start(RunInfo(name="r", algorithm="ppo", num_steps=len(course), run_dir=Path("r"), **info))
    for step, (mean, spread) in enumerate(course, start=1):
        board.step(report(step, mean, spread))
        words.append(tuple(f"{found.level}: {found.words}" for found in board.health if found.name == FLAT_STEPS))
    return words


def report(step: int, mean: float, spread: float) -> StepReport:
    scalars = {"reward/mean": mean, "reward/std": spread}
    return StepReport(step=step, scalars=scalars, spans={}, seconds=1.0, num_tokens=1)


@pytest.mark.parametrize("name", ["digits", "digits-grpo"])
def test_the_recipes_that_ship_are_never_said_not_to_learn(name: str):
    assert set(words_along(RECORDED[name])) == {()}


def test_a_rate_of_1e_6_on_random_weights_is_said_not_to_learn():
    words = words_along(RECORDED[FLAT])
    assert words[59] == ()
    assert words[60] == ("watch: not learning",)
    assert words[139] == ("bad: not learning",)


def test_the_warmup_does_not_count():
    words = words_along(RECORDED[FLAT], num_warmup_steps=50)
    assert words[109] == ()
    assert words[110] == ("watch: not learning",)


def noisy(rise_per_step: float, *, begin: float = 0.4, noise: float = 0.03, num_steps: int = 150) -> list[list[float]]:
    rng = random.Random(0)
    return [[begin + rise_per_step * step + rng.gauss(0, noise), 0.49] for step in range(num_steps)]


def test_a_slow_rise_of_a_noisy_reward_is_seen_and_noise_alone_is_none():
    assert words_along(noisy(0.0015))[-1] == ()
    assert words_along(noisy(0.0))[-1] == ("bad: not learning",)


def test_what_was_learned_once_is_not_forgotten_and_what_was_known_before_is_no_fault():
    rises_and_falls = noisy(0.003, num_steps=100) + noisy(0.0, num_steps=100)
    assert words_along(rises_and_falls)[-1] == ()
    assert words_along(noisy(0.0, begin=0.95, noise=0.005))[-1] == ()


def test_rewards_that_are_all_equal_are_no_rise():
    assert words_along([[0.0, 0.0]] * 130)[-1] == ("bad: not learning",)


def test_a_resumed_run_knows_its_past():
    course = RewardTrend([mean for mean, _ in RECORDED["digits"]])
    course.add({"reward/mean": 0.5, "reward/std": 0.1})
    assert course.num_flat_steps == 0
    assert RewardTrend([0.1] * 70).num_flat_steps == 70
    assert RewardTrend([0.1] * (WINDOW - 1), num_warmup_steps=50).num_flat_steps == 0


def test_plain_lines_say_it_at_each_step_and_what_to_try_once():
    console = Console(file=io.StringIO())
    plain = PlainLines(console, clock=lambda: 0.0)
    for step, (mean, spread) in enumerate(RECORDED[FLAT][:80], start=1):
        plain.step(report(step, mean, spread))
    lines = console.file.getvalue().splitlines()
    assert sum(line.endswith("not learning") for line in lines) == 20
    [advice] = [line for line in lines if line.startswith("  not learning (reward/flat_steps 61)")]
    assert "raise actor.optimizer.lr" in advice


def test_the_summary_says_it_with_the_usual_causes(tmp_path: Path):
    for name, is_said in ((FLAT, True), ("digits", False)):
        path = tmp_path / f"{len(name)}.jsonl"
        with Measured(path) as log:
            for step, (mean, spread) in enumerate(RECORDED[name], start=1):
                log.write(step, {"reward/mean": mean, "reward/std": spread})
        notes = Summary(name="r", run_dir=tmp_path).measured(path).notes
        assert any("not learning: in 150 steps" in note and "1e-6" in note for note in notes) == is_said


def test_a_run_without_rewards_has_no_course():
    assert health({FLAT_STEPS: RewardTrend().num_flat_steps})[0].words == "healthy"
