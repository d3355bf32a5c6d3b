"""The attention and the MLP of Llama and its kin, in place of transformers' own: the same arithmetic, fewer passes.

Owns: which modules are replaced, and by what. Must not know: rows, gradients, or how weights are cut. A replacement has
the submodules of what it replaces, by the same names, so that whatever reads, cuts or adapts a model works as before;
without rows of ours, as in transformers' `generate`, its attention is what it was.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from rallypoint.families import FAMILIES
from rallypoint.models.attention import Limits, Rows
from rallypoint.models.experts import replace_routers
from rallypoint.models.norm import replace_norms
from rallypoint.models.pointwise import rotate, swiglu

_MLPS = frozenset(name for family in FAMILIES.values() for name in family.mlps)
_WINDOWS = {name: window for family in FAMILIES.values() for name, window in family.attentions.items()}
"""Attentions of transformers that differ in this only: how far a token looks back; None for all before it."""


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
    """What transformers calls an attention."""

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
    """Before one of transformers' attentions among the bases of a class: does its work where there are rows."""

    def forward(
        self: _Attention,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        *args: Any,
        rows: Rows | None = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """[1, T, E] -> [1, T, E], and no weights of the attention."""
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
    """Put our norms, routers, attentions and MLPs in the place of those of a transformers model that they equal.

    Weights stay, and so do the names of everything that has some.
    """
    replace_norms(model)
    replace_routers(model)
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
    """Return an attention with the submodules of one of transformers', and our way through them."""
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
    """Yield the weights of layers of one input, each with its part of memory that they have in common.

    What is sharded or adapted is left out: it is computed by other means.
    """
    for module in model.modules():
        children = dict(module.named_children())
        for names in _SAME_INPUT:
            weights = [child.weight for name in names if type(child := children.get(name)) is nn.Linear]
            if len(weights) != len(names) or not _fit_together(weights):
                continue
            first, sizes = weights[0], [len(weight) for weight in weights]
            memory = torch.empty(sum(sizes), *first.shape[1:], dtype=first.dtype, device=device)
            # `data`, as the versions of views would be counted as one.
            yield from zip(weights, (part.data for part in memory.split(sizes)), strict=True)


def joined(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return tensors as one along the first dim, without a copy; None where they do not lie behind one another.

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
        return None  # neighbours by chance
    return first.detach().as_strided((sum(map(len, tensors)), *first.shape[1:]), first.stride())


def _fit_together(weights: Sequence[Tensor]) -> bool:
    """Say whether weights are plain, and rows of one matrix."""
    kinds = {(type(weight), weight.dtype, weight.shape[1:]) for weight in weights}
    return len(kinds) == 1 and type(weights[0]) is nn.Parameter
