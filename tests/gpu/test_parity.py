"""Steps on an accelerator, in bfloat16, are those on a CPU in float64, up to what bfloat16 can say.

That the bounds tell right from wrong is shown on a CPU, by tests/unit/engine/test_rounded_steps.py.
"""

import functools

import pytest
import torch
from parity_rank import CAPS
from rounded_steps import beyond_bounds, make_rounded_model, take_steps

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")]


@pytest.fixture(scope="module", params=["actor", "critic"])
def take(request, tmp_path_factory):
    """A function that takes the steps of a role."""
    return functools.partial(take_steps, make_rounded_model(tmp_path_factory.mktemp("model")), request.param)


@pytest.fixture(scope="module")
def expected(take):
    return take("float64")


@pytest.mark.parametrize("padded", [False, True], ids=["packed", "padded"])
@pytest.mark.parametrize("cap", CAPS.values(), ids=CAPS)
def test_steps_in_bfloat16_are_those_of_the_cpu_in_float64(take, expected, cap, padded):
    device = torch.accelerator.current_accelerator(check_available=True)
    assert beyond_bounds(take("bfloat16", device=device, cap=cap, padded=padded), expected) == {}
