"""Steps in bfloat16 are those in float64, up to rounding; and what compares them finds losses that are wrong.

tests/gpu/test_parity.py makes the same comparison on an accelerator.
"""

import functools

import pytest
from parity_rank import CAPS
from rounded_steps import beyond_bounds, drop_row, make_rounded_model, take_steps


@pytest.fixture(scope="module", params=["actor", "critic"])
def take(request, tmp_path_factory):
    """A function that takes the steps of a role."""
    return functools.partial(take_steps, make_rounded_model(tmp_path_factory.mktemp("model")), request.param)


@pytest.fixture(scope="module")
def expected(take):
    return take("float64")


@pytest.mark.parametrize("padded", [False, True], ids=["packed", "padded"])
@pytest.mark.parametrize("cap", CAPS.values(), ids=CAPS)
def test_steps_in_bfloat16_are_those_in_float64_up_to_rounding(take, expected, cap, padded):
    assert beyond_bounds(take("bfloat16", cap=cap, padded=padded), expected) == {}


def test_steps_up_the_loss_are_found(take, expected):
    assert beyond_bounds(take("bfloat16", sign=-1.0), expected).keys() >= {"losses", "norms", "changes", "worst change"}


@pytest.mark.parametrize("row", [0, 3, 7, 10])
def test_a_row_that_says_nothing_is_found(take, expected, row):
    found = beyond_bounds(take("bfloat16", change=functools.partial(drop_row, row=row)), expected)
    assert found.keys() >= {"changes", "worst change"}


def test_steps_of_another_size_are_found(take, expected):
    # Clipped gradients and Adam hide the size of a loss from the weights; the norms show it.
    assert beyond_bounds(take("bfloat16", sign=1.05), expected).keys() >= {"first norm", "norms"}
    assert "first norm" in beyond_bounds(take("bfloat16", sign=1.02), expected)
