"""Attention and MLP of Llama and similar families, in place of transformers' own: the same arithmetic in fewer passes.

Owns: which modules are replaced and by what, and which of their weights are neighbours in memory. Must not know: what
rows are, or how weights are cut. A replacement has the submodules of the original under the same names, so that code
which reads, cuts or adapts a model works as before. Without `rows`, as in transformers' `generate`, its attention is
the original one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn import functional

from rallypoint.families import FAMILIES
from rallypoint.models.attention import AttentionRows
from rallypoint.models.kernels import find_kernels
from rallypoint.models.kinds.experts import replace_routers
from rallypoint.models.kinds.linear_attention import replace_linear_attentions
from rallypoint.models.layer_kernels import find_layer_kernels
from rallypoint.models.norm import replace_norms
from rallypoint.models.products import Limits

_MLPS = frozenset(name for family in FAMILIES.values() for name in family.mlps)
_WINDOWS = {name: window for family in FAMILIES.values() for name, window in family.attentions.items()}
"""Attention classes of transformers that differ only in their window; None for no window."""


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, gate_proj: nn.Module, up_proj: nn.Module, down_proj: nn.Module) -> None:
        """Take over the projections of a model's own."""
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = gate_proj, up_proj, down_proj

    def forward(self, states: Tensor) -> Tensor:
        """[..., E] -> [..., E]."""
        return self.down_proj(swiglu(self.gate_proj(states), self.up_proj(states)))


class _Attention(Protocol):
    """An attention module of transformers."""

    q_proj: nn.Module
    k_proj: nn.Module
    v_proj: nn.Module
    o_proj: nn.Module
    config: Any
    layer_idx: int
    head_dim: int
    scaling: float
    window: int | None

    def named_children(self) -> Any: ...


class _OnRows:
    """Mixed in before one of transformers' attention classes: computes attention over `rows`, if there are any."""

    def forward(
        self: _Attention,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        *args: Any,
        rows: AttentionRows | None = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """[1, T, E] -> [1, T, E], and no attention weights."""
        if rows is None:
            return super().forward(hidden_states, position_embeddings, *args, **options)
        shape = (hidden_states.shape[1], -1, self.head_dim)
        query, key, value = (project(hidden_states).view(shape) for project in (self.q_proj, self.k_proj, self.v_proj))
        norms = dict(self.named_children())
        if "q_norm" in norms:  # of Qwen3, head by head
            query, key = norms["q_norm"](query), norms["k_norm"](key)
        cos, sin = (part.squeeze(0) for part in position_embeddings)
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        out = rows.attend(self.layer_idx, query, key, value, self.scaling, Limits(self.window))
        return self.o_proj(out.reshape(*hidden_states.shape[:2], -1)), None


def replace_layers(model: nn.Module) -> None:
    """Replace the norms, routers, attentions and MLPs of a transformers model for which ours compute the same.

    Weights and names of modules stay.
    """
    replace_norms(model)
    replace_routers(model)
    replace_linear_attentions(model)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            kind = type(child)
            if not kind.__module__.startswith("transformers."):
                continue
            if kind.__name__ in _WINDOWS:
                setattr(parent, name, _on_rows(child))
            elif kind.__name__ in _MLPS and cast("Any", child).config.hidden_act == "silu":
                parts = (child.get_submodule(f"{part}_proj") for part in ("gate", "up", "down"))
                setattr(parent, name, GatedMLP(*parts))


def _on_rows(attention: nn.Module) -> nn.Module:
    """Return an attention of ours with the submodules of one of transformers."""
    own = cast("_Attention", attention)
    with torch.device("meta"):
        new = _class_on_rows(type(attention))(own.config, own.layer_idx)
    for name, child in attention.named_children():
        setattr(new, name, child)
    new.window = _WINDOWS[type(attention).__name__](attention)
    return new.train(attention.training)


@functools.cache
def _class_on_rows(attention: type[nn.Module]) -> Callable[..., Any]:
    return type(f"{attention.__name__}OnRows", (_OnRows, attention), {})


_SAME_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def allocate_joined(model: nn.Module, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the weights of layers with the same input, each with its part of a common buffer.

    One product then serves them all (`joined`). Each stays a parameter of its own. Sharded and adapted layers are left
    out.
    """
    for module in model.modules():
        children = dict(module.named_children())
        for names in _SAME_INPUT:
            weights = [child.weight for name in names if type(child := children.get(name)) is nn.Linear]
            if len(weights) != len(names) or not _fit_together(weights):
                continue
            first, sizes = weights[0], [len(weight) for weight in weights]
            memory = torch.empty(sum(sizes), *first.shape[1:], dtype=first.dtype, device=device)
            # `data`, because views would share one version counter.
            yield from zip(weights, (part.data for part in memory.split(sizes)), strict=True)


def joined(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return tensors as one along the first dim, without a copy; None if they are not neighbours in memory.

    >>> memory = torch.arange(6).view(3, 2)
    >>> joined([memory[:1], memory[1:]]).tolist()
    [[0, 1], [2, 3], [4, 5]]
    >>> joined([memory[1:], memory[:1]]) is None
    True
    """
    first, end = tensors[0], tensors[0].data_ptr()
    for tensor in tensors:
        if tensor.data_ptr() != end or not tensor.is_contiguous() or tensor.dtype != first.dtype:
            return None
        end += tensor.nbytes
    if first.untyped_storage().data_ptr() + first.untyped_storage().nbytes() < end:
        return None  # neighbours by chance, in different buffers
    return first.detach().as_strided((sum(map(len, tensors)), *first.shape[1:]), first.stride())


def _fit_together(weights: Sequence[Tensor]) -> bool:
    """Return whether weights are plain parameters that can be rows of one matrix."""
    kinds = {(type(weight), weight.dtype, weight.shape[1:]) for weight in weights}
    return len(kinds) == 1 and type(weights[0]) is nn.Parameter


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up (Shazeer, 2020, arXiv:2002.05202), once differentiable.

    >>> swiglu(torch.tensor([0.0, 20.0]), torch.tensor([3.0, 3.0]))
    tensor([ 0., 60.])
    """
    return _SwiGLU.apply(gate, up)  # pyright: ignore[reportReturnType] - `apply` is untyped


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


class _Context(FunctionCtx):
    """State between the forward and the backward pass."""

    saved_tensors: tuple[Tensor, ...]


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, gate: Tensor, up: Tensor) -> Tensor:
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
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride] - torch passes one gradient per output
        gate, up, *computed = ctx.saved_tensors  # once: recomputed activations allow no second look
        if (kernels := find_layer_kernels(gate)) is not None:
            rows = (part.reshape(-1, part.shape[-1]) for part in (grad, gate, up))
            of_gate, of_up = kernels.swiglu_gradient(*rows)
            return of_gate.view(gate.shape), of_up.view(up.shape)
        (silu,) = computed
        grad_gate = grad * up
        torch.ops.aten.silu_backward.grad_input(grad_gate, gate, grad_input=grad_gate)
        return grad_gate, silu.mul_(grad)  # nobody else has `silu`


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)  # unchanged: all layers share these tensors
        kernels = find_kernels(states)
        return _rotated(states, cos, _signed(sin)) if kernels is None else kernels.rotate(states, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride] - torch passes one gradient per output
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
