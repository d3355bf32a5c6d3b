"""Sinks as one more key with a value of zero, in output and gradient, beside a softmax over all scores."""

import pytest
import torch

from rallypoint.models.sinks import gradient_of_sinks, softmax_with_sinks, with_sinks


def states(dtype=torch.float64):
    """Return scores of 5 queries of 3 heads, [H, T, keys], values, low and high sinks, and a gradient."""
    generator = torch.Generator().manual_seed(0)
    scores, values, grad = (torch.randn(3, 5, size, generator=generator) for size in (7, 7, 4))
    scores[:, 1, 2:] = -torch.inf
    return scores.to(dtype), values[..., :4].to(dtype), torch.tensor([-40.0, 0.5, 30.0]).to(dtype), grad.to(dtype)


def by_one_more_key(scores, values, sinks):
    both = torch.cat([scores, sinks.view(-1, 1, 1).expand(*scores.shape[:2], 1)], -1)
    return torch.einsum("htk,hkd->htd", both.softmax(-1)[..., :-1], values)


def keys_of(values):
    return torch.cat([values, values[:, :2]], 1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_shares_next_to_a_sink_are_those_of_one_more_key(dtype):
    scores, values, sinks, _ = states(dtype)
    found = softmax_with_sinks(scores, sinks.view(-1, 1, 1)) @ keys_of(values)
    torch.testing.assert_close(found, by_one_more_key(scores, keys_of(values), sinks), atol=1e-6, rtol=1e-6)
    assert torch.equal(softmax_with_sinks(scores, None), scores.softmax(-1))


def test_keys_that_nobody_sees_change_no_bit():
    scores, _, sinks, _ = states(torch.float32)
    longer = torch.cat([scores, torch.full((3, 5, 57), -torch.inf)], -1)
    found = softmax_with_sinks(longer[..., :32], sinks.view(-1, 1, 1)), softmax_with_sinks(longer, sinks.view(-1, 1, 1))
    assert torch.equal(found[0], found[1][..., :32])


def test_outputs_without_sinks_and_totals_give_outputs_and_gradients_with_them():
    """As flash attention has them: its shares for gradients are exp(score - total)."""
    scores, values, sinks, grad = states()
    leaves = [leaf.clone().requires_grad_() for leaf in (scores, keys_of(values), sinks)]
    expected = by_one_more_key(*leaves)
    of_scores, of_values, of_sinks = torch.autograd.grad(expected, leaves, grad)
    values, total = keys_of(values), scores.logsumexp(-1)
    plain = (scores.softmax(-1) @ values).transpose(0, 1)
    out, total = with_sinks(plain, total, sinks)
    torch.testing.assert_close(out.transpose(0, 1), expected)
    grad = grad.transpose(0, 1)
    torch.testing.assert_close(gradient_of_sinks(grad, out, total, sinks), of_sinks)
    shares, grad = (scores - total.unsqueeze(2)).exp(), grad.transpose(0, 1)
    mean = (grad * out.transpose(0, 1)).sum(2, keepdim=True)
    torch.testing.assert_close(shares * (grad @ values.transpose(1, 2) - mean), of_scores)
    torch.testing.assert_close(shares.transpose(1, 2) @ grad, of_values)
