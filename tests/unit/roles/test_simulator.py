"""A simulated run, beside numbers that are computed by hand."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rallypoint.roles.simulator import Measured, Setting, simulate
from rallypoint.run.timeline import GroupTimes, StepTimes


def measured(work=(1.0,), reward=(0.0,), train=(1.0,), between=0.0):
    return Measured(work_s=work, reward_s=reward, train_s=train, between_s=between)


def test_in_turns_each_waits_for_the_other_and_ahead_nobody_does():
    in_turns = simulate(measured(), Setting(num_prompts=1, num_steps=101))
    assert in_turns.step_s == pytest.approx(2.0, rel=0.01)
    assert (in_turns.rollout_idle, in_turns.actor_idle) == pytest.approx((0.5, 0.5), abs=0.01)
    ahead = simulate(measured(), Setting(num_prompts=1, num_steps=101, max_staleness=1))
    assert ahead.step_s == pytest.approx(1.0, rel=0.02)
    assert (ahead.rollout_idle, ahead.actor_idle) == pytest.approx((0.0, 0.0), abs=0.02)
    assert ahead.staleness_max == 1


def test_groups_of_a_rank_share_it_and_more_ranks_sample_more():
    several = Setting(num_prompts=4, num_steps=51)
    assert simulate(measured(), several).step_s == pytest.approx(5.0, rel=0.01)
    two_ranks = Setting(num_prompts=4, num_steps=51, num_ranks=2, train_speed=2.0)
    assert simulate(measured(), two_ranks).step_s == pytest.approx(2.5, rel=0.01)


def test_a_straggler_holds_a_step_up_in_order_and_not_in_a_window():
    slow = measured(work=(0.1,), reward=(3.0, *[0.0] * 7), train=(1.0,))
    in_order = simulate(slow, Setting(num_prompts=2, num_steps=100, max_staleness=3))
    in_window = simulate(slow, Setting(num_prompts=2, num_steps=100, max_staleness=3, window=4))
    assert in_window.actor_idle < in_order.actor_idle
    assert max(in_window.staleness_max, in_order.staleness_max) <= 3


@given(
    st.integers(0, 4),
    st.integers(1, 3),
    st.integers(1, 3),
    st.lists(st.floats(0, 10), min_size=1, max_size=30),
    st.floats(0, 1),
)
@settings(deadline=None, max_examples=30)
def test_no_times_break_the_bound_or_make_a_share_of_more_than_all(max_staleness, num_prompts, num_ranks, times, part):
    window = 1 + round(part * max_staleness * num_prompts)
    setting = Setting(
        num_prompts=num_prompts, max_staleness=max_staleness, window=window, num_ranks=num_ranks, num_steps=10
    )
    found = simulate(measured(work=tuple(times), reward=tuple(times[::-1])), setting)
    assert 0 <= found.staleness_mean <= found.staleness_max <= max_staleness
    assert -1e-6 <= found.rollout_idle <= 1
    assert -1e-6 <= found.actor_idle <= 1


def test_times_are_read_off_what_a_run_wrote_down():
    steps = [
        StepTimes(
            step=step,
            asked_s=10.0 * step,
            taken_s=10.0 * step + 4.0,
            loaded_s=10.0 * step - 1.0,
            busy_s=(2.0,),
            groups=tuple(
                GroupTimes(
                    index=2 * step + place,
                    rank=0,
                    admitted_s=10.0 * step,
                    sampled_s=10.0 * step + 2.0 + place,
                    scored_s=10.0 * step + 4.0,
                )
                for place in range(2)
            ),
        )
        for step in range(3)
    ]
    assert [StepTimes.from_json(step.to_json()) for step in steps] == steps
    found = Measured.of(steps)
    assert found.work_s == pytest.approx((1.0, 2.0) * 3)
    assert found.reward_s == pytest.approx((2.0, 1.0) * 3)
    assert (found.train_s, found.between_s) == ((5.0, 5.0), 1.0)
