"""The layers of a model in place of transformers' own, kind by kind, and weights that are neighbours in memory.

Owns: which modules are replaced. Must not know: what a kind computes, or how weights are cut. A replacement has the
submodules of the original under the same names, so that code which reads, cuts or adapts a model works as before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from rallypoint.models.kinds import attention, mlp
from rallypoint.models.kinds.experts import replace_routers
from rallypoint.models.kinds.linear_attention import replace_linear_attentions
from rallypoint.models.norm import replace_norms

_REPLACED: Mapping[str, Callable[[nn.Module], nn.Module]] = {
    **dict.fromkeys(attention.CLASSES, attention.replaced_attention),
    **dict.fromkeys(mlp.CLASSES, mlp.replaced_mlp),
}
"""Classes of transformers -> what makes one of ours of a module."""


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
            if kind.__name__ in _REPLACED and kind.__module__.startswith("transformers."):
                setattr(parent, name, _REPLACED[kind.__name__](child))


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
