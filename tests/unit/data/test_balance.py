import itertools

import pytest
from hypothesis import given, strategies as st

from rallypoint.data.packing import balance, balance_groups, row_costs

costs_and_parts = st.tuples(st.lists(st.integers(0, 50), max_size=40), st.integers(1, 9))


@given(costs_and_parts)
def test_every_row_is_dealt_once_and_there_are_as_many_parts_as_asked_for(case):
    costs, num_parts = case
    parts = balance(costs, num_parts)
    assert len(parts) == num_parts
    assert sorted(row for part in parts for row in part) == list(range(len(costs)))
    assert all(part == sorted(part) for part in parts)


@given(costs_and_parts)
def test_parts_differ_by_one_row_at_most(case):
    costs, num_parts = case
    loads = [sum(costs[row] for row in part) for part in balance(costs, num_parts)]
    assert max(loads) - min(loads) <= max([0, *costs])


@given(st.lists(st.integers(0, 50), min_size=1, max_size=6), st.integers(1, 3))
def test_the_costliest_part_is_within_a_third_of_the_best_of_all_ways(costs, num_parts):
    def costliest(part_of_row: tuple[int, ...]) -> int:
        return max(
            sum(cost for cost, mine in zip(costs, part_of_row, strict=True) if mine == part)
            for part in range(num_parts)
        )

    best = min(costliest(way) for way in itertools.product(range(num_parts), repeat=len(costs)))
    found = max(sum(costs[row] for row in part) for part in balance(costs, num_parts))
    assert 3 * num_parts * found <= (4 * num_parts - 1) * best  # Graham 1969


@given(costs_and_parts)
def test_the_same_costs_are_dealt_the_same_way(case):
    assert balance(*case) == balance(*case)


def test_equal_rows_are_dealt_in_turn():
    assert balance([1, 1, 1, 1, 1], 2) == [[0, 2, 4], [1, 3]]


def test_more_parts_than_rows_leave_parts_empty():
    assert balance([3, 5], 4) == [[1], [0], [], []]


def test_a_long_row_costs_more_than_short_rows_of_the_same_tokens():
    costs = row_costs([100, 50, 50], attention_cost=0.01)
    assert costs == [200.0, 75.0, 75.0]
    assert balance(costs, 2) == [[0], [1, 2]]


@pytest.mark.parametrize("attention_cost", [0.0, 1e-4])
def test_a_thousand_rows_of_like_lengths_are_even_to_a_percent(attention_cost: float):
    costs = row_costs([1 + (row * 7919) % 997 for row in range(1024)], attention_cost)
    loads = [sum(costs[row] for row in part) for part in balance(costs, 64)]
    assert max(loads) <= 1.01 * sum(loads) / len(loads)


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 4), st.integers(0, 30)), min_size=1, max_size=24),
    st.integers(1, 5),
)
def test_groups_are_dealt_whole_only_where_the_costliest_part_gets_no_dearer(rows, num_parts):
    costs, groups = [cost for cost, _, _ in rows], [group for _, group, _ in rows]
    shared = [min(cost, saved) for cost, _, saved in rows]

    def dearest(parts: list[list[int]]) -> float:
        """Of every group in a part one row is paid in full: the first."""
        firsts = [{groups[row]: row for row in reversed(part)} for part in parts]
        return max(
            sum(costs[row] - (0 if first[groups[row]] == row else shared[row]) for row in part)
            for part, first in zip(parts, firsts, strict=True)
        )

    parts = balance_groups(costs, groups, shared, num_parts)
    assert sorted(row for part in parts for row in part) == list(range(len(rows)))
    assert len(parts) == num_parts
    assert dearest(parts) <= dearest(balance(costs, num_parts))
