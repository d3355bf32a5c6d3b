"""Linear layers of one input, whose weights lie behind one another in memory, so that one product serves them all.

Owns: which layers those are, and the view of all their weights as one. Must not know: who computes with it. Every
weight stays a parameter of its own; whoever moves one elsewhere gets separate products again, and nothing breaks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

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
