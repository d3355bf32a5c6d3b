"""Attention with cached keys and values, in place of transformers' own: the same arithmetic in fewer passes.

Must not know: what rows are (`AttentionRows`), or how weights are cut. Without `rows`, as in transformers' `generate`,
it is the original one.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rallypoint.families import FAMILIES
from rallypoint.models.attention import AttentionRows
from rallypoint.models.kernels import find_kernels
from rallypoint.models.products import Limits

CLASSES = {name: window for family in FAMILIES.values() for name, window in family.attentions.items()}
"""Classes of transformers that differ only in their window -> the attribute with it; None for no window."""


class _OnRows:
    """Mixed in before one of transformers' attention classes: computes attention over `rows`, if there are any."""

    def forward(
        self: Any,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        *args: Any,
        rows: AttentionRows | None = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """[1, T, E] -> [1, T, E], and no attention weights."""
        if rows is None:
            return super().forward(hidden_states, position_embeddings, *args, **options)  # pyright: ignore[reportAttributeAccessIssue] - of the other base
        shape = (hidden_states.shape[1], -1, self.head_dim)
        query, key, value = (project(hidden_states).view(shape) for project in (self.q_proj, self.k_proj, self.v_proj))
        norms = dict(self.named_children())
        if "q_norm" in norms:  # of Qwen3, head by head
            query, key = norms["q_norm"](query), norms["k_norm"](key)
        cos, sin = (part.squeeze(0) for part in position_embeddings)
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        out = rows.attend(self.layer_idx, query, key, value, self.scaling, Limits(self.window))
        return self.o_proj(out.reshape(*hidden_states.shape[:2], -1)), None


def replaced_attention(attention: nn.Module) -> nn.Module:
    """Return an attention of ours with the submodules of one of transformers."""
    own: Any = attention
    with torch.device("meta"):
        new = _class_on_rows(type(attention))(own.config, own.layer_idx)
    for name, child in attention.named_children():
        setattr(new, name, child)
    window = CLASSES[type(attention).__name__]
    new.window = None if window is None else operator.attrgetter(window)(attention)
    return new.train(attention.training)


@functools.cache
def _class_on_rows(attention: type[nn.Module]) -> Callable[..., Any]:
    return type(f"{attention.__name__}OnRows", (_OnRows, attention), {})


def rotate(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return states rotated by the angle of their position (Su et al., 2021, arXiv:2104.09864), once differentiable.

    A number in the first half of a head and its counterpart in the second half are a point in a plane:

        y1 = x1 * cos - x2 * sin        y2 = x2 * cos + x1 * sin

    >>> rotate(torch.tensor([[[3.0, 4.0]]]), torch.zeros(1, 2), torch.ones(1, 2))  # a right angle
    tensor([[[-4.,  3.]]])

    Args:
        states: [T, H, D].
        cos: [T, D], two equal halves; without gradient.
        sin: likewise.
    """
    return _Rotation.apply(states, cos, sin)  # pyright: ignore[reportReturnType] - `apply` is untyped


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)  # unchanged: all layers share these tensors
        kernels = find_kernels(states)
        return _rotated(states, cos, _signed(sin)) if kernels is None else kernels.rotate(states, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride] - torch passes one gradient per output
        cos, sin = ctx.saved_tensors
        kernels = find_kernels(grad)
        if kernels is not None:
            return kernels.rotate(grad, cos, sin, backwards=True), None, None
        return _rotated(grad, cos, -_signed(sin)), None, None


def _signed(sin: Tensor) -> Tensor:
    """Return the sine with its first half negated."""
    first, second = sin.chunk(2, -1)
    return torch.cat((-first, second), -1)


def _rotated(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[T, H, D]; the first half of `sin` is negated already."""
    first, second = states.chunk(2, -1)
    out = torch.cat((second, first), -1).mul_(sin.unsqueeze(1))
    return out.add_(states * cos.unsqueeze(1))  # `addcmul` may round once less, depending on a number's address
