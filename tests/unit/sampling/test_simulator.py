"""A simulated run, beside numbers that are computed by hand."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rallypoint.journal import BatchTaken, GroupScored
from rallypoint.sampling.simulator import (
    GroupWork,
    Measured,
    Servers,
    Setting,
    Speed,
    Step,
    measured_outcome,
    settled,
    simulate,
)

SHARED = Speed(step_s=0.0, row_s=1.0)
"""A rank whose rows share it evenly."""


def measured(work=(1.0,), reward=(0.0,), train=(1.0,), between=0.0, **more):
    works = [GroupWork(num_tokens=work[i % len(work)], num_rows=1.0, call_s=reward[i % len(reward)])
             for i in range(len(work) * len(reward))]  # fmt: skip
    return Measured(**{"groups": tuple(works), "speed": SHARED, "train_s": train, "between_s": (between,), **more})


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
    """The third group takes 3 s. In order step 2 waits for it, in a window only step 3, and a step was trained on."""
    slow = measured(work=(0.1,), reward=(0.0, 0.0, 3.0, *[0.0] * 5), train=(1.0,))
    in_order, in_window = (
        simulate(slow, Setting(num_prompts=2, num_steps=3, max_staleness=3, window=window)) for window in (1, 4)
    )
    assert 2 * (in_order.step_s - in_window.step_s) == pytest.approx(1.0)
    assert in_window.actor_idle < in_order.actor_idle
    in_order, in_window = (
        simulate(slow, Setting(num_prompts=2, num_steps=100, max_staleness=3, window=window)) for window in (1, 4)
    )
    assert in_window.staleness_mean < in_order.staleness_mean
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


def test_rows_that_a_rank_samples_together_are_hardly_slower_where_steps_cost_more_than_rows():
    batched = Speed(step_s=0.9, row_s=0.1)
    assert simulate(measured(speed=batched), Setting(num_prompts=4, num_steps=51)).step_s == pytest.approx(
        2.3, rel=0.02
    )
    two_fit = Speed(step_s=0.9, row_s=0.1, max_rows=2)
    assert simulate(measured(speed=two_fit), Setting(num_prompts=4, num_steps=51)).step_s == pytest.approx(
        3.2, rel=0.02
    )


def test_a_batch_waits_for_what_comes_after_its_last_score_also_where_sampling_is_ahead():
    judged = measured(work=(0.1,), train=(1.0,), after_s=(0.5,))
    for max_staleness, expected in ((0, 1.6), (1, 1.5)):
        found = simulate(judged, Setting(num_prompts=1, num_steps=30, max_staleness=max_staleness))
        assert found.step_s == pytest.approx(expected)
        assert found.actor_idle == pytest.approx((expected - 1.0) / expected)


def test_a_group_that_replaced_another_is_admitted_later_in_turns_and_at_once_where_sampling_is_ahead():
    replacing = Measured(
        groups=(GroupWork(num_tokens=1.0, num_rows=1.0), GroupWork(num_tokens=1.0, num_rows=1.0, late_s=2.0)),
        speed=SHARED,
        train_s=(1.0,),
        between_s=(0.0,),
    )
    assert simulate(replacing, Setting(num_prompts=2, num_steps=30)).step_s == pytest.approx(4.0)
    assert simulate(replacing, Setting(num_prompts=2, num_steps=30, max_staleness=1)).step_s == pytest.approx(
        2.0, rel=0.02
    )


def test_rewards_wait_for_a_process_that_is_free():
    slow = measured(work=(0.0,), reward=(1.0,), train=(0.0,), max_calls=2)
    assert simulate(slow, Setting(num_prompts=4, num_steps=50)).step_s == pytest.approx(2.0)
    assert simulate(slow, Setting(num_prompts=4, num_steps=50, max_staleness=3)).step_s == pytest.approx(2.0)


def test_weights_wait_for_the_end_of_a_slice_in_which_a_rank_samples():
    setting = Setting(num_prompts=1, num_steps=200, max_staleness=3)
    busy = [
        simulate(measured(work=(0.05, 0.55), train=(0.3,), slice_s=slice_s), setting).step_s for slice_s in (0.0, 0.25)
    ]
    assert busy[0] == pytest.approx(0.3, rel=0.02)
    assert 0.35 < busy[1] < 0.55
    short = measured(work=(0.1,), train=(0.3,), slice_s=0.25)  # by then ranks are idle
    assert simulate(short, Setting(num_prompts=1, num_steps=200, max_staleness=1)).step_s == pytest.approx(
        0.3, rel=0.05
    )


def group(prompt, begin, end, tokens=10, *, num_rows=1, scored_s=None, rank=0):
    return GroupScored(prompt=prompt, rank=rank, admitted_s=begin, sampled_s=end,
                       scored_s=end if scored_s is None else scored_s,
                       turns=[(sample, 0, [(0, tokens)], "") for sample in range(num_rows)])  # fmt: skip


def changed(step, /, **more):
    return dataclasses.replace(step, batch=dataclasses.replace(step.batch, **more))


def test_what_a_token_takes_alone_and_beside_others_is_read_off_groups_of_different_lengths():
    """10 tokens beside another row take 10 * (0.1 + 2 * 0.05) s, 20 more alone 20 * (0.1 + 0.05) s."""
    found = Speed.fitted([group(0, 0.0, 2.0), group(1, 0.0, 5.0, 30)], None)
    assert (found.step_s, found.row_s) == pytest.approx((0.1, 0.05), rel=0.01)
    always_two = Speed.fitted([group(0, 0.0, 2.0), group(1, 0.0, 2.0)], None)
    assert (always_two.step_s, always_two.row_s) == pytest.approx((0.0, 0.1))


def test_what_calls_of_a_reward_took_is_read_off_groups_that_waited_for_a_process():
    """Two processes: two calls of 1 s, then two of another group that had to wait for them, of 3 s."""
    servers = Servers(2)
    assert servers.length(0.0, 2, 1.0) == 1.0
    servers.call(0.0, 2, 1.0)
    assert servers.length(0.5, 2, 4.0) == 3.0
    assert Servers(None).length(0.5, 2, 4.0) == 3.5


def test_times_are_read_off_what_a_run_wrote_down():
    steps = []
    for number in range(3):
        asked_s = 10.0 * number
        groups = tuple(group(2 * number + place, asked_s, asked_s + 2.0 + place, 10 * (2 + place), num_rows=2,
                             scored_s=asked_s + 4.0) for place in range(2))  # fmt: skip
        batch = BatchTaken(step=number, prompts=[2 * number, 2 * number + 1], asked_s=asked_s, taken_s=asked_s + 4.0,
                           loaded_s=asked_s - 1.0, busy_s=(2.0,))  # fmt: skip
        steps.append(Step(batch, groups))
    found = Measured.of(steps, max_calls=4)
    assert [work.num_tokens for work in found.groups] == pytest.approx([20.0, 30.0] * 3, rel=0.1)
    assert [work.num_rows for work in found.groups] == [2.0] * 6
    assert [work.call_s for work in found.groups] == pytest.approx([2.0, 1.0] * 3)
    assert found.busy == pytest.approx(2 / 3)  # it had groups for 3 s of each step
    assert (found.train_s, found.between_s, found.slice_s) == ((5.0, 5.0), (1.0, 1.0, 1.0), 0.25)
    assert found.after_s == (0.0,) * 3
    assert [work.late_s for work in found.groups] == [0.0] * 6
    again = [*steps, *(changed(step, step=step.batch.step + 3) for step in steps)]
    assert Measured.of(again).train_s == (5.0,) * 4  # the clock of a run that goes on begins anew
    ahead = [changed(step, asked_s=step.batch.asked_s + 0.5) for step in steps]
    assert Measured.of(ahead).slice_s == 0.0  # is in the trainer's seconds


def step_of(number, *, begins, replaces_s=0.0, scores_s=0.0, trains_s=1.0):
    """A step of two groups that take a second each; the second one may replace another, and a model may score them."""
    ends = begins + replaces_s + 1.0
    groups = tuple(
        group(2 * number + place, begin, begin + 1.0, rank=place)
        for place, begin in enumerate((begins, begins + replaces_s))
    )
    batch = BatchTaken(step=number + 1, prompts=[2 * number, 2 * number + 1], asked_s=begins, taken_s=ends + scores_s,
                       loaded_s=begins - trains_s, busy_s=(1.0, 1.0))  # fmt: skip
    return Step(batch, groups), ends + scores_s + trains_s


@pytest.mark.parametrize("more", [{}, {"scores_s": 2.5}, {"replaces_s": 3.0}, {"replaces_s": 1.5, "scores_s": 0.5}])
def test_a_run_in_turns_is_simulated_as_it_was_whatever_its_batches_wait_for(more):
    steps, begins = [], 1.0
    for number in range(12):
        step, begins = step_of(number, begins=begins, **more)
        steps.append(changed(step, loaded_s=step.batch.asked_s))
    found, measured_so = (
        simulate(Measured.of(steps), Setting(num_prompts=2, num_ranks=2, num_steps=12)),
        measured_outcome(steps),
    )
    assert found.step_s == pytest.approx(measured_so.step_s, rel=0.01)
    assert found.step_s == pytest.approx(2.0 + sum(more.values()), rel=0.01)
    assert found.actor_idle == pytest.approx(measured_so.actor_idle, abs=0.01)


def test_the_first_steps_of_each_start_are_left_out_and_the_time_between_starts_with_them():
    steps, begins = [], 1.0
    for number in range(40):
        step, begins = step_of(number, begins=begins, scores_s=30.0 if number < 3 else 0.0)
        steps.append(step)
    left = settled(steps)
    assert [step.batch.step for step in left] == list(range(6, 41))
    assert measured_outcome(left).step_s == pytest.approx(2.0)
    again = [changed(step, step=step.batch.step + 40) for step in steps]
    assert [step.batch.step for step in settled([*steps, *again])] == [*range(6, 41), *range(46, 81)]
    assert measured_outcome(settled([*steps, *again])).step_s == pytest.approx(2.0)
    assert settled(steps[:3]) == steps[:3]
