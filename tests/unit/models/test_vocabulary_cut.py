"""A head cut by the vocabulary against a plain log-softmax over all of it: values and gradients, on every rank."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from torch import nn
from torch.nn import functional

from rallypoint.models.head import head_outputs, likeliest
from rallypoint.models.tensor_parallel import (
    VocabParallelLinear,
    vocab_parallel_likeliest,
    vocab_parallel_outputs,
    vocabulary_of_rank,
)


def plainly(states, weight, bias, targets, temperature, softcap=None):
    logits = functional.linear(states, weight, bias)
    logits = logits if softcap is None else softcap * (logits / softcap).tanh()
    everything = (logits / temperature).log_softmax(-1)
    return everything.gather(1, targets.unsqueeze(1)).squeeze(1), -(everything.exp() * everything).sum(-1)


def head_of(mesh, weight, bias):
    tokens = vocabulary_of_rank(mesh.tp.rank, mesh.tp.size, len(weight))
    own = slice(tokens.start, tokens.stop)
    part = nn.Linear(weight.shape[1], len(tokens), bias=bias is not None, dtype=weight.dtype)
    with torch.no_grad():
        part.weight.copy_(weight[own])
        if bias is not None:
            part.bias.copy_(bias[own])
    return VocabParallelLinear(part, len(weight), mesh.tp)


def draw(num_tokens, vocabulary, dtype, *, bias=True, seed=0):
    generator = torch.Generator().manual_seed(seed)
    states, weight, offset = (
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        for shape in ((num_tokens, 6), (vocabulary, 6), (vocabulary,))
    )
    return states, weight, offset if bias else None, torch.randint(vocabulary, (num_tokens,), generator=generator)


def weighted_sum(outputs, used):
    """Return a sum in which every number has a weight of its own."""
    return sum(
        (output * torch.linspace(-1, 2, len(output), dtype=output.dtype)).sum()
        for name, output in zip(("logprobs", "entropy"), outputs, strict=True)
        if name in used
    )


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    num_ranks=st.integers(2, 4),
    num_tokens=st.integers(0, 20),
    vocabulary=st.integers(4, 30),
    rows_per_chunk=st.integers(1, 25),
    dtype=st.sampled_from([torch.float64, torch.float32]),
    bias=st.booleans(),
    temperature=st.sampled_from([1.0, 0.5, 3.0]),
    softcap=st.sampled_from([None, 2.0]),
    used=st.sets(st.sampled_from(["logprobs", "entropy"]), min_size=1),
    seed=st.integers(0, 1000),
)
def test_every_rank_has_the_values_of_the_whole_vocabulary_and_the_gradients_of_its_part(
    on_mesh, num_ranks, num_tokens, vocabulary, rows_per_chunk, dtype, bias, temperature, softcap, used, seed
):
    states, weight, offset, targets = draw(num_tokens, vocabulary, dtype, bias=bias, seed=seed)

    def on_rank(mesh):
        own, head = states.clone().requires_grad_(), head_of(mesh, weight, offset)
        outputs = vocab_parallel_outputs(
            own,
            head,
            targets,
            temperature,
            softcap=softcap,
            chunk_bytes=rows_per_chunk * len(head.weight) * dtype.itemsize,
        )
        weighted_sum(outputs, used).backward()
        return [*outputs, own.grad], [head.weight.grad, *([head.bias.grad] if bias else [])]

    leaves = [tensor.clone().requires_grad_() for tensor in (states, weight, *([offset] if bias else []))]
    outputs = plainly(leaves[0], leaves[1], leaves[2] if bias else None, targets, temperature, softcap)
    weighted_sum(outputs, used).backward()
    found = on_mesh(on_rank, tp=num_ranks)
    tolerance = {"rtol": 1e-10, "atol": 1e-11} if dtype == torch.float64 else {"rtol": 1e-5, "atol": 1e-5}
    for alike, _ in found:
        for actual, expected in zip(alike, [*outputs, leaves[0].grad], strict=True):
            torch.testing.assert_close(actual, expected, **tolerance)
    for parts, leaf in zip(zip(*(parts for _, parts in found), strict=True), leaves[1:], strict=True):
        torch.testing.assert_close(torch.cat(parts), leaf.grad, **tolerance)


def test_every_rank_has_the_same_bits(on_mesh):
    states, weight, bias, targets = draw(50, 23, torch.float32)

    def on_rank(mesh):
        own = states.clone().requires_grad_()
        outputs = vocab_parallel_outputs(own, head_of(mesh, weight, bias), targets, 0.7)
        sum(outputs).sum().backward()
        return *outputs, own.grad

    first, *others = on_mesh(on_rank, tp=3)
    assert all(torch.equal(mine, theirs) for other in others for mine, theirs in zip(first, other, strict=True))


def test_a_rank_whose_tokens_have_no_share_at_all_leaves_the_others_right(on_mesh):
    states, targets = torch.eye(4, dtype=torch.float32), torch.tensor([0, 1, 2, 3])
    weight = torch.tensor([[3e4, 0, 0, 0], [0, 1, 0, 0], [0, 0, -3e4, 0], [0, 0, 0, 100.0]])

    def on_rank(mesh):
        return vocab_parallel_outputs(states, head_of(mesh, weight, None), targets, 1.0)

    for actual in on_mesh(on_rank, tp=2):
        for mine, expected in zip(actual, plainly(states.double(), weight.double(), None, targets, 1.0), strict=True):
            torch.testing.assert_close(mine.double(), expected, rtol=1e-5, atol=1e-5)


def test_nan_in_one_state_stays_with_its_token(on_mesh):
    states, weight, bias, targets = draw(6, 9, torch.float32)
    states[2] = float("nan")
    found = on_mesh(lambda mesh: vocab_parallel_outputs(states, head_of(mesh, weight, bias), targets, 1.0), tp=2)
    for outputs in found:
        for values in outputs:
            assert values.isnan().tolist() == [False, False, True, False, False, False]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 7])
def test_ranks_share_the_vocabulary_without_gap_or_overlap_and_almost_evenly(num_ranks):
    parts = [vocabulary_of_rank(rank, num_ranks, 151_936) for rank in range(num_ranks)]
    assert [token for part in parts for token in (part.start, part.stop)][1:-1:2] == [part.start for part in parts[1:]]
    assert (parts[0].start, parts[-1].stop) == (0, 151_936)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_several_tokens_of_each_state_have_the_logprobs_and_gradients_of_the_whole_vocabulary(on_mesh):
    states, weight, bias, _ = draw(9, 11, torch.float64)
    targets = torch.tensor([[row % 11, (row * 3) % 11, (row * 3) % 11] for row in range(9)])  # one of them twice
    weights = torch.linspace(-1, 2, 27, dtype=torch.float64).reshape(9, 3)
    leaves = [tensor.clone().requires_grad_() for tensor in (states, weight, bias)]
    everything = (functional.linear(*leaves) / 0.7).log_softmax(-1).gather(1, targets)
    (everything * weights).sum().backward()

    def on_rank(mesh):
        own, head = states.clone().requires_grad_(), head_of(mesh, weight, bias)
        outputs = vocab_parallel_outputs(own, head, targets, 0.7, chunk_bytes=2 * len(head.weight) * 8)
        (outputs[0] * weights).sum().backward()
        return outputs[0], own.grad, head.weight.grad

    found = on_mesh(on_rank, tp=2)
    for logprobs, gradient, _ in found:
        torch.testing.assert_close(logprobs, everything, rtol=1e-10, atol=1e-11)
        torch.testing.assert_close(gradient, leaves[0].grad, rtol=1e-10, atol=1e-11)
    torch.testing.assert_close(torch.cat([part for *_, part in found]), leaves[1].grad, rtol=1e-10, atol=1e-11)
    own = [tensor.clone().requires_grad_() for tensor in (states, weight, bias)]
    logprobs, *_ = head_outputs(*own, targets, 0.7, chunk_bytes=3 * 11 * 8)
    (logprobs * weights).sum().backward()
    for mine, expected in zip(own, leaves, strict=True):
        torch.testing.assert_close(mine.grad, expected.grad, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("num", [1, 4, 14])
def test_the_likeliest_tokens_are_those_of_the_whole_vocabulary(on_mesh, num):
    states, weight, bias, targets = draw(9, 11, torch.float64)
    logits = functional.linear(states, weight, bias)
    scaled = 5.0 * (logits / 5.0).tanh() / 0.7
    wanted = scaled.topk(min(num, 11), dim=-1)
    parts = on_mesh(
        lambda mesh: vocab_parallel_likeliest(states, head_of(mesh, weight, bias), targets, 0.7, num, softcap=5.0), tp=3
    )
    for own, most, ids, normaliser in [*parts, likeliest(states, weight, bias, targets, 0.7, num, softcap=5.0)]:
        torch.testing.assert_close(own, scaled.gather(1, targets.unsqueeze(1)).squeeze(1))
        torch.testing.assert_close(normaliser, scaled.logsumexp(-1))
        torch.testing.assert_close(most[:, :11], wanted.values)
        assert torch.equal(ids[:, :11], wanted.indices)
        assert most[:, 11:].eq(-torch.inf).all(), "the vocabulary has no more"
