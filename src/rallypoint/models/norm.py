"""RMSNorm with its own backward pass, in place of the single operations of transformers.

It makes fewer passes over memory, keeps half as much for the backward pass, and computes in float64 where the model is
float64: the original rounds to float32 there, so that sums of gradients depend on which rows share a prompt's tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from rallypoint.cpu.forms import computes_in_pieces
from rallypoint.families import FAMILIES

_KINDS = {name: kind for family in FAMILIES.values() for name, kind in family.norms.items()}
"""Classes of transformers that compute exactly this."""

_STRIP_ELEMENTS = 2**18
"""Elements of one tensor in a strip: 1 MiB in float32. Smaller strips cost more in calls than the cache saves."""


class RMSNorm(nn.Module):
    """Zhang and Sennrich, 2019 (arXiv:1910.07467): x / sqrt(mean(x^2) + eps) * (offset + weight), over the last dim."""

    def __init__(self, weight: nn.Parameter, eps: float, offset: float = 0.0) -> None:
        """Take over the weight of a model's own norm.

        Args:
            weight: [E].
            eps: added to the mean square.
            offset: added to the weight; 1 in Gemma, whose weights are around 0.
        """
        super().__init__()
        self.weight, self.eps, self.offset = weight, eps, offset

    def forward(self, states: Tensor) -> Tensor:
        """[..., E] -> [..., E], in the precision of the states; in between at least float32."""
        if not computes_in_pieces(states.device):  # other backends have their own kernel
            if self.offset:  # half precision cannot represent 1 + weight
                wide = torch.promote_types(states.dtype, torch.float32)
                factor = self.weight.to(wide) + self.offset
                return functional.rms_norm(states.to(wide), factor.shape, factor, self.eps).to(states.dtype)
            return functional.rms_norm(states, self.weight.shape, self.weight, self.eps)
        return _RMSNorm.apply(states, self.weight, self.eps, self.offset)  # pyright: ignore[reportReturnType] - `apply` is untyped


def replace_norms(model: nn.Module) -> None:
    """Replace the norms of a transformers model that compute the same as `RMSNorm`; weights and names stay."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__ in _KINDS and type(child).__module__.startswith("transformers."):
                kind = _KINDS[type(child).__name__]
                setattr(parent, name, RMSNorm(child.get_parameter("weight"), getattr(child, kind.eps), kind.offset))


class _RMSNorm(torch.autograd.Function):
    """With n = x * rsqrt(mean(x^2) + eps) and y = n * (offset + weight)."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
        wide = torch.promote_types(states.dtype, torch.float32)
        rows, factor = states.reshape(-1, states.shape[-1]), _factor(weight, offset, wide)
        out, scale = torch.empty_like(rows), rows.new_empty(len(rows), 1, dtype=wide)
        for part, length, into in in_strips(rows, scale, out):
            x = part.to(wide)
            torch.linalg.vector_norm(x, dim=-1, keepdim=True, out=length)
            length.square_().mul_(1 / rows.shape[-1]).add_(eps).rsqrt_()
            into.copy_(torch.mul(x, length).mul_(factor))
        ctx.save_for_backward(states, weight, scale)
        ctx.offset = offset
        return out.view(states.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride] - torch passes one gradient per output
        states, weight, scale = ctx.saved_tensors
        factor = _factor(weight, ctx.offset, scale.dtype)
        rows, grads = (tensor.reshape(-1, states.shape[-1]) for tensor in (states, grad))
        grad_states, grad_weight = torch.empty_like(rows), torch.zeros_like(factor)
        for part, narrow, length, into in in_strips(grads, rows, scale, grad_states):
            x, scaled = narrow.to(scale.dtype), part * length
            products = scaled * x
            grad_weight += products.sum(0)
            # d n_i / d x_j = scale * (delta_ij - n_i n_j / E), and n = x * scale
            mean = (products @ factor).unsqueeze(-1) * length.square().mul_(-1 / rows.shape[-1])
            into.copy_(scaled.mul_(factor).addcmul_(x, mean))
        return grad_states.view(states.shape), grad_weight.to(weight.dtype), None, None


def _factor(weight: Tensor, offset: float, wide: torch.dtype) -> Tensor:
    return weight.to(wide) + offset if offset else weight.to(wide)


def in_strips(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield strips of rows, the same rows of each tensor, for a chain of elementwise operations.

    Each operation of such a chain is bound by memory when it runs over all rows, and faster when the chain runs over a
    strip that stays in the cache. Where a device computes with large kernels, one strip has all rows.

    >>> [(a.tolist(), b.tolist()) for a, b in in_strips(torch.arange(2), torch.arange(2))]
    [([0, 1], [0, 1])]

    Args:
        tensors: with the same first dimension, the widest one first.
    """
    first = tensors[0]
    num_rows = len(first)
    num_strips = max(1, -(-first.numel() // _STRIP_ELEMENTS) if computes_in_pieces(first.device) else 1)
    # Strips have equal sizes: a reduction over a single left-over row may add up in another order.
    step = max(1, -(-num_rows // num_strips))
    for start in range(0, num_rows, step):
        yield tuple(tensor[start : start + step] for tensor in tensors)
