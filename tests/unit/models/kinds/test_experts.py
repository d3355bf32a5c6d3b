"""Experts computed in blocks against a loop over tokens: values and gradients."""

import contextlib
import functools

import pytest
import torch
from accelerator_forms import accelerator_forms
from tiny_families import FAMILY_CONFIGS, SIZES
from torch import nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, GptOssConfig, Qwen3MoeConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts, GptOssTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts, Qwen3MoeTopKRouter

from rallypoint.models.kinds.expert_adapters import (
    MATRICES,
    LoRAExperts,
    add_update,
    merged_updates,
    remove_updates,
)
from rallypoint.models.kinds.experts import ExpertLoads, add_up_experts, by_own_code, replace_routers, same_shapes
from rallypoint.parallel import Collective


def make_experts(family, num_experts, width, size, dtype):
    if family == "gpt_oss":
        config = GptOssConfig(num_local_experts=num_experts, hidden_size=width, intermediate_size=size)
        experts = GptOssExperts(config).to(dtype)
    else:
        config = Qwen3MoeConfig(num_experts=num_experts, hidden_size=width, moe_intermediate_size=size)
        experts = Qwen3MoeExperts(config).to(dtype)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in experts.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator))
    return experts


def by_expert(experts, family, expert, state):
    """Return what one expert makes of one token."""
    if family != "gpt_oss":
        gate, up = (experts.gate_up_proj[expert] @ state).chunk(2)
        return experts.down_proj[expert] @ (functional.silu(gate) * up)
    both = state @ experts.gate_up_proj[expert] + experts.gate_up_proj_bias[expert]
    gate, up = both[::2].clamp(max=7.0), both[1::2].clamp(-7.0, 7.0)
    gated = (up + 1) * gate / (1 + (-1.702 * gate).exp())
    return gated @ experts.down_proj[expert] + experts.down_proj_bias[expert]


def token_by_token(experts, family, states, chosen, shares):
    rows = []
    for state, of_token, weights in zip(states, chosen.tolist(), shares, strict=True):
        total = 0.0 * state
        for expert, weight in zip(of_token, weights, strict=True):
            if expert < 4:
                total = total + weight * by_expert(experts, family, expert, state)
        rows.append(total)
    return torch.stack(rows)


FAMILIES = pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])


@FAMILIES
@pytest.mark.parametrize(
    "chosen",
    [[[0, 1], [2, 3], [3, 0]], [[2, 4], [4, 2], [5, 7]], [[4, 5], [6, 7], [5, 4]], [[1, 3], [1, 3], [1, 3]]],
    ids=["all here", "some elsewhere", "none here", "two of four"],
)
def test_experts_give_what_a_loop_over_tokens_gives(family, chosen):
    experts, generator = make_experts(family, 4, 5, 3, torch.float64), torch.Generator().manual_seed(1)
    chosen = torch.tensor(chosen)
    found = []
    for function in (add_up_experts, by_own_code, functools.partial(token_by_token, family=family)):
        generator.manual_seed(1)
        states = (3 * torch.randn(3, 5, generator=generator, dtype=torch.float64)).requires_grad_()
        shares = torch.rand(3, 2, generator=generator, dtype=torch.float64).requires_grad_()
        experts.zero_grad()
        out = function(experts, states=states, chosen=chosen, shares=shares)
        out.square().sum().backward()
        leaves = (states, shares, *experts.parameters())
        found.append([out, *(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves)])
    for actual, own, expected in zip(*found, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-10)
        torch.testing.assert_close(own, expected, rtol=1e-12, atol=1e-10)


def adapt(experts, rank, generator):
    """Give experts updates with values."""
    for matrix in MATRICES:
        weight, is_transposed = experts.get_parameter(matrix), experts.is_transposed
        add_update(experts, matrix, LoRAExperts(weight, is_transposed=is_transposed, rank=rank, alpha=5.0, rslora=True))
    with torch.no_grad():
        for update in experts.lora.parameters():
            update.copy_(torch.randn(update.shape, generator=generator) * 0.1)


@FAMILIES
def test_updates_are_those_of_the_merged_weights_and_so_are_the_bits_of_a_token_alone(family):
    experts, generator = make_experts(family, 4, 16, 8, torch.float64), torch.Generator().manual_seed(1)
    adapt(experts, 3, generator)
    chosen = torch.tensor([[0, 1], [2, 3], [3, 0], [5, 1]])
    states = torch.randn(4, 16, generator=generator, dtype=torch.float64)
    shares = torch.rand(4, 2, generator=generator, dtype=torch.float64)
    found, own = (function(experts, states, chosen, shares) for function in (add_up_experts, by_own_code))
    with same_shapes(4):
        together, alone = (add_up_experts(experts, states[n], chosen[n], shares[n]) for n in (slice(None), slice(2, 3)))
    assert torch.equal(together[2:3], alone)
    with torch.no_grad():
        for matrix, weight in merged_updates(experts).items():
            experts.get_parameter(matrix).copy_(weight)
    remove_updates(experts)
    for actual in (found, own, together):
        torch.testing.assert_close(actual, add_up_experts(experts, states, chosen, shares), rtol=1e-12, atol=1e-11)


@FAMILIES
def test_a_module_that_no_token_is_sent_to_still_has_gradients(family):
    experts = make_experts(family, 4, 5, 3, torch.float64)
    states = torch.ones(2, 5, dtype=torch.float64, requires_grad=True)
    shares = torch.ones(2, 1, dtype=torch.float64, requires_grad=True)
    add_up_experts(experts, states, torch.full((2, 1), 4), shares).sum().backward()
    assert all(not leaf.grad.any() for leaf in (states, shares, *experts.parameters()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("norm_topk_prob", [False, True])
def test_a_router_gives_the_bits_of_transformers_own(dtype, norm_topk_prob):
    router, states = make_router(norm_topk_prob, dtype)
    found = []
    for _ in range(2):
        leaf = states.clone().requires_grad_()
        router.zero_grad()
        scores, shares, chosen = router(leaf)
        (shares * torch.linspace(-1, 1, shares.numel()).view_as(shares)).sum().backward()
        found.append((scores, shares, chosen, leaf.grad, router.weight.grad.clone()))
        replace_routers(nn.Sequential(router))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    assert isinstance(router, Qwen3MoeTopKRouter)
    assert type(router) is not Qwen3MoeTopKRouter


@pytest.mark.parametrize("norm_topk_prob", [False, True])
def test_a_router_of_a_float64_model_rounds_nothing_to_float32(norm_topk_prob):
    router, states = make_router(norm_topk_prob, torch.float64)
    replace_routers(nn.Sequential(router))
    scores, shares, chosen = router(states)
    expected = scores.softmax(-1).gather(-1, chosen)
    if norm_topk_prob:
        expected = expected / expected.sum(-1, keepdim=True)
    assert torch.equal(scores, states @ router.weight.T)
    torch.testing.assert_close(shares, expected, rtol=1e-15, atol=0)


def test_a_softmax_over_the_chosen_alone_is_one_over_all_whose_shares_are_made_to_add_up_to_1():
    router = GptOssTopKRouter(GptOssConfig(num_local_experts=6, num_experts_per_tok=3, hidden_size=8))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in router.double().parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator))
    states = torch.randn(20, 8, generator=generator, dtype=torch.float64)
    expected = router(states)
    replace_routers(nn.Sequential(router))
    found = router(states)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[2], expected[2])
    torch.testing.assert_close(found[1], expected[1], rtol=1e-14, atol=0)


BIASED = [("glm4_moe", 1, 1), ("glm4_moe", 4, 2), ("deepseek_v3", 4, 3)]


@pytest.mark.parametrize("norm_topk_prob", [False, True])
@pytest.mark.parametrize(("family", "num_groups", "num_best"), BIASED)
def test_a_router_with_a_bias_chooses_and_weighs_as_transformers_own(family, num_groups, num_best, norm_topk_prob):
    for dtype, tolerance in ((torch.float64, 1e-6), (torch.float32, 1e-6), (torch.bfloat16, 1e-2)):
        router, states = make_biased_router(family, dtype, num_groups, num_best, norm_topk_prob)
        found = []
        for _ in range(2):
            leaf = states.clone().requires_grad_()
            router.zero_grad()
            _, weights, chosen = router(leaf)
            dense = torch.zeros(len(states), 8, dtype=weights.dtype).scatter(1, chosen, weights)
            (dense * torch.linspace(-1, 1, dense.numel()).view_as(dense)).sum().backward()
            found.append((dense.to(dtype), leaf.grad, router.weight.grad.clone()))
            replace_routers(nn.Sequential(router))
        assert weights.dtype == dtype
        for ours, theirs in zip(*reversed(found), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def make_biased_router(family, dtype, num_groups, num_best, norm_topk_prob):
    config, generator = FAMILY_CONFIGS[family](**SIZES), torch.Generator().manual_seed(0)
    config.n_group, config.topk_group, config.norm_topk_prob = num_groups, num_best, norm_topk_prob
    router = AutoModelForCausalLM.from_config(config).model.layers[1].mlp.gate
    router.weight.data = torch.randn(8, 16, generator=generator).to(dtype)
    router.e_score_correction_bias.copy_(torch.randn(8, generator=generator))
    return router, torch.randn(50, 16, generator=generator).to(dtype)


def make_router(norm_topk_prob, dtype):
    config = Qwen3MoeConfig(num_experts=6, num_experts_per_tok=3, hidden_size=8, norm_topk_prob=norm_topk_prob)
    generator = torch.Generator().manual_seed(0)
    router = Qwen3MoeTopKRouter(config).to(dtype)
    with torch.no_grad():
        router.weight.copy_(torch.randn(6, 8, generator=generator))
    return router, torch.randn(20, 8, generator=generator).to(dtype)


@FAMILIES
@pytest.mark.parametrize("rank", [None, 3], ids=["plain", "adapted"])
@pytest.mark.parametrize("first", [0, 2, 8], ids=["all here", "some elsewhere", "none here"])
def test_grouped_products_give_values_and_gradients_of_products_one_by_one(family, first, rank):
    experts, generator = make_experts(family, 4, 16, 8, torch.float32), torch.Generator().manual_seed(1)
    if rank is not None:
        adapt(experts, rank, generator)
    chosen = torch.rand(30, 6, generator=generator).topk(3).indices + first
    states, shares = torch.randn(30, 16, generator=generator), torch.rand(30, 3, generator=generator)
    found = []
    for form in (contextlib.nullcontext, accelerator_forms):
        leaves = [states.clone().requires_grad_(), shares.clone().requires_grad_(), *experts.parameters()]
        experts.zero_grad()
        with form():
            out = add_up_experts(experts, leaves[0], chosen, leaves[1])
            out.square().sum().backward()
        found.append([out, *(leaf.grad for leaf in leaves)])
    for actual, expected in zip(*found, strict=True):
        if rank is None:
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-4)
        else:  # one form rounds the sum of both products once, the other twice
            assert (actual - expected).abs().max() <= 1e-6 * expected.abs().max().clamp(min=1e-9)


def test_loads_are_those_of_the_ranks_together_relative_to_an_equal_share():
    model = nn.ModuleList([Qwen3MoeTopKRouter(Qwen3MoeConfig(num_experts=4, num_experts_per_tok=1, hidden_size=4))] * 1)
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(4))
    replace_routers(model)
    loads = ExpertLoads(model)
    with loads.counted():
        model[0](torch.eye(4)[[0, 0, 0, 1, 1, 2, 0, 2]])  # 4, 2, 2 and 0 tokens
    model[0](torch.eye(4))  # not counted
    assert loads.extremes(Collective()) == (0.0, 2.0)
    with loads.counted():
        model[0](torch.eye(4))
    assert loads.extremes(Collective()) == (1.0, 1.0)
    dense = ExpertLoads(nn.Linear(2, 2))
    with dense.counted():
        pass
    assert dense.extremes(Collective()) is None


def test_with_products_of_one_shape_a_token_has_the_same_bits_whatever_is_sent_beside_it():
    experts, generator = make_experts("qwen3_moe", 4, 256, 96, torch.float32), torch.Generator().manual_seed(1)
    states, shares = torch.randn(32, 256, generator=generator), torch.rand(32, 2, generator=generator)
    found = []
    for seed in range(5):  # the first token's experts stay, those of others change
        others = torch.rand(31, 4, generator=torch.Generator().manual_seed(seed)).topk(2).indices
        chosen = torch.cat([torch.tensor([[2, 1]]), others])
        with same_shapes(32), torch.no_grad():
            found.append(add_up_experts(experts, states, chosen, shares)[0])
    assert all(torch.equal(found[0], other) for other in found)
