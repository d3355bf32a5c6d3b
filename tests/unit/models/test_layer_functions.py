"""The chains of a decoder layer against their formulas in float64."""

import pytest
import torch
from hypothesis import given, strategies as st
from torch.nn import functional

from rallypoint.models.kinds.attention import rotate
from rallypoint.models.kinds.mlp import swiglu
from rallypoint.models.norm import in_strips

TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}
DTYPES = st.sampled_from(list(TOLERANCES))


def plain_swiglu(gate, up):
    return gate * torch.sigmoid(gate) * up


def plain_rotation(states, cos, sin):
    first, second = states.chunk(2, -1)
    turned = torch.cat([-second, first], -1)
    return states * cos.unsqueeze(1) + turned * sin.unsqueeze(1)


def assert_same_values_and_gradients(ours, plain, inputs, constants, dtype, generator):
    grad = torch.randn(inputs[0].shape, generator=generator).to(dtype)
    outcomes = []
    for function, to in ((ours, dtype), (plain, torch.float64)):
        leaves = [part.to(to, copy=True).requires_grad_() for part in inputs]
        out = function(*leaves, *(part.to(to) for part in constants))
        outcomes.append([out.detach(), *torch.autograd.grad(out, leaves, grad.to(to))])
    for found, expected in zip(*outcomes, strict=True):
        assert found.dtype == dtype
        assert (found.double() - expected).abs().max() <= TOLERANCES[dtype] * max(1.0, float(expected.abs().max()))


@given(
    shape=st.lists(st.integers(1, 6), min_size=2, max_size=3), dtype=DTYPES, scale=st.sampled_from([0.1, 1.0, 20.0]),
    seed=st.integers(0, 1000),
)  # fmt: skip
def test_a_gate_and_its_gradients_equal_the_formula(shape, dtype, scale, seed):
    generator = torch.Generator().manual_seed(seed)
    inputs = [(scale * torch.randn(shape, generator=generator)).to(dtype) for _ in range(2)]
    assert_same_values_and_gradients(swiglu, plain_swiglu, inputs, (), dtype, generator)


@given(
    tokens=st.integers(1, 7), heads=st.integers(1, 4), half=st.integers(1, 9), dtype=DTYPES, seed=st.integers(0, 1000)
)
def test_a_rotation_and_its_gradients_equal_the_formula(tokens, heads, half, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn(tokens, heads, 2 * half, generator=generator).to(dtype)
    angles = torch.randn(tokens, half, generator=generator).repeat(1, 2)
    constants = [angles.cos().to(dtype), angles.sin().to(dtype)]
    assert_same_values_and_gradients(rotate, plain_rotation, [states], constants, dtype, generator)


def test_what_is_longer_than_a_strip_is_computed_to_its_end():
    generator = torch.Generator().manual_seed(0)
    gate, up = (torch.randn(700, 1000, generator=generator, dtype=torch.float64) for _ in range(2))
    assert len(list(in_strips(gate, up))) > 2
    assert_same_values_and_gradients(swiglu, plain_swiglu, [gate, up], (), torch.float64, generator)
    assert torch.equal(torch.cat([part for part, _ in in_strips(gate, up)]), gate)


def test_a_second_backward_pass_through_a_gate_is_refused_rather_than_wrong():
    gate, up = (torch.randn(3, 4, requires_grad=True) for _ in range(2))
    out = swiglu(gate, up).sum()
    out.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="inplace"):
        out.backward()


def test_strips_of_nothing_are_none():
    assert list(in_strips(torch.zeros(0, 3))) == []
    assert swiglu(torch.zeros(0, 3), torch.zeros(0, 3)).shape == functional.silu(torch.zeros(0, 3)).shape
