"""What is added up on an accelerator is added up in the same order every time, and attention takes its fast way."""

import pytest
import torch

from rallypoint.models.prefix import pick
from rallypoint.models.products import Limits
from rallypoint.models.varlen import find_varlen, may_have_varlen

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_gradient_of_states_that_many_rows_share_has_the_same_bits_every_time(dtype):
    device = torch.accelerator.current_accelerator(check_available=True)
    states = torch.randn(64, 256, device=device, dtype=dtype, requires_grad=True)
    places = torch.randint(0, 8, (4096,))
    grad = torch.randn(4096, 256, device=device, dtype=dtype)
    first, *others = [torch.autograd.grad(pick(states, places, len(places)), states, grad)[0] for _ in range(20)]
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("has_sinks", [False, True], ids=["plain", "sinks"])
def test_flash_attention_passes_its_trial_where_there_is_any(has_sinks):
    device = torch.accelerator.current_accelerator(check_available=True)
    query = torch.zeros(1, 16, 64, device=device, dtype=torch.bfloat16)
    limits = Limits(sinks=torch.zeros(16, device=device) if has_sinks else None)
    assert (find_varlen(query, 2, limits) is not None) == may_have_varlen(device)
