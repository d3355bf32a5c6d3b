"""Triton kernels for what torch computes in many passes over memory: the softmax of a head, and rotary positions.

Owns: the kernels, and when they are used: on accelerators, after a trial in which they gave what torch's operators
give. With operators a head of 152,000 tokens makes 12 to 14 passes over float32 logits; here one reads them for the
statistics, and one writes their gradient in their place. No sum depends on which program comes first.

With `TRITON_INTERPRET=1` the kernels run on a CPU, which is how they are tested without an accelerator.
"""

# pyright: reportMissingImports=false, reportPossiblyUnboundVariable=false, reportOperatorIssue=false
from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

_LOG = logging.getLogger(__name__)

KernelsT = TypeVar("KernelsT")

LOWEST_LOGIT = -1e30
"""Lower bound of logits: a model can exclude a token (-inf), which must add 0 to the entropy, not NaN."""
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_BLOCK = 4096
"""Logits that a program has at once."""


class RowGradients(NamedTuple):
    """What the gradient of the logits of n rows follows from, in float32; see `rallypoint.models.head`."""

    normaliser: Tensor
    """[n] logsumexp of the scaled logits."""
    entropy: Tensor
    """[n]."""
    of_shares: Tensor
    """[n] gradient that every token has, times its share."""
    of_entropy: Tensor | None
    """[n]; None: the entropy has no gradient."""
    targets: Tensor
    """[n, M] int64."""
    of_targets: Tensor
    """[n, M] gradient of each target's own logit."""


class Kernels:
    """The kernels of one process; each is compiled when it is first used, for every type."""

    def __init__(self) -> None:
        assert triton is not None, "there are kernels only where there is Triton"
        made: list[Any] = [triton.jit(kernel) for kernel in (_statistics, _gradient, _rotate)]
        self._statistics, self._gradient, self._rotate = made

    def statistics(self, logits: Tensor, temperature: float, softcap: float | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return of each row z = soft_capped(logits) / temperature: max(z), logsumexp(z - max(z)) and the entropy.

        Args:
            logits: [n, V], contiguous.
            temperature: that they are divided by.
            softcap: their bound before.

        Returns:
            [n] float32 each.
        """
        num, size = logits.shape
        found = logits.new_empty(3, num, dtype=torch.float32)
        if num:
            with launching_on(logits.device):
                self._statistics[num,](
                    *(logits, *found.unbind(0), size, temperature, softcap or 0.0, LOWEST_LOGIT),
                    HAS_CAP=softcap is not None,
                    BLOCK=_BLOCK,
                    num_warps=8,
                )
        largest, log_total, entropy = found.unbind(0)
        return largest, log_total, entropy

    def to_gradient(self, logits: Tensor, rows: RowGradients, temperature: float, softcap: float | None) -> None:
        """Write the gradient of logits, [n, V], in their place."""
        num, size = logits.shape
        if not num:
            return
        of_entropy = rows.of_shares if rows.of_entropy is None else rows.of_entropy
        columns = (column.contiguous() for column in (*rows[:3], of_entropy, rows.targets, rows.of_targets))
        with launching_on(logits.device):
            self._gradient[num, -(-size // _BLOCK)](
                *(logits, *columns, rows.targets.shape[1], size, temperature, softcap or 0.0, LOWEST_LOGIT),
                HAS_ENTROPY=rows.of_entropy is not None,
                HAS_CAP=softcap is not None,
                BLOCK=_BLOCK,
                num_warps=8,
            )

    def rotate(self, states: Tensor, cos: Tensor, sin: Tensor, *, backwards: bool = False) -> Tensor:
        """Return states, [T, H, D], rotated by angles, [T, D] with two equal halves, or back; see `rotate`."""
        num, heads, dim = states.shape
        states = states if states.stride(2) == 1 else states.contiguous()
        out = states.new_empty(states.shape)
        if num:
            with launching_on(states.device):
                self._rotate[num,](
                    *(out, states, cos.contiguous(), sin.contiguous(), heads, dim, states.stride(0), states.stride(1)),
                    SIGN=-1.0 if backwards else 1.0,
                    HEADS=1 << (heads - 1).bit_length(),
                    HALF=1 << (dim // 2 - 1).bit_length(),
                    enable_fp_fusion=False,  # a fused product is added before it is rounded
                )
        return out


def find_kernels(like: Tensor) -> Kernels | None:
    """Return the kernels for states of a type and a device; None if there are none, or they compute something else."""
    return tried(Kernels, is_right, "heads and rotations", like)


def tried(
    make: Callable[[], KernelsT],
    is_right: Callable[[KernelsT, torch.device, torch.dtype], bool],
    what: str,
    like: Tensor,
) -> KernelsT | None:
    """Return kernels that passed their trial in this process, on a device and in a type, or None.

    Args:
        make: makes the kernels.
        is_right: their trial.
        what: they compute, for the log.
        like: states on that device and of that type.
    """
    if triton is None or like.device.type != "cuda" or like.dtype not in _DTYPES:
        return None
    return _tried(make, is_right, what, like.device, like.dtype)


@functools.cache
def _tried(
    make: Callable[[], KernelsT],
    is_right: Callable[[KernelsT, torch.device, torch.dtype], bool],
    what: str,
    device: torch.device,
    dtype: torch.dtype,
) -> KernelsT | None:
    try:
        kernels = make()
        if is_right(kernels, device, dtype):
            return kernels
        reason = "they compute something else there"
    except Exception as error:  # noqa: BLE001 - of torch, the driver, Triton, and the C compiler that it starts
        reason = f"{type(error).__name__}: {error}"
    _LOG.warning("our kernels for %s are not used on %s, which is slower: %s", what, device, reason)
    return None


@torch.no_grad()
def is_right(kernels: Kernels, device: torch.device, dtype: torch.dtype) -> bool:
    """Say whether kernels give what operators give: a softmax in float64, and rotations in the type itself."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*size: int) -> Tensor:
        return torch.randn(size, generator=generator)

    exact = 1e-5 if dtype == torch.float32 else 1e-2
    for softcap, has_entropy in ((None, False), (None, True), (5.0, True)):
        logits = (3 * drawn(3, _BLOCK + 70)).to(device, dtype)
        logits[1, 7] = -torch.inf
        targets = torch.tensor([[5, 5], [7, 9], [_BLOCK + 69, 0]], device=device)
        wide = logits.double().clamp_(min=LOWEST_LOGIT)
        capped = wide if softcap is None else softcap * (wide / softcap).tanh()
        scaled = capped / 0.7
        total, shares = scaled.logsumexp(-1), scaled.softmax(-1)
        entropy = total - (shares * scaled).sum(-1)
        largest, log_total, found = kernels.statistics(logits, 0.7, softcap)
        pairs = [(largest, scaled.amax(-1)), (largest + log_total, total), (found, entropy)]
        of_shares, of_entropy, of_targets = (part.to(device) for part in (drawn(3), drawn(3), drawn(3, 2)))
        expected = shares * of_shares.double().unsqueeze(1)
        if has_entropy:
            expected -= shares * of_entropy.double().unsqueeze(1) * (scaled - total.unsqueeze(1) + entropy.unsqueeze(1))
        expected.scatter_add_(1, targets, of_targets.double())
        if softcap is not None:
            expected *= 1 - (capped / softcap).square()
        of = RowGradients(
            total.float(), entropy.float(), of_shares, of_entropy if has_entropy else None, targets, of_targets
        )
        kernels.to_gradient(logits, of, 0.7, softcap)
        if any(not is_near(one, other, 1e-4) for one, other in pairs) or not is_near(logits, expected, exact):
            return False
    states, angles = drawn(5, 3, 24).to(device, dtype), drawn(5, 12).to(device).tile(2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    first, second = states.chunk(2, -1)
    for backwards, sign in ((False, 1), (True, -1)):
        # To the bit: a rotation that rounds elsewhere than torch's operators do would train another model than theirs.
        turned = torch.cat((-sign * second, sign * first), -1) * sin.unsqueeze(1)
        if not torch.equal(kernels.rotate(states, cos, sin, backwards=backwards), turned + states * cos.unsqueeze(1)):
            return False
    return True


def is_near(found: Tensor, expected: Tensor, tolerance: float) -> bool:
    """Say whether numbers differ by at most a part of the largest; NaN never does."""
    return float((found.double() - expected).abs().max()) <= tolerance * max(1.0, float(expected.abs().max()))


def launching_on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Have Triton launch on a device: it uses the thread's current one, wherever the tensors are."""
    return contextlib.nullcontext() if device.index is None else torch.accelerator.device_index(device.index)


# Triton reads what follows, and knows no annotations but its own.


# fmt: off
def _statistics(
    logits, largest, log_total, entropy, size, temperature, softcap, lowest,
    HAS_CAP: tl.constexpr, BLOCK: tl.constexpr,  # noqa: N803
):
    # fmt: on
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    # The largest so far, and relative to it the sum of all shares, and that of shares times logits.
    top = -1e38
    total = 0.0
    weighted = 0.0
    for start in range(0, size, BLOCK):
        inside = start + at < size
        here = tl.load(logits + row * size + start + at, mask=inside, other=0.0).to(tl.float32)
        here = tl.where(here < lowest, lowest, here)  # not `maximum`, which drops NaN
        if HAS_CAP:
            here = softcap * (2.0 / (1.0 + tl.exp(-2.0 * here / softcap)) - 1.0)
        here = here / temperature
        higher = tl.maximum(top, tl.max(tl.where(inside, here, -1e38), 0))
        relative = here - higher
        shares = tl.where(inside, tl.exp(relative), 0.0)
        kept = tl.exp(top - higher)
        weighted = kept * (weighted + total * (top - higher)) + tl.sum(tl.where(inside, shares * relative, 0.0), 0)
        total = total * kept + tl.sum(shares, 0)
        top = higher
    tl.store(largest + row, top)
    tl.store(log_total + row, tl.log(total))
    tl.store(entropy + row, tl.log(total) - weighted / total)


# fmt: off
def _gradient(
    logits, normaliser, entropy, of_shares, of_entropy, targets, of_targets, num_targets, size,
    temperature, softcap, lowest,
    HAS_ENTROPY: tl.constexpr, HAS_CAP: tl.constexpr, BLOCK: tl.constexpr,  # noqa: N803
):
    # fmt: on
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    here = tl.load(logits + row * size + at, mask=inside, other=0.0).to(tl.float32)
    here = tl.where(here < lowest, lowest, here)
    slope = 1.0
    if HAS_CAP:
        squashed = 2.0 / (1.0 + tl.exp(-2.0 * here / softcap)) - 1.0
        here = softcap * squashed
        slope = 1.0 - squashed * squashed
    log_shares = here / temperature - tl.load(normaliser + row)
    factor = tl.load(of_shares + row)
    if HAS_ENTROPY:
        factor = factor - tl.load(of_entropy + row) * (log_shares + tl.load(entropy + row))
    grad = tl.exp(log_shares) * factor
    for number in range(num_targets):
        target = tl.load(targets + row * num_targets + number)
        grad += tl.where(at == target, tl.load(of_targets + row * num_targets + number), 0.0)
    tl.store(logits + row * size + at, (grad * slope).to(logits.dtype.element_ty), mask=inside)


# fmt: off
def _rotate(
    out, states, cos, sin, heads, dim, row_stride, head_stride,
    SIGN: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,  # noqa: N803
):
    # fmt: on
    row = tl.program_id(0).to(tl.int64)
    half = dim // 2
    head, at = tl.arange(0, HEADS)[:, None], tl.arange(0, HALF)[None, :]
    inside = (head < heads) & (at < half)
    place = row * row_stride + head * head_stride + at
    first = tl.load(states + place, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(states + place + half, mask=inside, other=0.0).to(tl.float32)
    cosine = tl.load(cos + row * dim + at, mask=at < half, other=0.0).to(tl.float32)
    sine = tl.load(sin + row * dim + at, mask=at < half, other=0.0).to(tl.float32) * SIGN
    # Products are rounded before they are added, as operators do.
    kind = out.dtype.element_ty
    place = (row * heads + head) * dim + at
    from_second = (second * sine).to(kind).to(tl.float32)
    from_first = (first * sine).to(kind).to(tl.float32)
    own = (first * cosine).to(kind).to(tl.float32)
    tl.store(out + place, (own - from_second).to(kind), mask=inside)
    own = (second * cosine).to(kind).to(tl.float32)
    tl.store(out + place + half, (own + from_first).to(kind), mask=inside)
