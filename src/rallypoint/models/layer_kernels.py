"""Triton kernels of what stands between the matrix products of a layer: sums and norms, heads, SwiGLU.

Owns: the kernels, and their trial. A step that decodes few tokens takes about as long as it has launches, and by
operators there are 27 in a layer; with these 11, of which 4 are products and 3 attention. Each rounds where operators
do, so that what is sampled stays near to what is trained.

With `TRITON_INTERPRET=1` the kernels run on a CPU, which is how they are tested without an accelerator.
"""

# pyright: reportMissingImports=false, reportPossiblyUnboundVariable=false
from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from rallypoint.models.kernels import is_near, launching_on, tried

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

_HEADS = 8
"""Heads of a program: few, as there may be few tokens."""
_COLUMNS = 1024
"""Columns of a program that looks at no others."""


class HeadNorms(NamedTuple):
    """RMSNorms of single heads, as Qwen3 has."""

    query: Tensor
    """[D]."""
    key: Tensor
    """[D]."""


class LayerKernels:
    """The kernels of one process; each is compiled when it is first used, for every type and width."""

    def __init__(self) -> None:
        assert triton is not None, "there are kernels only where there is Triton"
        made: list[Any] = [triton.jit(kernel) for kernel in (_add_norm, _turn, _swiglu, _swiglu_gradient)]
        self._add_norm, self._turn, self._swiglu, self._swiglu_gradient = made

    def add_norm(self, states: Tensor, added: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Return states + added, and the RMSNorm of that: [B, E] each, contiguous."""
        num, size = states.shape
        total, normed = states.new_empty(2, num, size).unbind(0)
        if num:
            block = 1 << (size - 1).bit_length()
            with launching_on(states.device):
                self._add_norm[num,](
                    *(total, normed, states.contiguous(), added.contiguous(), weight, size, eps),
                    BLOCK=block,
                    num_warps=max(4, min(16, block // 512)),
                    enable_fp_fusion=False,
                )
        return total, normed

    def turn(
        self, heads: Tensor, cos: Tensor, sin: Tensor, num_queries: int, norms: HeadNorms | None, eps: float
    ) -> Tensor:
        """Return heads of queries and keys, normed and rotated to their places.

        Args:
            heads: [B, at least H + K, D], contiguous; what stands after the H + K is left out.
            cos: [B, H + K, D / 2] as seen by each head, without memory for each.
            sin: the same.
            num_queries: H.
            norms: of queries and keys; None: they have none.
            eps: of the norms.

        Returns:
            [B, H + K, D].
        """
        num, num_turned, half = cos.shape
        out = heads.new_empty(num, num_turned, 2 * half)
        if num:
            weights = (heads, heads) if norms is None else norms
            with launching_on(heads.device):
                self._turn[num, -(-num_turned // _HEADS)](
                    *(out, heads, cos, sin, *weights, num_queries, num_turned, half, heads.stride(0), cos.stride(0)),
                    eps,
                    HAS_NORM=norms is not None,
                    HEADS=_HEADS,
                    HALF=1 << (half - 1).bit_length(),
                    enable_fp_fusion=False,  # a fused product is added before it is rounded
                )
        return out

    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        """Return silu(gate) * up: [T, F] each, with neighbouring columns."""
        num, size = gate.shape
        out = gate.new_empty(num, size)
        if num:
            with launching_on(gate.device):
                self._swiglu[num, -(-size // _COLUMNS)](
                    *(out, gate, up, size, gate.stride(0), up.stride(0)), BLOCK=_COLUMNS, enable_fp_fusion=False
                )
        return out

    def swiglu_gradient(self, grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of gate and up, given that of silu(gate) * up: [T, F] each."""
        num, size = gate.shape
        of_gate, of_up = gate.new_empty(num, size), gate.new_empty(num, size)
        if num:
            with launching_on(gate.device):
                self._swiglu_gradient[num, -(-size // _COLUMNS)](
                    *(of_gate, of_up, grad.contiguous(), gate, up, size, gate.stride(0), up.stride(0)),
                    BLOCK=_COLUMNS,
                    enable_fp_fusion=False,
                )
        return of_gate, of_up


def find_layer_kernels(like: Tensor) -> LayerKernels | None:
    """Return the kernels for states of a type and a device; None if there are none, or they compute something else."""
    return tried(LayerKernels, is_right, "norms, heads and SwiGLU", like)


@torch.no_grad()
def is_right(kernels: LayerKernels, device: torch.device, dtype: torch.dtype) -> bool:
    """Say whether kernels give what operators give in float64, up to what the type rounds."""
    generator = torch.Generator().manual_seed(0)
    near = functools.partial(is_near, tolerance=1e-5 if dtype == torch.float32 else 1e-2)

    def drawn(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(device, dtype)

    states, added, weight = drawn(3, 70), drawn(3, 70), drawn(70)
    total, normed = kernels.add_norm(states, added, weight, 1e-6)
    expected = functional.rms_norm(total.double(), (70,), weight.double(), 1e-6)
    if not torch.equal(total, states + added) or not near(normed, expected):
        return False
    heads, angles = drawn(5, 14, 24), torch.randn(5, 1, 12, generator=generator).to(device).expand(-1, 11, -1)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    for norms in (None, HeadNorms(drawn(24), drawn(24))):
        wide = heads.double()[:, :11]
        if norms is not None:
            parts = zip(wide.split((7, 4), 1), norms, strict=True)
            wide = torch.cat([functional.rms_norm(part, (24,), of.double(), 1e-6) for part, of in parts], 1)
        first, second = wide.chunk(2, -1)
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
        if not near(kernels.turn(heads, cos, sin, 7, norms, 1e-6), turned):
            return False
    gate, up = drawn(3, 2 * (_COLUMNS + 30)).chunk(2, -1)
    grad = drawn(3, _COLUMNS + 30)
    share = gate.double().sigmoid()
    silu = gate.double() * share
    of_gate, of_up = kernels.swiglu_gradient(grad, gate, up)
    slope = share * (1 + gate.double() * (1 - share))
    pairs = [
        (kernels.swiglu(gate, up), silu * up),
        (of_gate, grad.double() * up * slope),
        (of_up, grad.double() * silu),
    ]
    return all(near(one, other) for one, other in pairs)


# Triton reads what follows, and knows no annotations but its own.


# fmt: off
def _add_norm(total, normed, states, added, weight, size, eps, BLOCK: tl.constexpr):  # noqa: N803
    # fmt: on
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < size
    kind = total.dtype.element_ty
    here = tl.load(states + row * size + at, mask=inside, other=0.0).to(tl.float32)
    here += tl.load(added + row * size + at, mask=inside, other=0.0).to(tl.float32)
    here = here.to(kind)
    tl.store(total + row * size + at, here, mask=inside)
    here = here.to(tl.float32)
    length = tl.rsqrt(tl.sum(here * here, 0) / size + eps)
    factor = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + row * size + at, (here * length * factor).to(kind), mask=inside)


# fmt: off
def _turn(
    out, given, cos, sin, query_norm, key_norm, num_queries, num_turned, half, row_stride, angle_stride, eps,
    HAS_NORM: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,  # noqa: N803
):
    # fmt: on
    row = tl.program_id(0).to(tl.int64)
    head, at = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None], tl.arange(0, HALF)[None, :]
    is_there = at < half
    inside = (head < num_turned) & is_there
    kind = out.dtype.element_ty
    place = row * row_stride + head * 2 * half + at
    first = tl.load(given + place, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(given + place + half, mask=inside, other=0.0).to(tl.float32)
    if HAS_NORM:
        length = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / (2 * half) + eps)[:, None]
        is_query = head < num_queries
        of_query = tl.load(query_norm + at, mask=is_there, other=0.0).to(tl.float32)
        of_key = tl.load(key_norm + at, mask=is_there, other=0.0).to(tl.float32)
        first = (first * length * tl.where(is_query, of_query, of_key)).to(kind).to(tl.float32)
        of_query = tl.load(query_norm + half + at, mask=is_there, other=0.0).to(tl.float32)
        of_key = tl.load(key_norm + half + at, mask=is_there, other=0.0).to(tl.float32)
        second = (second * length * tl.where(is_query, of_query, of_key)).to(kind).to(tl.float32)
    cosine = tl.load(cos + row * angle_stride + at, mask=is_there, other=0.0).to(tl.float32)
    sine = tl.load(sin + row * angle_stride + at, mask=is_there, other=0.0).to(tl.float32)
    # Products are rounded before they are added, as those of the training pass are.
    place = (row * num_turned + head) * 2 * half + at
    from_second = (second * sine).to(kind).to(tl.float32)
    own = (first * cosine).to(kind).to(tl.float32)
    tl.store(out + place, (own - from_second).to(kind), mask=inside)
    from_first = (first * sine).to(kind).to(tl.float32)
    own = (second * cosine).to(kind).to(tl.float32)
    tl.store(out + place + half, (own + from_first).to(kind), mask=inside)


# fmt: off
def _swiglu(out, gate, up, size, gate_stride, up_stride, BLOCK: tl.constexpr):  # noqa: N803
    # fmt: on
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    kind = out.dtype.element_ty
    own = tl.load(gate + row * gate_stride + at, mask=inside, other=0.0).to(tl.float32)
    silu = (own / (1.0 + tl.exp(-own))).to(kind).to(tl.float32)
    other = tl.load(up + row * up_stride + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * size + at, (silu * other).to(kind), mask=inside)


# fmt: off
def _swiglu_gradient(
    of_gate, of_up, grad, gate, up, size, gate_stride, up_stride, BLOCK: tl.constexpr,  # noqa: N803
):
    # fmt: on
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    kind = of_gate.dtype.element_ty
    own = tl.load(gate + row * gate_stride + at, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(up + row * up_stride + at, mask=inside, other=0.0).to(tl.float32)
    given = tl.load(grad + row * size + at, mask=inside, other=0.0).to(tl.float32)
    share = 1.0 / (1.0 + tl.exp(-own))
    silu = (own * share).to(kind).to(tl.float32)
    tl.store(of_up + row * size + at, (given * silu).to(kind), mask=inside)
    given = (given * other).to(kind).to(tl.float32)
    tl.store(of_gate + row * size + at, (given * share * (1.0 + own * (1.0 - share))).to(kind), mask=inside)
