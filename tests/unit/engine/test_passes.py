"""Micro-batches in lanes: every row once, the cap over all lanes together, and even loads."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.engine.passes import check_tokens, plan_lanes
from rallypoint.errors import ModelError, RowTooLongError


def sizes(batch, lanes):
    """Tokens of each micro-batch of each lane."""
    return [[int(batch.lengths[rows].sum()) for rows in lane] for lane in lanes]


@given(st.lists(st.integers(0, 30), max_size=20), st.integers(30, 200), st.integers(1, 6), st.integers(0, 99))
def test_every_row_is_in_one_lane_and_all_lanes_together_keep_under_the_cap(make_batch, lengths, cap, most, seed):
    batch = make_batch(lengths, seed=seed)
    lanes = plan_lanes(batch, cap, most=most)
    assert 1 <= len(lanes) <= most
    assert sorted(row for lane in lanes for rows in lane for row in rows) == list(range(len(lengths)))
    assert sum(max(lane, default=0) for lane in sizes(batch, lanes)) <= cap
    assert lanes == plan_lanes(batch, cap, most=most)


def test_lanes_have_the_same_to_do(make_batch):
    batch = make_batch([20] * 32)
    for most in (2, 3, 4):
        lanes = plan_lanes(batch, 400, most=most)
        assert len(lanes) == most
        loads = [sum(lane) for lane in sizes(batch, lanes)]
        assert max(loads) <= 1.2 * 640 / most


def test_rows_of_a_group_stay_in_one_lane(make_batch):
    batch = make_batch([20] * 32)
    for lane in plan_lanes(batch, 400, most=2):
        assert all(len(set(batch.prompt_index[rows].tolist())) * 2 == len(rows) for rows in lane)


def test_a_batch_has_no_more_lanes_than_its_longest_row_leaves_room_for(make_batch):
    batch = make_batch([20] * 31 + [30])
    assert [len(plan_lanes(batch, cap, most=8)) for cap in (30, 59, 60, 119, 120)] == [1, 1, 2, 3, 4]


def test_a_batch_that_cannot_be_dealt_out_evenly_has_one_lane(make_batch):
    assert len(plan_lanes(make_batch([30, 2, 2]), 1000, most=2)) == 1
    # Two rows with a long prompt in common, which two lanes would have to compute both.
    batch = make_batch([30, 30])
    batch.loss_mask[:] = False
    batch.loss_mask[28:30] = batch.loss_mask[58:60] = True
    assert len(plan_lanes(batch, 1000, most=2)) == 1


def test_a_row_over_the_cap_is_named_whatever_the_number_of_lanes(make_batch):
    for most in (1, 2):
        with pytest.raises(RowTooLongError, match="row 1 has 30 tokens"):
            plan_lanes(make_batch([20, 30]), 29, most=most)


def test_a_token_that_the_model_does_not_know_is_named_with_its_row(make_batch):
    batch = make_batch([3, 4])
    num_ids = int(batch.tokens.max()) + 1
    check_tokens(batch, num_ids)
    batch.tokens[5] = num_ids
    place = rf"sample {int(batch.sample_index[1])} of prompt {int(batch.prompt_index[1])} has the token {num_ids}, but"
    with pytest.raises(ModelError, match=place):
        check_tokens(batch, num_ids)
