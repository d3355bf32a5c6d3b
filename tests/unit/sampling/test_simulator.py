"""A simulated run, beside numbers that are computed by hand."""

import dataclasses
import math

import pytest
from hypothesis import given, settings, strategies as st

from rallypoint.journal import BatchTaken, GroupScored, Journal, RunBegan
from rallypoint.sampling.simulator import (
    Measured,
    MeasuredStep,
    Simulation,
    Speed,
    measured_outcome,
    read_steps,
    settled,
)


def group(prompt, begin, end, tokens=10, *, num_rows=1, scored_s=None, rank=0):
    return GroupScored(prompt=prompt, rank=rank, admitted_s=begin, sampled_s=end,
                       scored_s=end if scored_s is None else scored_s,
                       turns=[(sample, 0, [(0, tokens)], "") for sample in range(num_rows)])  # fmt: skip


def measured(work=(1.0,), reward=(0.0,), train=(1.0,), after=0.0, late=(0.0,), *, in_turns=False):
    """Steps of a group each, sampled one after another: rows share a rank evenly. The last step ends the one before."""
    steps, now, num_steps = [], 0.0, math.lcm(len(work), len(reward), len(train), len(late))
    for number in range(num_steps + 1):
        begins = now + late[number % len(late)]
        sampled = begins + max(1e-6, work[number % len(work)])
        scored = sampled + reward[number % len(reward)]
        asked = now if in_turns else begins + 1e-7
        batch = BatchTaken(step=number + 1, prompts=[number], asked_s=asked, taken_s=scored + after, loaded_s=now,
                           busy_s=(sampled - begins,))  # fmt: skip
        steps.append(
            MeasuredStep(batch, [group(number, begins, sampled, scored_s=scored)] if number < num_steps else [])
        )
        now = scored + after + train[number % len(train)]
    return Measured(steps)


def simulate(times, num_warmup_steps=0, **setting):
    return Simulation(times, **setting).run(num_warmup_steps)


def test_in_turns_each_waits_for_the_other_and_ahead_nobody_does():
    in_turns = simulate(measured(), num_prompts=1, num_steps=101)
    assert in_turns.step_s == pytest.approx(2.0, rel=0.01)
    assert (in_turns.rollout_idle, in_turns.actor_idle) == pytest.approx((0.5, 0.5), abs=0.01)
    ahead = simulate(measured(), num_prompts=1, num_steps=101, max_staleness=1)
    assert ahead.step_s == pytest.approx(1.0, rel=0.02)
    assert (ahead.rollout_idle, ahead.actor_idle) == pytest.approx((0.0, 0.0), abs=0.02)
    assert max(ahead.ages) == 1


def test_groups_of_a_rank_share_it_and_more_ranks_sample_more():
    assert simulate(measured(), num_prompts=4, num_steps=51).step_s == pytest.approx(5.0, rel=0.01)
    two_ranks = simulate(measured(), num_prompts=4, num_steps=51, num_ranks=2, train_speed=2.0)
    assert two_ranks.step_s == pytest.approx(2.5, rel=0.01)


def test_a_straggler_holds_a_step_up_in_order_and_not_in_a_window():
    """The third group takes 3 s. In order step 2 waits for it, in a window only step 3, and a step was trained on."""
    slow = measured(work=(0.1,), reward=(0.0, 0.0, 3.0, *[0.0] * 5), train=(1.0,))
    in_order, in_window = (
        simulate(slow, num_prompts=2, num_steps=3, max_staleness=3, window=window) for window in (1, 4)
    )
    assert 2 * (in_order.step_s - in_window.step_s) == pytest.approx(1.0)
    assert in_window.actor_idle < in_order.actor_idle
    in_order, in_window = (
        simulate(slow, num_prompts=2, num_steps=100, max_staleness=3, window=window) for window in (1, 4)
    )
    assert sum(in_window.ages) < sum(in_order.ages)
    assert max([*in_window.ages, *in_order.ages]) <= 3


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
    found = simulate(
        measured(work=tuple(times), reward=tuple(times[::-1])),
        num_prompts=num_prompts, max_staleness=max_staleness, window=window, num_ranks=num_ranks, num_steps=10,
    )  # fmt: skip
    assert 0 <= min(found.ages) <= max(found.ages) <= max_staleness
    assert -1e-6 <= found.rollout_idle <= 1
    assert -1e-6 <= found.actor_idle <= 1


def test_rows_that_a_rank_samples_together_are_hardly_slower_where_steps_cost_more_than_rows():
    batched = measured()
    batched.tokens = [1.0]
    for max_rows, expected in ((math.inf, 2.3), (2, 3.2)):
        batched.speed = Speed(0.9, 0.1, max_rows)
        assert simulate(batched, num_prompts=4, num_steps=51).step_s == pytest.approx(expected, rel=0.02)


def test_a_batch_waits_for_what_comes_after_its_last_score_also_where_sampling_is_ahead():
    judged = measured(work=(0.1,), train=(1.0,), after=0.5)
    for max_staleness, expected in ((0, 1.6), (1, 1.5)):
        found = simulate(judged, num_prompts=1, num_steps=30, max_staleness=max_staleness)
        assert found.step_s == pytest.approx(expected)
        assert found.actor_idle == pytest.approx((expected - 1.0) / expected)


def test_a_group_that_replaced_another_is_admitted_later_in_turns_and_at_once_where_sampling_is_ahead():
    replacing = measured(late=(0.0, 2.0), in_turns=True)
    assert simulate(replacing, num_prompts=2, num_steps=30).step_s == pytest.approx(4.0)
    assert simulate(replacing, num_prompts=2, num_steps=30, max_staleness=1).step_s == pytest.approx(2.0, rel=0.02)


def test_weights_wait_for_the_end_of_a_slice_in_which_a_rank_samples():
    setting = {"num_prompts": 1, "num_steps": 200, "max_staleness": 3}
    busy = [
        simulate(measured(work=(0.05, 0.55), train=(0.3,), in_turns=in_turns), **setting).step_s
        for in_turns in (False, True)
    ]
    assert busy[0] == pytest.approx(0.3, rel=0.02)
    assert 0.35 < busy[1] < 0.55
    short = measured(work=(0.1,), train=(0.3,), in_turns=True)  # by then ranks are idle
    assert simulate(short, num_prompts=1, num_steps=200, max_staleness=1).step_s == pytest.approx(0.3, rel=0.05)


def changed(step, /, **more):
    return dataclasses.replace(step, batch=dataclasses.replace(step.batch, **more))


def test_what_a_token_takes_alone_and_beside_others_is_read_off_groups_of_different_lengths():
    """10 tokens beside another row take 10 * (0.1 + 2 * 0.05) s, 20 more alone 20 * (0.1 + 0.05) s."""

    def speed(*groups):
        batch = BatchTaken(step=1, prompts=[0, 1], asked_s=0.0, taken_s=9.0, loaded_s=0.0, busy_s=(1.0,))
        return Measured([MeasuredStep(batch, groups)]).speed

    found = speed(group(0, 0.0, 2.0), group(1, 0.0, 5.0, 30))
    assert (found.step_s, found.row_s) == pytest.approx((0.1, 0.05), rel=0.01)
    always_two = speed(group(0, 0.0, 2.0), group(1, 0.0, 2.0))
    assert (always_two.step_s, always_two.row_s) == pytest.approx((0.0, 0.1))


def test_times_are_read_off_what_a_run_wrote_down(tmp_path):
    """The longest part between starts: the clock of a run that goes on begins anew."""
    steps, began = [], RunBegan(first=0, config={}, software={}, machine="")
    for number in range(3):
        asked_s = 10.0 * number
        groups = [group(2 * number + place, asked_s, asked_s + 2.0 + place, 10 * (2 + place), num_rows=2,
                        scored_s=asked_s + 4.0) for place in range(2)]  # fmt: skip
        batch = BatchTaken(step=number + 1, prompts=[2 * number, 2 * number + 1], asked_s=asked_s,
                           taken_s=asked_s + 4.0, loaded_s=asked_s - 1.0, busy_s=[2.0])  # fmt: skip
        steps.append(MeasuredStep(batch, groups))
    found = Measured(steps)
    assert found.tokens == pytest.approx([20.0, 30.0] * 3, rel=0.1)
    assert [*found.rows] == [2.0] * 6
    assert found.busy == pytest.approx(2 / 3)  # it had groups for 3 s of each step
    killed = [event for step in steps[:2] for event in (*step.groups, step.batch)]
    whole = [event for step in steps for event in (*step.groups, step.batch)]
    with Journal(tmp_path / "journal.jsonl") as journal:
        journal.append(began, *killed, began, *whole, dataclasses.replace(began, first=3), *killed)
    read = read_steps(tmp_path / "journal.jsonl")
    assert [(one.batch.step, one.batch.asked_s, len(one.groups)) for one in read] == [(1, 0, 2), (2, 10, 2), (3, 20, 2)]


def step_of(number, *, begins, replaces_s=0.0, scores_s=0.0, trains_s=1.0):
    """A step of two groups that take a second each; the second one may replace another, and a model may score them."""
    ends = begins + replaces_s + 1.0
    groups = tuple(
        group(2 * number + place, begin, begin + 1.0, rank=place)
        for place, begin in enumerate((begins, begins + replaces_s))
    )
    batch = BatchTaken(step=number + 1, prompts=[2 * number, 2 * number + 1], asked_s=begins, taken_s=ends + scores_s,
                       loaded_s=begins - trains_s, busy_s=(1.0, 1.0))  # fmt: skip
    return MeasuredStep(batch, groups), ends + scores_s + trains_s


@pytest.mark.parametrize("more", [{}, {"scores_s": 2.5}, {"replaces_s": 3.0}, {"replaces_s": 1.5, "scores_s": 0.5}])
def test_a_run_in_turns_is_simulated_as_it_was_whatever_its_batches_wait_for(more):
    steps, begins = [], 1.0
    for number in range(12):
        step, begins = step_of(number, begins=begins, **more)
        steps.append(changed(step, loaded_s=step.batch.asked_s))
    found, measured_so = (
        simulate(Measured(steps), num_prompts=2, num_ranks=2, num_steps=12),
        measured_outcome(steps),
    )
    assert found.step_s == pytest.approx(measured_so.step_s, rel=0.01)
    assert found.step_s == pytest.approx(2.0 + sum(more.values()), rel=0.01)
    assert found.actor_idle == pytest.approx(measured_so.actor_idle, abs=0.01)


def test_the_first_steps_of_a_start_are_left_out():
    steps, begins = [], 1.0
    for number in range(40):
        step, begins = step_of(number, begins=begins, scores_s=30.0 if number < 3 else 0.0)
        steps.append(step)
    left = settled(steps)
    assert [step.batch.step for step in left] == list(range(6, 41))
    assert measured_outcome(left).step_s == pytest.approx(2.0)
    assert settled(steps[:3]) == steps[:3]
