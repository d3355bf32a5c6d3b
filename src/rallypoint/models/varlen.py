"""Attention of a packed stream in one call: flash attention of torch for rows of any lengths, on CUDA devices.

Owns: when that kernel is used, its call and its gradient, and which keys each row reads. Rows need neither rectangles
nor padding, several queries may share a key, and queries may be fewer than the keys they see: those of a row that
begins with what another row has, or of a chunk that follows what a cache has. A query sees the keys up to its own
place, counted from the end of both.

The kernel is compared with ordinary products before it is used for the first time. Where it is missing or differs, the
callers have another way: rectangles by `fused`, float32 included.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from rallypoint.models.prefix import Copies, SharedPrefixes
from rallypoint.models.products import Limits
from rallypoint.models.sinks import gradient_of_sinks, with_sinks
from rallypoint.parallel.transfer import sent

_MAX_HEAD = 256
_HEAD_MULTIPLE = 8
"""Multiple that head sizes are padded to: 16 bytes in half precision."""
_CAPABILITY = (8, 0)
"""Compute capability from which on CUDA devices have flash attention."""
_TOLERANCE = 3e-2
"""Largest difference in half precision, relative to the largest number."""

_LOG = logging.getLogger(__name__)


class Borders(NamedTuple):
    """Where each of N rows begins in a stream."""

    offsets: Tensor
    """[N+1] int32, on the device."""
    longest: int

    @classmethod
    def of(cls, lengths: Tensor, device: torch.device) -> Borders:
        """Lay rows of such lengths, [N] on the CPU, end to end."""
        offsets = functional.pad(lengths.cumsum(0), (1, 0)).int()
        return cls(sent(offsets, device), int(lengths.max()) if len(lengths) else 0)


Varlen: TypeAlias = Callable[[Tensor, Tensor, Tensor, tuple[Borders, Borders], float, Limits], Tensor]
"""Computes attention of rows of any lengths; see `flash`."""


def may_have_varlen(device: torch.device) -> bool:
    """Whether `find_varlen` may find something there."""
    return device.type == "cuda"


def find_varlen(query: Tensor, kv_heads: int, limits: Limits) -> Varlen | None:
    """Return what computes such attention on the device of the queries, [T, H, D]; None: rectangles must do."""
    _, heads, dim = query.shape
    is_half = query.dtype in (torch.bfloat16, torch.float16)
    if not may_have_varlen(query.device) or not is_half or limits.softcap is not None:
        return None
    return _checked(query.device, query.dtype, heads // kv_heads, dim, has_sinks=limits.sinks is not None)


@functools.cache
def _checked(device: torch.device, dtype: torch.dtype, share: int, dim: int, *, has_sinks: bool) -> Varlen | None:
    """Return the kernel if it computes what products compute there; otherwise None, and a line in the log."""
    if dim > _MAX_HEAD or torch.cuda.get_device_capability(device) < _CAPABILITY:
        return None
    try:
        if is_right(flash, device, dtype, share, dim, has_sinks=has_sinks):
            return flash
        reason = "it computes something else there"
    except (RuntimeError, TypeError, AttributeError) as error:  # of a torch whose operator is another one
        reason = f"{type(error).__name__}: {error}"
    _LOG.warning("flash attention for rows of any lengths is not used on %s, attention is slower: %s", device, reason)
    return None


def flash(
    query: Tensor, key: Tensor, value: Tensor, rows: tuple[Borders, Borders], scaling: float, limits: Limits
) -> Tensor:
    """Return the attention output, [T, H, D]; once differentiable, with the same bits while torch is asked for that.

    Args:
        query: [T, H, D], all rows end to end.
        key: [S, K, D], all that each row sees end to end; H a multiple of K.
        value: likewise.
        rows: borders of queries and of keys; a row has no more queries than keys.
        scaling: factor of the scores.
        limits: window and sinks; without a soft cap.
    """
    missing = -query.shape[-1] % _HEAD_MULTIPLE
    if missing:
        query, key, value = (functional.pad(states, (0, missing)) for states in (query, key, value))
    out: Tensor = _Flash.apply(query, key, value, limits.sinks, rows, scaling, limits.window)  # pyright: ignore[reportAssignmentType] - `apply` is untyped
    return out[..., :-missing] if missing else out


def by_products(
    query: Tensor, key: Tensor, value: Tensor, rows: tuple[Borders, Borders], scaling: float, limits: Limits
) -> Tensor:
    """Do as `flash`, row by row: what the kernel is compared with."""
    share = query.shape[1] // key.shape[1]
    (offsets, _), (key_offsets, _) = rows
    parts: list[Tensor] = [query[:0]]
    sizes = zip(offsets.diff().tolist(), key_offsets.diff().tolist(), strict=True)
    starts = zip(offsets.tolist(), key_offsets.tolist(), strict=False)
    for (num, num_keys), (at, at_key) in zip(sizes, starts, strict=False):
        asked = query[at : at + num].transpose(0, 1)
        keys, values = (
            states[at_key : at_key + num_keys].transpose(0, 1).repeat_interleave(share, 0) for states in (key, value)
        )
        seen = torch.ones(num, num_keys, dtype=torch.bool, device=query.device).tril(num_keys - num)
        if limits.window is not None:
            seen = seen.triu(num_keys - num - limits.window + 1)
        scores = (asked @ keys.transpose(1, 2) * scaling).masked_fill(~seen, float("-inf"))
        if limits.sinks is not None:  # one more key, whose value is zero
            scores = torch.cat([scores, limits.sinks.view(-1, 1, 1).expand(-1, num, 1)], -1)
        parts.append((scores.softmax(-1)[..., :num_keys] @ values).transpose(0, 1))
    return torch.cat(parts)


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def is_right(
    attend: Varlen, device: torch.device, dtype: torch.dtype, share: int, dim: int, *, has_sinks: bool = False
) -> bool:
    """Say whether outputs and gradients are those of products, for rows with more keys than queries, and windows."""
    generator = torch.Generator().manual_seed(0)
    lengths, key_lengths = torch.tensor([3, 70, 33]), torch.tensor([3, 75, 129])
    rows = Borders.of(lengths, device), Borders.of(key_lengths, device)
    sizes = ((int(lengths.sum()), 2 * share), (int(key_lengths.sum()), 2), (int(key_lengths.sum()), 2))
    numbers = [torch.randn(*size, dim, generator=generator).to(device, dtype) for size in sizes]
    weights = torch.randn(*numbers[0].shape, generator=generator).to(device, dtype)
    if has_sinks:
        numbers.append(torch.randn(2 * share, generator=generator).to(device, dtype))
    for window in (None, 20):
        found: list[tuple[Tensor, ...]] = []
        for way, kind in ((attend, dtype), (by_products, torch.float32)):
            # Whatever a training pass does with the tensors of its layers is not for these.
            with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(_as_it_is, _as_it_is):
                states = [number.to(kind).detach().requires_grad_() for number in numbers]
                limits = Limits(window, sinks=states[3] if has_sinks else None)
                out = way(states[0], states[1], states[2], rows, dim**-0.5, limits)
            found.append((out.detach(), *torch.autograd.grad(out, states, weights.to(kind))))
        for one, other in zip(*found, strict=True):
            if not float((one - other).abs().max()) <= _TOLERANCE * float(other.abs().max()):
                return False
    return True


class PackedKeys:
    """Which keys the rows of a packed stream read: their own, and before them those shared with another row."""

    def __init__(self, offsets: Tensor, device: torch.device, shared: SharedPrefixes) -> None:
        """Lay rows out.

        Args:
            offsets: [B+1] of the rows, on the CPU.
            device: of the stream.
            shared: the tokens of the rows that are in the stream.
        """
        lengths, num_own = offsets.diff(), shared.num_kept(offsets)
        asks = num_own > 0  # not rows all of whose tokens are another row's
        self.num_tokens = len(shared.kept)
        self._copies: Copies | None = None
        if self.num_tokens < int(offsets[-1]):
            row = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
            self._copies = Copies.of(shared.place[asks[row]], shared.num_keys, device)
        self.rows = Borders.of(num_own[asks], device), Borders.of(lengths[asks], device)

    def attend(
        self, kernel: Varlen, query: Tensor, key: Tensor, value: Tensor, scaling: float, limits: Limits
    ) -> Tensor:
        """Return the attention output of a stream, [T, H, D]; that of filler after the last row is zero."""
        num, num_filler = self.num_tokens, len(query) - self.num_tokens
        if num_filler:
            query, key, value = query[:num], key[:num], value[:num]
        if self._copies is not None:
            key, value = (self._copies.of_rows(states) for states in (key, value))
        out = kernel(query, key, value, self.rows, scaling, limits) if num else query
        return functional.pad(out, (0, 0, 0, 0, 0, num_filler)) if num_filler else out


class _Flash(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        rows: tuple[Borders, Borders],
        scaling: float,
        window: int | None,
    ) -> Tensor:
        (offsets, longest), (key_offsets, longest_key) = ctx.rows = rows
        # A window is that of the query and those before it, so it is causal by itself.
        ctx.is_causal, ctx.options = window is None, {"scale": scaling}
        if window is not None:
            ctx.options |= {"window_size_left": window - 1, "window_size_right": 0}
        sizes = offsets, key_offsets, longest, longest_key
        out, total, *random, _ = torch.ops.aten._flash_attention_forward(
            query, key, value, *sizes, 0.0, ctx.is_causal, False, **ctx.options
        )
        if sinks is not None:
            out, total = with_sinks(out, total, sinks)
        ctx.save_for_backward(query, key, value, sinks, out, total, *random)  # pyright: ignore[reportArgumentType] - takes None
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride] - torch passes one gradient per output
        query, key, value, sinks, out, total, *random = ctx.saved_tensors
        (offsets, longest), (key_offsets, longest_key) = ctx.rows
        sizes = offsets, key_offsets, longest, longest_key
        # The shares of keys are exp(score - total), so that a total with sinks in it gives what they leave.
        grads = torch.ops.aten._flash_attention_backward(
            grad, query, key, value, out, total, *sizes, 0.0, ctx.is_causal, *random, **ctx.options
        )
        of_sinks = None if sinks is None else gradient_of_sinks(grad, out, total, sinks)
        return *grads, of_sinks, None, None, None
