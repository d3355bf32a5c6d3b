"""Jobs that run side by side."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Iterator

import pytest
import torch

from rallypoint.cpu.threads import Lanes

_WORD = contextvars.ContextVar("_WORD", default="nothing")


@pytest.fixture
def lanes() -> Iterator[Lanes]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield Lanes(torch.device("cpu"))
    torch.set_num_threads(before)


def test_jobs_run_at_the_same_time_and_answer_in_their_order(lanes: Lanes) -> None:
    meeting = threading.Barrier(3, timeout=60)

    def job(number: int) -> int:
        meeting.wait()
        return number

    assert lanes.num == 3
    assert lanes.run([lambda: job(0), lambda: job(1), lambda: job(2)]) == [0, 1, 2]
    assert lanes.run([]) == []


def test_several_jobs_have_a_thread_of_torch_each_and_a_single_one_all_unless_told_otherwise(lanes: Lanes) -> None:
    assert lanes.run([torch.get_num_threads]) == [3]
    for _ in range(2):  # also in threads that have been used before
        assert lanes.run([torch.get_num_threads] * 3) == [1, 1, 1]
    assert lanes.run([torch.get_num_threads], 1) == [1]
    assert lanes.run([torch.get_num_threads] * 2, 2) == [2, 2]
    assert torch.get_num_threads() == 3


def test_an_accelerator_has_one_lane() -> None:
    assert Lanes(torch.device("meta")).num == 1


@pytest.mark.parametrize("enabled", [True, False])
def test_jobs_have_gradients_and_context_as_the_caller_has(lanes: Lanes, enabled: bool) -> None:
    with torch.set_grad_enabled(enabled):
        assert lanes.run([torch.is_grad_enabled] * 3) == [enabled] * 3
    token = _WORD.set("something")
    assert lanes.run([_WORD.get] * 2) == ["something"] * 2
    _WORD.reset(token)


@pytest.mark.parametrize("which", [0, 1])
def test_an_error_waits_until_every_job_has_ended(lanes: Lanes, which: int) -> None:
    others_may_end, ended = threading.Event(), threading.Event()

    def fail() -> None:
        others_may_end.set()
        raise ArithmeticError("of one job")

    def other() -> None:
        assert others_may_end.wait(60)
        ended.set()

    with pytest.raises(ArithmeticError, match="of one job"):
        lanes.run([fail, other] if which == 0 else [other, fail])
    assert ended.is_set()
    assert torch.get_num_threads() == 3
