import asyncio

import pytest

from rallypoint.observability import collect_spans, span
from rallypoint.observability.spans import shares_of, top_level


class Clock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def pass_by(self, seconds: float) -> None:
        self.now += seconds


def test_a_span_adds_its_seconds_to_the_collector_each_time_it_is_entered() -> None:
    clock = Clock()
    with collect_spans(clock) as spans:
        for seconds in (1.0, 2.0):
            with span("rollout"):
                clock.pass_by(seconds)
    assert spans.seconds == {"rollout": 3.0}
    assert spans.elapsed_s == 3.0


def test_a_nested_span_has_a_path_and_is_not_counted_twice_in_the_shares() -> None:
    clock = Clock()
    with collect_spans(clock) as spans:
        with span("learn"):
            clock.pass_by(1.0)
            with span("critic"):
                clock.pass_by(2.0)
        clock.pass_by(1.0)
    assert spans.seconds == {"learn": 3.0, "learn/critic": 2.0}
    assert top_level(spans.seconds) == {"learn": 3.0}
    assert shares_of(top_level(spans.seconds), spans.elapsed_s) == {"learn": 0.75, "other": 0.25}
    assert spans.scalars() == {"time_s/learn": 3.0, "time_s/learn/critic": 2.0}


def test_the_body_of_a_span_may_await_and_gathered_tasks_keep_to_their_own_parents() -> None:
    clock = Clock()
    begun = asyncio.Event()

    async def slow() -> None:
        with span("slow"):
            begun.set()
            await asyncio.sleep(0)
            clock.pass_by(1.0)

    async def late() -> None:
        await begun.wait()
        with span("late"):
            clock.pass_by(1.0)

    async def step() -> None:
        with span("judge"):
            await asyncio.gather(slow(), late())
        with span("publish"):
            await asyncio.sleep(0)

    with collect_spans(clock) as spans:
        asyncio.run(step())
    assert set(spans.seconds) == {"judge", "judge/slow", "judge/late", "publish"}
    assert top_level(spans.seconds) == {"judge": 2.0, "publish": 0.0}


def test_phases_that_overlap_share_the_whole_without_exceeding_it() -> None:
    clock = Clock()

    async def phase(name: str, turn: asyncio.Barrier) -> None:
        with span(name):
            await turn.wait()
            clock.pass_by(1.0)
            await turn.wait()

    async def both() -> None:
        turn = asyncio.Barrier(2)
        await asyncio.gather(phase("rollout", turn), phase("learn", turn))

    with collect_spans(clock) as spans:
        asyncio.run(both())
    assert spans.elapsed_s == 2.0
    assert sum(top_level(spans.seconds).values()) == 4.0
    assert shares_of(top_level(spans.seconds), spans.elapsed_s) == {"rollout": 0.5, "learn": 0.5}


def test_a_span_that_raises_is_counted_and_leaves_no_parent_behind() -> None:
    clock = Clock()

    def fail() -> None:
        with span("rollout"):
            clock.pass_by(1.0)
            raise RuntimeError

    with collect_spans(clock) as spans:
        with pytest.raises(RuntimeError):
            fail()
        with span("learn"):
            clock.pass_by(1.0)
    assert spans.seconds == {"rollout": 1.0, "learn": 1.0}


def test_a_span_without_a_collector_does_nothing() -> None:
    with span("rollout"):
        pass


def test_an_inner_collector_is_its_own_and_the_outer_goes_on_afterwards() -> None:
    clock = Clock()
    with collect_spans(clock) as outer, span("step"):
        with collect_spans(clock) as inner, span("rollout"):
            clock.pass_by(1.0)
        with span("learn"):
            clock.pass_by(1.0)
    assert inner.seconds == {"rollout": 1.0}
    assert outer.seconds == {"step": 2.0, "step/learn": 1.0}


def test_an_elapsed_time_stops_with_its_collector() -> None:
    clock = Clock()
    with collect_spans(clock) as spans:
        clock.pass_by(1.0)
        assert spans.elapsed_s == 1.0
    clock.pass_by(1.0)
    assert spans.elapsed_s == 1.0


@pytest.mark.parametrize("name", ["", "learn/critic"])
def test_a_name_that_would_be_mistaken_for_a_path_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="one word"), span(name):
        pass


def test_shares_of_no_time_at_all_are_empty() -> None:
    with collect_spans(Clock()) as spans, span("rollout"):
        pass
    assert shares_of(top_level(spans.seconds), spans.elapsed_s) == {}
