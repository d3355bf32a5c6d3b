"""What a language-model head says of tokens, from hidden states, without the logits of all tokens at once.

Owns: logprobs and entropies from states and the head's weight, forward and backward. Must not know: which tokens
they are, or which loss follows. Logits exist for one chunk of tokens at a time; what stays of them is their
normaliser, one number a token, and the backward pass makes them again.

Invariants: where the chunks end follows from the size of the vocabulary alone, so that the same call gives the same
bits, with or without gradients. Another chunk size gives the same numbers up to rounding and no better: the gradient
of the weight is a sum over tokens, and matrix products may round a row by how many others stand beside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn import functional

CHUNK_BYTES = 32 * 2**20
"""Of the logits of one chunk in the precision of the softmax; two or three times as much is alive at once."""

_Gradients: TypeAlias = tuple[Tensor | None, Tensor | None, Tensor | None, None, None, None, None]


class _Context(FunctionCtx):
    """What the forward pass leaves for the backward one."""

    saved_tensors: tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor, Tensor]
    needs_input_grad: tuple[bool, ...]
    temperature: float
    softcap: float | None
    rows_per_chunk: int


def head_outputs(
    states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: float,
    *,
    softcap: float | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> tuple[Tensor, Tensor]:
    """Return the logprobs of some tokens and the entropies (nats) of what they were drawn from: [N] each.

        z = soft_capped(states @ weight.T + bias) / temperature
        logprobs = z[targets] - logsumexp(z)        entropy = -sum(softmax(z) * log_softmax(z))

    Products are in the precision of the states; everything after them is float32, or float64 for float64 states.
    Both results have gradients, once differentiable, to states, weight and bias.

    >>> weight = torch.tensor([0.5, 0.25, 0.25]).log().unsqueeze(1)
    >>> logprobs, entropy = head_outputs(torch.ones(2, 1), weight, None, torch.tensor([0, 2]), temperature=1.0)
    >>> logprobs.exp(), entropy / torch.tensor(2.0).log()
    (tensor([0.5000, 0.2500]), tensor([1.5000, 1.5000]))

    Args:
        states: [N, E] that chose the tokens.
        weight: [V, E] of the head.
        bias: [V], if the head has one.
        targets: [N] int64, the tokens.
        temperature: that the logits are divided by.
        softcap: see `soft_capped`.
        chunk_bytes: of the logits that may exist at once; at least one token is taken at a time.
    """
    logprobs, entropy, _ = head_statistics(
        states, weight, bias, targets, temperature, softcap=softcap, chunk_bytes=chunk_bytes
    )
    return logprobs, entropy


def soft_capped(values: Tensor, softcap: float | None) -> Tensor:
    """Return values bent to stay below a bound, as Gemma 2 does (arXiv 2408.00118); without one, as they are.

    >>> soft_capped(torch.tensor([0.1, 100.0]), 2.0)
    tensor([0.0999, 2.0000])
    """
    return values if softcap is None else softcap * (values / softcap).tanh()


def head_statistics(
    states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: float,
    *,
    softcap: float | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `head_outputs` returns, and logsumexp(z): [N], with gradients as well.

    With it, the results of a vocabulary in parts can be made from those of the parts.
    """
    rows_per_chunk = max(1, chunk_bytes // (weight.shape[0] * _softmax_dtype(states).itemsize))
    logprobs, entropy, normaliser = _HeadStatistics.apply(  # pyright: ignore[reportGeneralTypeIssues] - `apply` is untyped
        states, weight, bias, targets, temperature, softcap, rows_per_chunk
    )
    return logprobs, entropy, normaliser


class _HeadStatistics(torch.autograd.Function):
    """`head_statistics`, with rows per chunk as the last argument."""

    @staticmethod
    def forward(
        ctx: _Context,
        states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        softcap: float | None,
        rows_per_chunk: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        dtype = _softmax_dtype(states)
        logprobs, entropy, normaliser = (states.new_empty(len(states), dtype=dtype) for _ in range(3))
        for rows in _chunks(len(states), rows_per_chunk):
            logits = _logits(states[rows], weight, bias, softcap)
            # Against the largest, every term of the entropy is positive: nothing cancels where a token is sure.
            largest = logits.amax(-1) / temperature
            logits = torch.add(-largest.unsqueeze(1), logits, alpha=1.0 / temperature, out=logits)
            chosen = logits.gather(1, targets[rows].unsqueeze(1)).squeeze(1)
            shares = logits.exp()
            total = shares.sum(-1)
            log_total = total.log()
            logprobs[rows] = chosen - log_total
            entropy[rows] = log_total - torch.linalg.vecdot(shares, logits) / total
            normaliser[rows] = largest + log_total
        ctx.save_for_backward(states, weight, bias, targets, normaliser, entropy)  # pyright: ignore[reportArgumentType] - None may be saved
        ctx.temperature, ctx.softcap, ctx.rows_per_chunk = temperature, softcap, rows_per_chunk
        ctx.set_materialize_grads(False)
        return logprobs, entropy, normaliser

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - torch passes one gradient per output
        ctx: _Context, grad_logprobs: Tensor | None, grad_entropy: Tensor | None, grad_normaliser: Tensor | None
    ) -> _Gradients:
        states, weight, bias, targets, normaliser, entropy = ctx.saved_tensors
        wants_states, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        dtype = normaliser.dtype
        grad_logprobs = torch.zeros_like(entropy) if grad_logprobs is None else grad_logprobs
        # Both have the shares of all tokens in their gradient; that of a logprob also has its own token.
        grad_shares = -grad_logprobs if grad_normaliser is None else grad_normaliser - grad_logprobs
        grad_states = torch.empty_like(states) if wants_states else None
        # Sums over chunks keep the precision of the softmax, whatever that of the weights.
        grad_weight = torch.zeros_like(weight, dtype=dtype) if wants_weight else None
        grad_bias = torch.zeros_like(bias, dtype=dtype) if wants_bias and bias is not None else None
        for rows in _chunks(len(states), ctx.rows_per_chunk):
            logits = _logits(states[rows], weight, bias, ctx.softcap)
            # d (cap * tanh(x / cap)) / d x = 1 - tanh(x / cap)^2
            slope = None if ctx.softcap is None else (logits / ctx.softcap).square_().neg_().add_(1.0)
            grad = _grad_logits(
                torch.add(-normaliser[rows].unsqueeze(1), logits, alpha=1.0 / ctx.temperature, out=logits),
                targets[rows],
                entropy[rows],
                grad_shares[rows] / ctx.temperature,
                grad_logprobs[rows] / ctx.temperature,
                None if grad_entropy is None else grad_entropy[rows] / ctx.temperature,
            )
            grad = grad if slope is None else grad.mul_(slope)
            if grad_bias is not None:
                grad_bias += grad.sum(0)
            grad = grad.to(states.dtype)
            if grad_states is not None:
                torch.mm(grad, weight, out=grad_states[rows])
            if grad_weight is not None:
                _add_product(grad_weight, grad.t(), states[rows])
        grad_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        grad_bias = None if grad_bias is None or bias is None else grad_bias.to(bias.dtype)
        return grad_states, grad_weight, grad_bias, None, None, None, None


def _logits(states: Tensor, weight: Tensor, bias: Tensor | None, softcap: float | None) -> Tensor:
    """Return the logits of a chunk in the precision of the softmax."""
    logits = functional.linear(states, weight, bias).to(_softmax_dtype(states))
    return logits if softcap is None else logits.div_(softcap).tanh_().mul_(softcap)


def _grad_logits(
    log_shares: Tensor,
    targets: Tensor,
    entropy: Tensor,
    grad_shares: Tensor,
    grad_targets: Tensor,
    grad_entropy: Tensor | None,
) -> Tensor:
    """Return the gradient of the scaled logits of a chunk, [n, V]; overwrites `log_shares`.

    d logprob / d z = onehot(target) - share        d entropy / d z = -share * (log_share + entropy)
    d normaliser / d z = share
    """
    shares = log_shares.exp()
    if grad_entropy is None:
        grad = shares.mul_(grad_shares.unsqueeze(1))
    else:
        fixed = (grad_shares - grad_entropy * entropy).unsqueeze(1)
        grad = torch.addcmul(fixed, log_shares, -grad_entropy.unsqueeze(1), out=log_shares).mul_(shares)
    return grad.scatter_add_(1, targets.unsqueeze(1), grad_targets.unsqueeze(1))


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add a product to a sum that may be of a wider precision."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right


def _softmax_dtype(states: Tensor) -> torch.dtype:
    """Return at least float32: logits of half precision are too coarse to be exponents."""
    return torch.promote_types(states.dtype, torch.float32)


def _chunks(num_rows: int, rows_per_chunk: int) -> Iterator[slice]:
    """Return the chunks of some rows, in order.

    >>> list(_chunks(5, 2))
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    return (slice(start, min(start + rows_per_chunk, num_rows)) for start in range(0, num_rows, rows_per_chunk))
