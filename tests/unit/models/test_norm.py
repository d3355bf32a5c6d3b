"""RMSNorm against its formula in float64, and in the place of transformers' own."""

import pytest
import torch
from hypothesis import given, strategies as st
from transformers import AutoModelForCausalLM
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm

from rallypoint.models.norm import RMSNorm, replace_norms

TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}


def plainly(states, weight, eps, offset):
    return states / (states.square().mean(-1, keepdim=True) + eps).sqrt() * (offset + weight)


@given(
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    width=st.integers(1, 40),
    dtype=st.sampled_from(list(TOLERANCES)),
    scale=st.sampled_from([1e-3, 1.0, 30.0]),
    offset=st.sampled_from([0.0, 1.0]),
    seed=st.integers(0, 1000),
)
def test_values_and_gradients_equal_the_formula(shape, width, dtype, scale, offset, seed):
    generator = torch.Generator().manual_seed(seed)
    states = (scale * torch.randn(*shape, width, generator=generator)).to(dtype)
    weight = (1 - offset + 0.1 * torch.randn(width, generator=generator)).to(dtype)
    grad = torch.randn(*shape, width, generator=generator).to(dtype)
    outcomes = []
    for function, to in ((None, dtype), (plainly, torch.float64)):
        leaves = [part.detach().to(to, copy=True).requires_grad_() for part in (states, weight)]
        norm = RMSNorm(torch.nn.Parameter(leaves[1]), 1e-6, offset)
        out = norm(leaves[0]) if function is None else function(*leaves, 1e-6, offset)
        out.backward(grad.to(to))
        outcomes.append([out.detach(), leaves[0].grad, norm.weight.grad if function is None else leaves[1].grad])
    for ours, expected in zip(*outcomes, strict=True):
        assert ours.dtype == dtype
        error = (ours.double() - expected).abs().max()
        assert error <= TOLERANCES[dtype] * max(float(expected.abs().max()), 1.0, 1 / scale)


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_gradients_pass_torch_s_own_finite_differences(offset):
    states = torch.randn(2, 3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    norm = RMSNorm(torch.nn.Parameter(torch.rand(5, dtype=torch.float64)), 1e-3, offset)
    assert torch.autograd.gradcheck(lambda states, weight: norm(states), (states, norm.weight))


@pytest.mark.parametrize("norm", [GemmaRMSNorm, Gemma2RMSNorm, Gemma3RMSNorm])
def test_a_norm_of_gemma_gives_the_bits_of_transformers_own_in_bfloat16_and_in_float32_all_but_the_last_two(norm):
    generator = torch.Generator().manual_seed(0)
    for dtype, tolerance in ((torch.bfloat16, 0.0), (torch.float32, 4 * torch.finfo(torch.float32).eps)):
        theirs = norm(64, eps=1e-6).to(dtype)
        with torch.no_grad():
            theirs.weight += 0.1 * torch.randn(64, generator=generator).to(dtype)
        states = torch.randn(50, 64, generator=generator).to(dtype)
        parent = torch.nn.Sequential(theirs)
        replace_norms(parent)
        assert isinstance(parent[0], RMSNorm)
        torch.testing.assert_close(parent(states), theirs(states), rtol=tolerance, atol=0)


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_a_model_says_the_same_and_keeps_the_names_of_its_weights(make_folder, architecture):
    model = AutoModelForCausalLM.from_pretrained(make_folder(architecture), dtype=torch.float32).eval()
    tokens = torch.arange(9).unsqueeze(0)
    names = list(model.state_dict())
    with torch.no_grad():
        before = model(tokens).logits
        replace_norms(model)
        after = model(tokens).logits
    assert list(model.state_dict()) == names
    assert sum(isinstance(module, RMSNorm) for module in model.modules()) == sum("norm" in name for name in names)
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-5)
