"""Norms on an accelerator, which has a kernel of its own for them, against those of a CPU."""

import pytest
import torch

from rallypoint.models.norm import RMSNorm

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")]

TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_values_and_gradients_are_those_of_a_cpu(dtype, offset):
    generator, outcomes = torch.Generator().manual_seed(0), []
    states = torch.randn(7, 64, generator=generator).to(dtype)
    weight = (1 - offset + 0.1 * torch.randn(64, generator=generator)).to(dtype)
    grad = torch.randn(7, 64, generator=generator).to(dtype)
    for device in (torch.device("cpu"), torch.accelerator.current_accelerator(check_available=True)):
        leaf = states.to(device, copy=True).requires_grad_()
        norm = RMSNorm(torch.nn.Parameter(weight.to(device, copy=True)), 1e-6, offset)
        out = norm(leaf)
        out.backward(grad.to(device))
        outcomes.append([part.cpu() for part in (out.detach(), leaf.grad, norm.weight.grad)])
    for expected, found in zip(*outcomes, strict=True):
        assert found.dtype == dtype
        assert (found - expected).abs().max() <= TOLERANCES[dtype] * max(1.0, float(expected.abs().max()))
