"""Sinks of attention: scores of one more key for each head, which all queries see, and whose value is zero.

Owns: what they change of attention that is computed without them, and their gradient. Must not know: who computes it.

A sink s takes part of a softmax, and adds nothing to the output. With total = log(sum over keys of exp(score)) every
share of a key becomes smaller by one factor:

    exp(score) / (exp(total) + exp(s)) = softmax(scores) * sigmoid(total - s)

So it is for outputs; and whoever recomputes shares as exp(score - total), as flash attention does for its gradients,
gets them right from log(exp(total) + exp(s)). (gpt-oss, arXiv 2508.10925; the idea is that of 2309.17453.)

TorchScript reads `softmax_with_sinks`, so annotations must be types.
"""

import torch
from torch import Tensor


def softmax_with_sinks(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Return the shares of keys, [..., keys], next to a sink, [..., 1]; their softmax without one.

    Like a softmax, it has the same bits for the same scores, however many keys nobody sees (-inf) are after them.

    >>> softmax_with_sinks(torch.zeros(1, 2), torch.tensor([[2.0]]).log())
    tensor([[0.2500, 0.2500]])
    """
    if sinks is None:
        return scores.softmax(-1)
    wide = scores if scores.dtype == torch.float64 else scores.float()
    shares = wide.softmax(-1)
    total = wide.amax(-1, keepdim=True) - shares.amax(-1, keepdim=True).log()
    return shares.mul_((total - sinks).sigmoid_()).to(scores.dtype)


def with_sinks(out: Tensor, total: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Let sinks have their share of attention that was computed without them.

    Args:
        out: [T, H, D].
        total: [H, T] of each query, in float32 or wider.
        sinks: [H].

    Returns:
        both, with sinks.
    """
    sink = sinks.to(total.dtype).unsqueeze(1)
    left = (total - sink).sigmoid().transpose(0, 1).unsqueeze(2)
    return (out * left).to(out.dtype), torch.logaddexp(total, sink)


def gradient_of_sinks(grad: Tensor, out: Tensor, total: Tensor, sinks: Tensor) -> Tensor:
    """Return the gradient of sinks, [H], from the outputs of `with_sinks` and the gradient of the first.

    As of any score of a softmax, with a value of zero: share * (0 - grad . out).
    """
    shares = (sinks.to(total.dtype).unsqueeze(1) - total).exp()
    return -(shares * (grad.to(total.dtype) * out).sum(2).transpose(0, 1)).sum(1).to(sinks.dtype)
