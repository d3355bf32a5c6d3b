"""The chains of single-number operations of a decoder layer, forward and backward, in few passes over memory.

Owns: the gate of an MLP and the rotation of queries and keys. Must not know: modules, or rows. What transformers makes
of them leaves a tensor in memory for every operation, which on a CPU costs more than the operation does.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from rallypoint.cpu.strips import in_strips


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up (Shazeer, 2020, arXiv:2002.05202), once differentiable.

    >>> swiglu(torch.tensor([0.0, 20.0]), torch.tensor([3.0, 3.0]))
    tensor([ 0., 60.])
    """
    return _SwiGLU.apply(gate, up)  # pyright: ignore[reportReturnType] - `apply` is untyped


def rotate(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return states turned by the angle of their position (Su et al., 2021, arXiv:2104.09864), once differentiable.

    A number of the first half of a head and its fellow in the second half are a point in a plane:

        y1 = x1 * cos - x2 * sin        y2 = x2 * cos + x1 * sin

    >>> rotate(torch.tensor([[[3.0, 4.0]]]), torch.zeros(1, 2), torch.ones(1, 2))  # by a right angle
    tensor([[[-4.,  3.]]])

    Args:
        states: [T, H, D].
        cos: [T, D], whose halves are the same; without gradient.
        sin: likewise.
    """
    return _Rotation.apply(states, cos, sin)  # pyright: ignore[reportReturnType] - `apply` is untyped


class _Context(FunctionCtx):
    """What a forward pass leaves for the backward one."""

    saved_tensors: tuple[Tensor, ...]


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, gate: Tensor, up: Tensor) -> Tensor:
        silu, out = torch.empty_like(gate), torch.empty_like(gate)
        for g, u, s, o in in_strips(gate, up, silu, out):
            torch.mul(torch.ops.aten.silu.out(g, out=s), u, out=o)
        ctx.save_for_backward(gate, up, silu)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride] - torch passes one gradient per output
        gate, up, silu = ctx.saved_tensors
        grad_gate = torch.empty_like(gate)
        for d, g, u, s, into in in_strips(grad, gate, up, silu, grad_gate):
            torch.ops.aten.silu_backward.grad_input(torch.mul(d, u, out=into), g, grad_input=into)
            s.mul_(d)  # nobody else has it: it becomes the gradient of `up`
        return grad_gate, silu


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)  # as they came: all layers have these in common
        return _rotated(states, cos, _signed(sin))

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride] - torch passes one gradient per output
        cos, sin = ctx.saved_tensors
        return _rotated(grad, cos, -_signed(sin)), None, None


def _signed(sin: Tensor) -> Tensor:
    """Return it with its first half negative."""
    first, second = sin.chunk(2, -1)
    return torch.cat((-first, second), -1)


def _rotated(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[T, H, D]; the first half of `sin` is negative already."""
    out, half = torch.empty_like(states), states.shape[-1] // 2
    for part, c, s, into in in_strips(states, cos.unsqueeze(1), sin.unsqueeze(1), out):
        torch.cat((part[..., half:], part[..., :half]), -1, out=into)
        into.mul_(s).add_(part * c)  # not `addcmul`, which may round once less, by where a number lies
    return out
