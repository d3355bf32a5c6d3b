"""RMSNorm with a backward pass of its own, in place of what transformers makes of single operations.

Fewer passes over memory, half of what is kept for the backward pass, and float64 where the model is float64:
transformers' own rounds to float32 there, so that sums of gradients depend on which rows share a prompt's tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn import functional

from rallypoint.models.strips import in_strips

_SAME_FORMULA = ("LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm", "Qwen3MoeRMSNorm")
"""Classes of transformers that compute exactly this; Gemma's, for one, multiplies by 1 + weight."""


class _Context(FunctionCtx):
    """What the forward pass leaves for the backward one."""

    saved_tensors: tuple[Tensor, Tensor, Tensor]


class RMSNorm(nn.Module):
    """Zhang and Sennrich, 2019 (arXiv:1910.07467): x / sqrt(mean(x^2) + eps) * weight, over the last dim."""

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        """Take over the weight of a model's own norm.

        Args:
            weight: [E].
            eps: added to the mean square.
        """
        super().__init__()
        self.weight, self.eps = weight, eps

    def forward(self, states: Tensor) -> Tensor:
        """[..., E] -> [..., E], in the precision of the states; in between at least float32."""
        if states.device.type != "cpu":  # other backends have a kernel of their own
            return functional.rms_norm(states, self.weight.shape, self.weight, self.eps)
        return _RMSNorm.apply(states, self.weight, self.eps)  # pyright: ignore[reportReturnType] - `apply` is untyped


def replace_norms(model: nn.Module) -> None:
    """Put `RMSNorm` in the place of those norms of a transformers model that it equals; weights and names stay."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__ in _SAME_FORMULA and type(child).__module__.startswith("transformers."):
                setattr(parent, name, RMSNorm(child.weight, child.variance_epsilon))  # pyright: ignore[reportArgumentType] - known of these classes


class _RMSNorm(torch.autograd.Function):
    """With n = x * rsqrt(mean(x^2) + eps) and y = n * weight."""

    @staticmethod
    def forward(ctx: _Context, states: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = torch.promote_types(states.dtype, torch.float32)
        rows, wide_weight = states.reshape(-1, states.shape[-1]), weight.to(wide)
        out, scale = torch.empty_like(rows), rows.new_empty(len(rows), 1, dtype=wide)
        for part, length, into in in_strips(rows, scale, out):
            x = part.to(wide)
            torch.linalg.vector_norm(x, dim=-1, keepdim=True, out=length)
            length.square_().mul_(1 / rows.shape[-1]).add_(eps).rsqrt_()
            into.copy_(torch.mul(x, length).mul_(wide_weight))
        ctx.save_for_backward(states, weight, scale)
        return out.view(states.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride] - torch passes one gradient per output
        states, weight, scale = ctx.saved_tensors
        wide_weight = weight.to(scale.dtype)
        rows, grads = (tensor.reshape(-1, states.shape[-1]) for tensor in (states, grad))
        grad_states, grad_weight = torch.empty_like(rows), torch.zeros_like(wide_weight)
        for part, narrow, length, into in in_strips(grads, rows, scale, grad_states):
            x, scaled = narrow.to(scale.dtype), part * length
            products = scaled * x
            grad_weight += products.sum(0)
            # d n_i / d x_j = scale * (delta_ij - n_i n_j / E), and n = x * scale
            mean = (products @ wide_weight).unsqueeze(-1) * length.square().mul_(-1 / rows.shape[-1])
            into.copy_(scaled.mul_(wide_weight).addcmul_(x, mean))
        return grad_states.view(states.shape), grad_weight.to(weight.dtype), None
