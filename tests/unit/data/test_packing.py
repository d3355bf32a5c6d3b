import pickle

import pytest
from hypothesis import given, strategies as st

from rallypoint.data.packing import balance_groups, pack_groups, pack_rows, pad_rows, row_costs
from rallypoint.errors import RowTooLongError

# Caps of one to four rows: where they nearly fit is where a cap is exceeded.
lengths_and_cap = st.lists(st.integers(0, 12), max_size=30).flatmap(
    lambda lengths: st.tuples(st.just(lengths), st.integers(max([1, *lengths]), 40))
)
attention_costs = st.sampled_from([0.0, 0.01, 1.0])


def num_first_fit(lengths, cap) -> int:
    rooms: list[int] = []
    for length in lengths:
        fitting = [part for part, room in enumerate(rooms) if length <= room]
        if not fitting:
            rooms.append(cap)
        rooms[fitting[0] if fitting else -1] -= length
    return len(rooms)


@given(lengths_and_cap, attention_costs)
def test_every_row_occurs_once_and_no_micro_batch_exceeds_the_cap(case, attention_cost):
    lengths, cap = case
    parts = pack_rows(lengths, cap, row_costs(lengths, attention_cost))
    assert sorted(row for part in parts for row in part) == list(range(len(lengths)))
    assert all(part == sorted(part) and part for part in parts)
    assert all(sum(lengths[row] for row in part) <= cap for part in parts)


@given(lengths_and_cap, attention_costs)
def test_there_are_never_more_micro_batches_than_first_fit_makes(case, attention_cost):
    lengths, cap = case
    num_parts = len(pack_rows(lengths, cap, row_costs(lengths, attention_cost)))
    assert num_parts <= num_first_fit(lengths, cap)
    assert num_parts <= num_first_fit(sorted(lengths, reverse=True), cap)


@given(lengths_and_cap)
def test_where_tokens_leave_room_micro_batches_differ_by_one_row_at_most(case):
    lengths, cap = case
    roomy = cap + max([0, *lengths])
    loads = [sum(lengths[row] for row in part) for part in pack_rows(lengths, roomy)]
    if loads and max(loads) + max(lengths) <= roomy:
        assert max(loads) - min(loads) <= max(lengths)


@given(lengths_and_cap)
def test_the_same_lengths_are_packed_the_same_way(case):
    assert pack_rows(*case) == pack_rows(*case)


def test_rows_that_would_exceed_the_cap_by_one_get_a_micro_batch_more():
    assert pack_rows([6, 6, 5, 3], 10) == [[0], [1], [2, 3]]


def test_first_fit_is_taken_where_even_micro_batches_would_be_more():
    # Evenly, 5 and 4 share with 3 each, and the last 3 finds no room: 8 + 8 tokens fit into two of 9 in one way only.
    assert pack_rows([5, 4, 3, 3, 3], 9) == [[0, 1], [2, 3, 4]]


def test_micro_batches_are_balanced_by_cost_and_not_by_tokens_where_costs_are_given():
    lengths = [100, 50, 50, 50]
    assert pack_rows(lengths, 150) == [[0, 3], [1, 2]]
    assert pack_rows(lengths, 150, row_costs(lengths, 0.02)) == [[0], [1, 2, 3]]


def test_a_cap_of_the_longest_row_is_enough():
    assert pack_rows([7, 7, 7], 7) == [[0], [1], [2]]


def test_no_rows_give_no_micro_batch():
    assert pack_rows([], 8) == []


def test_rows_without_tokens_are_kept():
    assert sorted(row for part in pack_rows([0, 0, 0], 8) for row in part) == [0, 1, 2]


def test_a_row_longer_than_the_cap_is_named_with_its_length_and_what_to_change():
    message = r"row 2 has 9 tokens, .* may hold 8: raise max_tokens_per_micro_batch"
    with pytest.raises(RowTooLongError, match=message) as raised:
        pack_rows([1, 8, 9, 3], 8)
    again = pickle.loads(pickle.dumps(raised.value))
    assert (again.row, again.num_tokens, again.max_tokens) == (2, 9, 8)


def test_thousands_of_rows_are_packed_at_once():
    parts = pack_rows([1 + (row * 7919) % 997 for row in range(5000)], 4096)
    assert len(parts) < 640


@given(lengths_and_cap)
def test_padding_counts_towards_the_cap(lengths_and_cap):
    lengths, cap = lengths_and_cap
    parts = pad_rows(lengths, cap)
    assert sorted(row for part in parts for row in part) == list(range(len(lengths)))
    assert all(len(part) * max(lengths[row] for row in part) <= cap for part in parts)
    assert all(part == sorted(part) for part in parts)


def test_a_row_that_alone_exceeds_the_cap_is_named_when_padded_too():
    with pytest.raises(RowTooLongError) as caught:
        pad_rows([3, 11, 12], 10)
    assert caught.value.args[0] == 2


def test_groups_that_must_be_whole_are_and_one_that_does_not_fit_is_named():
    lengths, groups = [3, 1, 4, 1, 5, 2], [7, 7, 3, 3, 9, 9]
    for cap in (7, 8, 11, 16):
        parts = pack_groups(lengths, groups, cap, whole=True)
        assert sorted(row for part in parts for row in part) == list(range(6))
        assert all(sum(lengths[row] for row in part) <= cap for part in parts)
        assert all(
            len({place for place, part in enumerate(parts) if row in part or row + 1 in part}) == 1 for row in (0, 2, 4)
        )
    with pytest.raises(RowTooLongError, match="7"):
        pack_groups(lengths, groups, 6, whole=True)


def test_ranks_get_whole_groups_even_where_single_rows_would_balance_better():
    costs, groups = [9, 9, 1, 1], [0, 0, 1, 1]
    assert balance_groups(costs, groups, [0] * 4, 2) == [[0, 2], [1, 3]]
    assert balance_groups(costs, groups, [0] * 4, 2, whole=True) == [[0, 1], [2, 3]]
    assert balance_groups(costs, groups, [0] * 4, 3, whole=True) == [[0, 1], [2, 3], []]
