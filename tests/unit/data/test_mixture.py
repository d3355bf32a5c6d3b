"""Shares of data sets in a mixture."""

from collections import Counter

import pytest
from hypothesis import given, strategies as st

from rallypoint.data.stream import Mixture

WEIGHTS = st.lists(st.floats(0.01, 100), min_size=1, max_size=5)


@given(WEIGHTS, st.integers(0, 3000))
def test_every_set_has_its_share_at_any_moment(weights, num_admissions):
    mixture = Mixture(list(range(len(weights))), weights, seed=0)
    taken = Counter(mixture.example_index(admission) for admission in range(num_admissions))
    for part, weight in enumerate(weights):
        assert abs(taken[part] - num_admissions * weight / sum(weights)) < len(weights)


def test_each_set_has_epochs_of_its_own_and_a_mixture_goes_on_from_a_number():
    mixture = Mixture([0, 1, 0, 1, 1], [1.0, 3.0], seed=3)
    admitted = [mixture.example_index(admission) for admission in range(400)]
    small = [one for one in admitted if one in (0, 2)]
    large = [one for one in admitted if one in (1, 3, 4)]
    assert (len(small), len(large)) == (100, 300)
    assert all(set(small[at : at + 2]) == {0, 2} for at in range(0, 100, 2))
    assert all(set(large[at : at + 3]) == {1, 3, 4} for at in range(0, 300, 3))
    again = Mixture([0, 1, 0, 1, 1], [1.0, 3.0], seed=3)
    assert [again.example_index(admission) for admission in range(217, 400)] == admitted[217:]


def test_large_numbers_do_not_drift():
    mixture = Mixture([0, 1, 2], [0.1, 0.2, 0.7], seed=0)
    start = 10**12
    taken = Counter(mixture.example_index(start + admission) for admission in range(1000))
    assert [taken[part] for part in range(3)] == pytest.approx([100, 200, 700], abs=2)


def test_a_set_without_examples_is_refused():
    with pytest.raises(ValueError, match="examples of all 2 data sets"):
        Mixture([0, 0], [1.0, 1.0], seed=0)
