import math
from pathlib import Path

import pytest

from rallypoint.display.state import HOLD_S, MAX_POINTS, Board, History
from rallypoint.run import Completion, RunInfo, StepReport


def report(step: int, *, response: str = "", seconds: float = 2.0, spans: dict[str, float] | None = None) -> StepReport:
    example = Completion(prompt="p", response=response, ground_truth="g", score=1.0) if response else None
    return StepReport(step=step, scalars={}, spans=spans or {}, seconds=seconds, num_tokens=100, completion=example)


def run(num_steps: int = 10) -> RunInfo:
    return RunInfo(name="r", algorithm="ppo", num_steps=num_steps, run_dir=Path("runs/r"))


def test_the_eta_follows_the_pace_between_steps_and_counts_down_between_them() -> None:
    now = [0.0]
    board = Board(lambda: now[0])
    assert math.isnan(board.eta_s)
    board.start(run(10))
    board.step(report(1, seconds=2.0))
    assert board.eta_s == 18.0
    now[0] = 3.0
    board.step(report(2, seconds=2.0))
    assert board.eta_s == 24.0
    now[0] = 4.0
    assert board.eta_s == 23.0
    now[0] = 100.0
    assert board.eta_s == 0.0


def test_a_completion_stays_long_enough_to_be_read() -> None:
    now = [0.0]
    board = Board(lambda: now[0])
    for at, response in ((0.0, "first"), (HOLD_S / 2, "second"), (HOLD_S, "third")):
        now[0] = at
        board.step(report(1, response=response))
        assert board.completion is not None
        assert board.completion.response == ("third" if at == HOLD_S else "first")
    board.step(report(2))
    assert board.completion.response == "third"


def test_shares_are_smoothed_and_leave_nested_spans_out() -> None:
    board = Board(lambda: 0.0)
    board.step(report(1, seconds=2.0, spans={"rollout": 1.0, "learn": 1.0, "learn/critic": 0.5}))
    assert board.shares == {"rollout": 0.5, "learn": 0.5}
    board.step(report(2, seconds=2.0, spans={"rollout": 2.0}))
    assert board.shares == pytest.approx({"rollout": 0.55, "learn": 0.45})
    assert board.tokens_per_s == pytest.approx(50.0)


def test_a_resumed_run_starts_with_its_past() -> None:
    board = Board(lambda: 0.0)
    board.start(
        RunInfo(
            name="r",
            algorithm="ppo",
            num_steps=9,
            run_dir=Path("r"),
            first_step=3,
            course=[0.1, 0.2],
            validations=[0.0, 0.3],
        )
    )
    assert board.course.points() == [0.1, 0.2]
    assert (board.first_validation, board.validation) == (0.0, 0.3)


def test_a_history_keeps_its_mean_in_a_bounded_number_of_points() -> None:
    history = History(float(value) for value in range(100_000))
    points = history.points()
    assert MAX_POINTS // 2 - 1 <= len(points) <= MAX_POINTS
    assert points == sorted(points)
    assert points[0] < 300
    assert points[-1] > 99_700


def test_a_note_given_again_is_counted_and_becomes_the_latest() -> None:
    board = Board(lambda: 0.0)
    for message in ("a", "b", "a"):
        board.note(message)
    assert board.notes == {"b": 1, "a": 2}
    assert list(board.notes) == ["b", "a"]


def test_a_wait_ends_with_the_next_step() -> None:
    now = [0.0]
    board = Board(lambda: now[0])
    board.wait("starting Ray")
    now[0] = 5.0
    assert (board.message, board.waiting_s) == ("starting Ray", 5.0)
    board.step(report(1))
    assert board.message == ""
