"""The curve is drawn while a run goes on, now and then, elsewhere, and without a word if it cannot be."""

import subprocess
import sys
from pathlib import Path

import pytest
from measured import Measured

from rallypoint.display.draw import EVERY_S, FIRST_S, CurveAsItGoes


class Drawing:
    """A process that draws as long as it is told to."""

    def __init__(self) -> None:
        self.is_done, self.was_killed = False, False

    def poll(self) -> int | None:
        return 0 if self.is_done or self.was_killed else None

    def kill(self) -> None:
        self.was_killed = True

    def wait(self) -> int:
        assert self.was_killed
        return -9


class Studio:
    """A clock that is set, and processes that draw nothing."""

    def __init__(self) -> None:
        self.now, self.drawings = 0.0, list[Drawing]()
        self.curve = CurveAsItGoes(Path("m"), clock=lambda: self.now, start=self.start)

    def start(self, command: list[str]) -> Drawing:
        assert command[-1:] == ["m"]
        self.drawings.append(Drawing())
        return self.drawings[-1]

    def steps(self, num: int, seconds: float) -> int:
        """How many pictures a number of steps of so many seconds makes."""
        before = len(self.drawings)
        for _ in range(num):
            self.now += seconds
            self.curve.refresh()
            if self.drawings:
                self.drawings[-1].is_done = True
        return len(self.drawings) - before


def test_there_is_a_picture_soon_and_then_one_a_minute_however_fast_the_steps_are():
    studio = Studio()
    assert studio.steps(int(FIRST_S) - 1, 1.0) == 0
    assert studio.steps(2, 1.0) == 1
    assert studio.steps(6_000, 0.1) == 600 / EVERY_S
    assert studio.steps(3, 5 * EVERY_S) == 3


def test_one_picture_is_made_at_a_time_and_the_last_is_ended_with_the_run():
    studio = Studio()
    studio.now = 2 * FIRST_S
    studio.curve.refresh()
    studio.now += 2 * EVERY_S
    studio.curve.refresh()
    assert len(studio.drawings) == 1, "the first is not done yet"
    studio.curve.close()
    assert studio.drawings[0].was_killed


def test_no_process_to_draw_with_is_no_reason_to_end():
    def start(command: list[str]) -> subprocess.Popen[bytes]:
        raise BlockingIOError

    now = [0.0]
    curve = CurveAsItGoes(Path("m"), clock=lambda: now[0], start=start)
    now[0] = 2 * FIRST_S
    curve.refresh()
    curve.close()


@pytest.mark.parametrize("is_damaged", [False, True])
def test_the_process_draws_a_run_that_goes_on(is_damaged: bool, tmp_path: Path):
    journal, png = tmp_path / "journal.jsonl", tmp_path / "curve.png"
    with Measured(journal) as log:
        log.write(0, {"time_s/start": 9.0})
        log.write(1, {"reward/mean": 0.5, "time_s/rollout": 1.0})
    if is_damaged:
        journal.write_text("{\n" + journal.read_text())
    command = [sys.executable, "-m", "rallypoint.display.draw", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, check=False)
    assert (done.returncode != 0) == is_damaged
    assert png.is_file() != is_damaged
