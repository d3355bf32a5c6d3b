"""Low-rank updates of experts: each matrix of a stack has one of its own (LoRA, arXiv 2106.09685).

Owns: the weights of the updates, their products, and where they are in a model. Must not know: which experts are
adapted, files, or who trains. The sum of a matrix and its update is never made in a pass.

The experts of a layer keep their weights; their updates are beside them, under names of their own:

    mlp.experts.gate_up_proj                        [X, 2 * I, E]
    mlp.experts.lora.gate_up_proj.lora_A.weight     [X, rank, E]
    mlp.experts.lora.gate_up_proj.lora_B.weight     [X, 2 * I, rank]
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

MATRICES = ("gate_up_proj", "down_proj")
"""Stacks of an expert's matrices, in the order of transformers' modules."""
_UPDATES = "lora"
"""Name of the module with the updates of the experts of a layer."""
_GROUPED_BYTES = 16
"""Rows of grouped products are whole multiples of this."""

Factors: TypeAlias = tuple[Tensor, Tensor, float]
"""A [rank, M], B [N, rank] and the scaling of their product."""


def scaling_of(rank: int, alpha: float, *, rslora: bool) -> float:
    """Return the factor of an update: alpha / rank, or alpha / sqrt(rank) (arXiv 2312.03732).

    >>> scaling_of(4, 8.0, rslora=False), scaling_of(4, 8.0, rslora=True)
    (2.0, 4.0)
    """
    return alpha / (math.sqrt(rank) if rslora else rank)


class _Stack(nn.Module):
    """A matrix for each expert."""

    def __init__(self, shape: Sequence[int], like: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(*shape, dtype=like.dtype, device=like.device))


class LoRAExperts(nn.Module):
    """The updates of a stack of X matrices W [N, M]: W + scaling B A with A [X, rank, M] and B [X, N, rank]."""

    def __init__(self, weight: Tensor, *, is_transposed: bool, rank: int, alpha: float, rslora: bool) -> None:
        """Make updates whose weights are uninitialized.

        Args:
            weight: [X, N, M], or [X, M, N] if transposed.
            is_transposed: whether its matrices lie the other way.
            rank: of the updates.
            alpha: the numerator of the scaling.
            rslora: whether the scaling falls with the root of the rank only.
        """
        super().__init__()
        num_experts, outputs, inputs = weight.mT.shape if is_transposed else weight.shape
        self.is_transposed, self.rank, self.alpha, self.rslora = is_transposed, rank, alpha, rslora
        self.lora_A = _Stack([num_experts, rank, inputs], weight)
        self.lora_B = _Stack([num_experts, outputs, rank], weight)

    @property
    def scaling(self) -> float:
        """Factor of the updates."""
        return scaling_of(self.rank, self.alpha, rslora=self.rslora)

    def factors(self) -> list[Factors]:
        """Return those of each expert; unbound, so that each gradient is allocated once."""
        both = zip(self.lora_A.weight.unbind(), self.lora_B.weight.unbind(), strict=True)
        return [(a, b, self.scaling) for a, b in both]

    def grouped(self, states: Tensor, ends: Tensor) -> Tensor:
        """Return the products of all experts without the scaling: [T, M] -> [T, N].

        Args:
            states: grouped by experts.
            ends: [X] int32, of their groups. What is after the last one is not defined.
        """
        a, b = self.lora_A.weight, self.lora_B.weight
        if missing := -self.rank % (_GROUPED_BYTES // a.itemsize):
            a, b = functional.pad(a, (0, 0, 0, missing)), functional.pad(b, (0, missing))
        low = functional.grouped_mm(states, a.mT, offs=ends)
        return functional.grouped_mm(low, b.mT, offs=ends)

    @torch.no_grad()
    def merged(self, weight: Tensor) -> Tensor:
        """Return the sums of matrices and updates in the matrices' type; computed as `LoRALinear.merged` does."""
        exact, found = torch.promote_types(weight.dtype, torch.float32), torch.empty_like(weight)
        for into, matrix, (a, b, scaling) in zip(found, weight, self.factors(), strict=True):
            update = b.to(exact) @ a.to(exact)
            into.copy_(matrix.to(exact) + scaling * (update.T if self.is_transposed else update))
        return found

    def extra_repr(self) -> str:  # noqa: D102
        return f"rank={self.rank}, scaling={self.scaling:g}"


def add_update(experts: nn.Module, matrix: str, update: LoRAExperts) -> None:
    """Put an update beside the experts of a layer."""
    if _UPDATES not in experts._modules:
        experts.add_module(_UPDATES, nn.ModuleDict())
    cast("nn.ModuleDict", experts._modules[_UPDATES])[matrix] = update


def update_name(experts: str, matrix: str) -> str:
    """Return the name of an update.

    >>> update_name("mlp.experts", "down_proj")
    'mlp.experts.lora.down_proj'
    """
    return f"{experts}.{_UPDATES}.{matrix}"


def updated_weight(name: str) -> str:
    """Return the name of the weight that an update is beside.

    >>> updated_weight("mlp.experts.lora.down_proj")
    'mlp.experts.down_proj'
    """
    experts, _, matrix = name.rpartition(f".{_UPDATES}.")
    return f"{experts}.{matrix}"


def update_of(experts: nn.Module, matrix: str) -> LoRAExperts | None:
    """Return the update of a stack of matrices; None if it has none."""
    updates = experts._modules.get(_UPDATES)
    return None if updates is None else cast("LoRAExperts | None", updates._modules.get(matrix))


def do_products_aside(model: nn.Module) -> None:
    """Have all experts do the products of their updates on numbers that do not matter, beside code that knows none."""

    def count(experts: nn.Module, args: tuple[Tensor, Tensor, Tensor], output: Tensor) -> Tensor:
        for update in (update_of(experts, matrix) for matrix in MATRICES):
            if update is not None:
                a, b, _ = update.factors()[0]
                rows = output.new_zeros(args[1].numel(), a.shape[1], requires_grad=True)
                output = output + (rows @ a.T @ b.T).sum()
        return output

    for module in model.modules():
        if _UPDATES in module._modules:
            module.register_forward_hook(count)


def merged_updates(experts: nn.Module) -> dict[str, Tensor]:
    """Return the weights that have updates, by matrix, with these added."""
    updates = {matrix: update_of(experts, matrix) for matrix in MATRICES}
    return {
        matrix: update.merged(experts.get_parameter(matrix)) for matrix, update in updates.items() if update is not None
    }


def remove_updates(experts: nn.Module) -> None:
    """Take all updates away."""
    experts._modules.pop(_UPDATES, None)
