"""The MLP with a gate, in place of transformers' own: the same arithmetic in fewer passes."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from rallypoint.families import FAMILIES
from rallypoint.models.layer_kernels import find_layer_kernels

CLASSES = frozenset(name for family in FAMILIES.values() for name in family.mlps)
"""Classes of transformers that compute the same."""


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, gate_proj: nn.Module, up_proj: nn.Module, down_proj: nn.Module) -> None:
        """Take over the projections of a model's own."""
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = gate_proj, up_proj, down_proj

    def forward(self, states: Tensor) -> Tensor:
        """[..., E] -> [..., E]."""
        return self.down_proj(swiglu(self.gate_proj(states), self.up_proj(states)))


def replaced_mlp(mlp: nn.Module) -> nn.Module:
    """Return an MLP of ours with the projections of one of transformers; that one if its activation is another."""
    if cast("Any", mlp).config.hidden_act != "silu":
        return mlp
    return GatedMLP(*(mlp.get_submodule(f"{part}_proj") for part in ("gate", "up", "down")))


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up (Shazeer, 2020, arXiv:2002.05202), once differentiable.

    >>> swiglu(torch.tensor([0.0, 20.0]), torch.tensor([3.0, 3.0]))
    tensor([ 0., 60.])
    """
    return _SwiGLU.apply(gate, up)  # pyright: ignore[reportReturnType] - `apply` is untyped


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        kernels = find_layer_kernels(gate)
        if kernels is not None:
            ctx.save_for_backward(gate, up)
            rows = (part.reshape(-1, part.shape[-1]) for part in (gate, up))
            return kernels.swiglu(*rows).view(gate.shape)
        silu = functional.silu(gate)
        ctx.save_for_backward(gate, up, silu)
        return silu * up

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride] - torch passes one gradient per output
        gate, up, *computed = ctx.saved_tensors  # once: recomputed activations allow no second look
        if (kernels := find_layer_kernels(gate)) is not None:
            rows = (part.reshape(-1, part.shape[-1]) for part in (grad, gate, up))
            of_gate, of_up = kernels.swiglu_gradient(*rows)
            return of_gate.view(gate.shape), of_up.view(up.shape)
        (silu,) = computed
        grad_gate = grad * up
        torch.ops.aten.silu_backward.grad_input(grad_gate, gate, grad_input=grad_gate)
        return grad_gate, silu.mul_(grad)  # nobody else has `silu`
