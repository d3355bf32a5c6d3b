import pytest
from hypothesis import given, strategies as st

from rallypoint.data import PromptStream

SIZES = st.integers(1, 60)
SEEDS = st.integers(0, 2**63)


@given(SIZES, SEEDS, st.integers(0, 5), st.booleans())
def test_every_example_is_admitted_exactly_once_an_epoch(num_examples, seed, epoch, shuffle):
    stream = PromptStream(num_examples, seed, shuffle)
    start = epoch * num_examples
    admitted = [stream.example_index(admission) for admission in range(start, start + num_examples)]
    assert sorted(admitted) == list(range(num_examples))
    assert {stream.epoch(admission) for admission in range(start, start + num_examples)} == {epoch}


@given(SIZES, SEEDS, st.lists(st.integers(0, 500), max_size=30))
def test_the_example_depends_on_the_admission_alone_and_not_on_what_was_asked_before(num_examples, seed, admissions):
    stream = PromptStream(num_examples, seed)
    asked_in_any_order = {admission: stream.example_index(admission) for admission in admissions}
    for admission, index in asked_in_any_order.items():
        assert PromptStream(num_examples, seed).example_index(admission) == index


def test_epochs_and_seeds_have_orders_of_their_own():
    def order(seed: int, epoch: int) -> tuple[int, ...]:
        stream = PromptStream(50, seed)
        return tuple(stream.example_index(epoch * 50 + place) for place in range(50))

    assert len({order(seed, epoch) for seed in range(3) for epoch in range(3)}) == 9


def test_the_order_is_pinned_so_that_an_upgrade_cannot_change_a_run():
    stream = PromptStream(8, seed=7)
    assert [stream.example_index(admission) for admission in range(16)] == [
        6,
        3,
        4,
        0,
        2,
        7,
        5,
        1,
        1,
        3,
        2,
        7,
        4,
        5,
        0,
        6,
    ]


def test_without_shuffling_every_epoch_has_the_order_of_the_file():
    stream = PromptStream(3, seed=0, shuffle=False)
    assert [stream.example_index(admission) for admission in range(7)] == [0, 1, 2, 0, 1, 2, 0]


@pytest.mark.parametrize(("num_examples", "seed"), [(0, 0), (-1, 0), (3, -1)])
def test_impossible_streams_are_refused(num_examples, seed):
    with pytest.raises(ValueError, match="expected"):
        PromptStream(num_examples, seed)


def test_a_negative_admission_is_refused():
    with pytest.raises(ValueError, match="admission: expected 0 or more, found -1"):
        PromptStream(3, 0).example_index(-1)
