"""Logprobs and entropies of a language-model head from hidden states, without the logits of all tokens at once.

Owns: their computation, forward and backward. Must not know: which tokens they are, or which loss follows. Matrix
products are computed for a chunk of tokens at a time; the softmax, in float32, for a strip of a chunk, which on a CPU
fits the cache:

    chunk     [ 2,000 tokens x V ]      a product in the precision of the states, then its gradient, in the same memory
    strip     [    16 tokens x V ]      softmax and its gradient, in float32

Where there are kernels for the softmax (see `kernels`) a chunk has no strips, and nothing of its size is in float32.
The logits of the first chunks are kept for the backward pass up to a bound of bytes. Of the others only the normaliser
is kept, one number a token, and the backward pass computes them again.

Invariants: chunk borders follow from the vocabulary size and the kind of device alone, so that the same call gives the
same bits with or without gradients, kept or recomputed. Another chunk size gives the same numbers up to rounding: the
weight's gradient is a sum over tokens, and matrix products may round a row depending on the number of rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from transformers import PreTrainedConfig, PreTrainedModel

from rallypoint.config.limits import CHUNK_BYTES, CHUNK_BYTES_ON_ACCELERATORS, KEPT_BYTES, KEPT_BYTES_ON_ACCELERATORS
from rallypoint.cpu.forms import computes_in_pieces
from rallypoint.families import FAMILIES
from rallypoint.models.kernels import LOWEST_LOGIT, Kernels, RowGradients, find_kernels

_STRIP_BYTES = 2 * 2**20
"""Size of a strip of logits in the precision of the softmax, on a CPU; there are two such buffers."""

_Gradients: TypeAlias = tuple[Tensor | None, Tensor | None, Tensor | None, None, None, None, None, None]


def lm_head(model: PreTrainedModel) -> nn.Module:
    """Return the layer that turns hidden states into logits; `load_policy` refuses models without one."""
    head = model.get_output_embeddings()
    assert isinstance(head, nn.Module), "load_policy refuses a model without one"
    return head


def value_head(model: PreTrainedModel) -> nn.Module:
    """Return the layer that turns hidden states into values or scores; models without one are refused at load."""
    return model.get_submodule("score")


def soft_capped(values: Tensor, softcap: float | None) -> Tensor:
    """Return values squashed below a bound, as in Gemma 2 (arXiv 2408.00118); unchanged without a bound.

    >>> soft_capped(torch.tensor([0.1, 100.0]), 2.0)
    tensor([0.0999, 2.0000])
    """
    return values if softcap is None else softcap * (values / softcap).tanh()


def head_outputs(
    states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: float,
    *,
    softcap: float | None = None,
    chunk_bytes: int | None = None,
    kept_bytes: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return logprobs of tokens, entropies (nats) of their distributions, and logsumexp(z): [N] each, or [N, M] first.

        z = soft_capped(states @ weight.T + bias) / temperature
        logprobs = z[targets] - logsumexp(z)        entropy = -sum(softmax(z) * log_softmax(z))

    Products are in the precision of the states; everything after them is float32, or float64 for float64 states.
    Results of a vocabulary that is cut over ranks follow from these of its parts.
    A token with a logit of -inf adds nothing to the entropy, and has a finite logprob below -1e29.
    All results have gradients, once differentiable, to states, weight and bias.

    >>> weight = torch.tensor([0.5, 0.25, 0.25]).log().unsqueeze(1)
    >>> logprobs, entropy, _ = head_outputs(torch.ones(2, 1), weight, None, torch.tensor([0, 2]), temperature=1.0)
    >>> logprobs.exp(), entropy / torch.tensor(2.0).log()
    (tensor([0.5000, 0.2500]), tensor([1.5000, 1.5000]))

    Args:
        states: [N, E] that chose the tokens.
        weight: [V, E] of the head.
        bias: [V], if the head has one.
        targets: [N] int64, the tokens; or [N, M], several tokens of each distribution, also one of them twice.
        temperature: that the logits are divided by.
        softcap: see `soft_capped`.
        chunk_bytes: bound on the logits of one product, which has at least one token; None for the device's default.
        kept_bytes: bound on the logits kept for the backward pass; None for the device's default.
    """
    in_pieces = computes_in_pieces(states.device)
    if chunk_bytes is None:
        chunk_bytes = CHUNK_BYTES if in_pieces else CHUNK_BYTES_ON_ACCELERATORS
    if kept_bytes is None:
        kept_bytes = KEPT_BYTES if in_pieces else KEPT_BYTES_ON_ACCELERATORS
    row_bytes = weight.shape[0] * states.itemsize
    rows_per_chunk = max(1, chunk_bytes // row_bytes)
    num_kept = kept_bytes // (row_bytes * rows_per_chunk) if torch.is_grad_enabled() else 0
    several = targets.unsqueeze(1) if targets.dim() == 1 else targets
    logprobs, entropy, normaliser = _HeadOutputs.apply(  # pyright: ignore[reportGeneralTypeIssues] - `apply` is untyped
        states, weight, bias, several, temperature, softcap, rows_per_chunk, num_kept
    )
    return logprobs.reshape(targets.shape), entropy, normaliser


def likeliest(
    states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: float,
    num: int,
    *,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return scaled logits of tokens and of the likeliest ones, without gradients; see `head_outputs` for arguments.

    Returns:
        [N] z of the targets; [N, num] z of the likeliest tokens, the largest first, and their ids (of a smaller
        vocabulary -inf and 0 after them); [N] logsumexp(z).

    >>> weight = torch.tensor([0.5, 0.1, 0.4]).log().unsqueeze(1)
    >>> own, most, ids, total = likeliest(torch.ones(1, 1), weight, None, torch.tensor([1]), 1.0, num=2)
    >>> own.exp(), most.exp(), ids, (1 + total).round()
    (tensor([0.1000]), tensor([[0.5000, 0.4000]]), tensor([[0, 2]]), tensor([1.]))
    """
    row_bytes = weight.shape[0] * states.itemsize
    chunk_bytes = CHUNK_BYTES if computes_in_pieces(states.device) else CHUNK_BYTES_ON_ACCELERATORS
    own, normaliser = (states.new_empty(len(states), dtype=_softmax_dtype(states)) for _ in range(2))
    most = own.new_full((len(states), num), -torch.inf)
    ids = torch.zeros_like(most, dtype=torch.int64)
    with torch.no_grad():
        for chunk in _chunks(len(states), max(1, chunk_bytes // row_bytes)):
            logits = functional.linear(states[chunk], weight, bias).to(own.dtype)
            scaled = _cap(logits.clamp_(min=LOWEST_LOGIT), softcap).div_(temperature)
            found = scaled.topk(min(num, len(weight)), dim=-1)
            most[chunk, : found.values.shape[1]], ids[chunk, : found.values.shape[1]] = found
            own[chunk] = scaled.gather(1, targets[chunk].unsqueeze(1)).squeeze(1)
            normaliser[chunk] = scaled.logsumexp(-1)
    return own, most, ids, normaliser


class _HeadOutputs(torch.autograd.Function):
    """`head_outputs`, with rows per chunk and the number of kept chunks as the last arguments."""

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        softcap: float | None,
        rows_per_chunk: int,
        num_kept: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        entropy, normaliser = (states.new_empty(len(states), dtype=_softmax_dtype(states)) for _ in range(2))
        logprobs = entropy.new_empty(targets.shape)
        softmax = _softmax_of(states, weight, bias, rows_per_chunk, temperature, softcap)
        ctx.kept = []  # logits of the first chunks, which the backward pass overwrites
        for chunk in _chunks(len(states), rows_per_chunk):
            logits = functional.linear(states[chunk], weight, bias)
            softmax.statistics(logits, targets[chunk], (logprobs[chunk], entropy[chunk], normaliser[chunk]))
            if len(ctx.kept) < num_kept:
                ctx.kept.append(logits)
        ctx.save_for_backward(states, weight, bias, targets, normaliser, entropy)  # pyright: ignore[reportArgumentType] - None may be saved
        ctx.temperature, ctx.softcap, ctx.rows_per_chunk = temperature, softcap, rows_per_chunk
        ctx.set_materialize_grads(False)
        return logprobs, entropy, normaliser

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - torch passes one gradient per output
        ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None, grad_normaliser: Tensor | None
    ) -> _Gradients:
        states, weight, bias, targets, normaliser, entropy = ctx.saved_tensors
        wants_states, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        kept, ctx.kept = ctx.kept[::-1], []
        alpha = 1.0 / ctx.temperature
        of_targets: Tensor = entropy.new_zeros(targets.shape) if grad_logprobs is None else grad_logprobs * alpha
        # Both gradients contain the shares of all tokens; a logprob's also its own token.
        of_rows = of_targets.sum(1)
        grad_shares = -of_rows if grad_normaliser is None else grad_normaliser * alpha - of_rows
        grad_entropy = None if grad_entropy is None else grad_entropy * alpha
        grad_states = torch.empty_like(states) if wants_states else None
        grad_weight = _Sum(normaliser.dtype)
        grad_bias = torch.zeros_like(bias, dtype=normaliser.dtype) if wants_bias and bias is not None else None
        softmax = _softmax_of(states, weight, bias, ctx.rows_per_chunk, ctx.temperature, ctx.softcap)
        for chunk in _chunks(len(states), ctx.rows_per_chunk):
            grad = kept.pop() if kept else functional.linear(states[chunk], weight, bias)
            of_entropy = None if grad_entropy is None else grad_entropy[chunk]
            columns = normaliser[chunk], entropy[chunk], grad_shares[chunk], of_entropy
            softmax.to_gradient(grad, RowGradients(*columns, targets[chunk], of_targets[chunk]), grad_bias)
            if grad_states is not None:
                torch.mm(grad, weight, out=grad_states[chunk])
            if wants_weight:
                grad_weight.add_product(grad.t(), states[chunk])
        grad_bias = None if grad_bias is None or bias is None else grad_bias.to(bias.dtype)
        return grad_states, grad_weight.total(weight) if wants_weight else None, grad_bias, None, None, None, None, None


def _finite(logits: Tensor, *, out: Tensor) -> Tensor:
    """Copy logits, with -inf as a finite number."""
    return out.copy_(logits).clamp_(min=LOWEST_LOGIT)


def _cap(logits: Tensor, softcap: float | None) -> Tensor:
    """Apply `soft_capped` in place."""
    return logits if softcap is None else logits.div_(softcap).tanh_().mul_(softcap)


def _softmax_of(
    states: Tensor, weight: Tensor, bias: Tensor | None, rows_per_chunk: int, temperature: float, softcap: float | None
) -> _ByKernels | _ByStrips:
    """Return kernels where there are some: the gradient of a bias is a sum in float32, which they do not have."""
    kernels = find_kernels(states) if bias is None else None
    if kernels is not None:
        return _ByKernels(kernels, temperature, softcap)
    return _ByStrips(states, len(weight), rows_per_chunk, temperature, softcap)


class _ByKernels:
    """Softmax of the logits of a chunk, [n, V], and its gradient, by kernels."""

    def __init__(self, kernels: Kernels, temperature: float, softcap: float | None) -> None:
        self._kernels, self._temperature, self._softcap = kernels, temperature, softcap

    def statistics(self, logits: Tensor, targets: Tensor, out: tuple[Tensor, Tensor, Tensor]) -> None:
        """Write logprobs of targets, [n, M], entropies and normalisers, [n] each."""
        logprobs, entropy, normaliser = out
        largest, log_total, found = self._kernels.statistics(logits, self._temperature, self._softcap)
        chosen = _cap(logits.gather(1, targets).to(logprobs.dtype).clamp_(min=LOWEST_LOGIT), self._softcap)
        chosen.div_(self._temperature).sub_(largest.unsqueeze(1))
        torch.sub(chosen, log_total.unsqueeze(1), out=logprobs)
        torch.add(largest, log_total, out=normaliser)
        entropy.copy_(found)

    def to_gradient(self, logits: Tensor, rows: RowGradients, grad_bias: Tensor | None) -> None:
        """Write the gradient of logits in their place, and add its sum over rows to that of the bias, [V]."""
        assert grad_bias is None, "there is no bias"
        self._kernels.to_gradient(logits, rows, self._temperature, self._softcap)


class _ByStrips:
    """The same, in strips of rows of a chunk, with two buffers in the precision of the softmax."""

    def __init__(
        self, states: Tensor, vocabulary: int, rows_per_chunk: int, temperature: float, softcap: float | None
    ) -> None:
        dtype = _softmax_dtype(states)
        self._temperature, self._softcap = temperature, softcap
        self._num_rows = max(1, min(len(states), rows_per_chunk))
        if computes_in_pieces(states.device):  # elsewhere many small kernels cost more than the memory
            self._num_rows = max(1, min(self._num_rows, _STRIP_BYTES // (vocabulary * dtype.itemsize)))
        self._buffers = [states.new_empty(self._num_rows, vocabulary, dtype=dtype) for _ in range(2)]

    def _strips(self, logits: Tensor) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
        """Yield the rows of each strip, its logits, and its buffers."""
        for rows in _chunks(len(logits), self._num_rows):
            first, second = (buffer[: rows.stop - rows.start] for buffer in self._buffers)
            yield rows, logits[rows], first, second

    def statistics(self, logits: Tensor, targets: Tensor, out: tuple[Tensor, Tensor, Tensor]) -> None:
        logprobs, entropy, normaliser = out
        for rows, part, scaled, shares in self._strips(logits):
            # Relative to the largest logit, all terms of the entropy are positive: nothing cancels.
            largest = _cap(_finite(part, out=scaled), self._softcap).amax(-1) / self._temperature
            torch.add(-largest.unsqueeze(1), scaled, alpha=1.0 / self._temperature, out=scaled)
            chosen = scaled.gather(1, targets[rows])
            total = torch.exp(scaled, out=shares).sum(-1)
            log_total = total.log()
            logprobs[rows] = chosen - log_total.unsqueeze(1)
            entropy[rows] = log_total - shares.mul_(scaled).sum(-1) / total
            normaliser[rows] = largest + log_total

    def to_gradient(self, logits: Tensor, rows: RowGradients, grad_bias: Tensor | None) -> None:
        softcap = self._softcap
        for at, part, log_shares, shares in self._strips(logits):
            of = RowGradients(*(None if column is None else column[at] for column in rows))  # pyright: ignore[reportArgumentType] - only one may be None
            capped = _cap(_finite(part, out=log_shares), softcap)
            # d (cap * tanh(x / cap)) / d x = 1 - tanh(x / cap)^2
            slope = None if softcap is None else (capped / softcap).square_().neg_().add_(1.0)
            torch.add(-of.normaliser.unsqueeze(1), capped, alpha=1.0 / self._temperature, out=log_shares)
            torch.exp(log_shares, out=shares)
            _to_grad(shares, log_shares, of.of_shares, of.of_entropy, of.entropy)
            shares.scatter_add_(1, of.targets, of.of_targets)
            if slope is not None:
                shares.mul_(slope)
            if grad_bias is not None:
                grad_bias += shares.sum(0)
            part.copy_(shares)


class _Sum:
    """A sum of matrix products over chunks, in the precision of the softmax whatever that of the factors."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._total: Tensor | None = None

    def add_product(self, left: Tensor, right: Tensor) -> None:
        if self._total is None:
            self._total = left @ right
        elif self._total.dtype == left.dtype == self._dtype:
            self._total.addmm_(left, right)
        else:
            self._total = self._total.to(self._dtype).add_(left @ right)

    def total(self, like: Tensor) -> Tensor:
        """Return the sum in the precision and shape of a tensor; zeros if nothing was added."""
        return torch.zeros_like(like) if self._total is None else self._total.to(like.dtype)


def _to_grad(
    shares: Tensor, log_shares: Tensor, grad_shares: Tensor, grad_entropy: Tensor | None, entropy: Tensor
) -> None:
    """Turn the shares of a strip, [n, V], into the gradient of its scaled logits, without the term of the targets.

    d logprob / d z = onehot(target) - share        d entropy / d z = -share * (log_share + entropy)
    d normaliser / d z = share

    Overwrites `log_shares` too.
    """
    if grad_entropy is None:
        shares.mul_(grad_shares.unsqueeze(1))
    else:
        fixed = (grad_shares - grad_entropy * entropy).unsqueeze(1)
        shares.mul_(torch.addcmul(fixed, log_shares, -grad_entropy.unsqueeze(1), out=log_shares))


def _softmax_dtype(states: Tensor) -> torch.dtype:
    """Return at least float32: half precision is too coarse for exponents."""
    return torch.promote_types(states.dtype, torch.float32)


def _chunks(num_rows: int, rows_per_chunk: int) -> Iterator[slice]:
    """Return the chunks of some rows, in order.

    >>> list(_chunks(5, 2))
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    return (slice(start, min(start + rows_per_chunk, num_rows)) for start in range(0, num_rows, rows_per_chunk))


def logit_softcap(config: PreTrainedConfig) -> float | None:
    """Return the soft cap of a model's logits, see `soft_capped`; None if it has none."""
    family = FAMILIES.get(str(config.model_type))
    return config.final_logit_softcapping if family is not None and family.caps_logits else None  # pyright: ignore[reportReturnType]
