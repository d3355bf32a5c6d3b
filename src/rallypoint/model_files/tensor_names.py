"""The names of weights in Hugging Face files, and the tensors that a weight consists of there.

Most families store every weight under its own name. The experts of a layer are one tensor in memory; in files they are
that, or one or two tensors for each expert.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from transformers import PreTrainedModel

from rallypoint.families import FAMILIES
from rallypoint.models.lora import is_adapter_weight
from rallypoint.models.part import Part


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """A tensor in a file, and the rectangle of a weight that it fills."""

    tensor: str
    part: Part
    """Rectangle of the weight."""
    stored_shape: tuple[int, ...]
    """Shape in the file, with as many elements as the rectangle."""


Sources: TypeAlias = Callable[[str, Sequence[int]], Sequence[Piece]]
"""(name of a weight, its whole shape) -> the pieces that fill it without overlap."""


def same_names(name: str, shape: Sequence[int]) -> Sequence[Piece]:
    """Return the single piece of a weight that is stored under its own name.

    >>> same_names("norm.weight", [16])
    [Piece(tensor='norm.weight', part=Part(shape=(16,), starts=(0,), sizes=(16,)), stored_shape=(16,))]
    """
    return [Piece(name, Part.whole(shape), tuple(shape))]


def experts_apart(matrices: Mapping[str, Sequence[str]], name: str, shape: Sequence[int]) -> Sequence[Piece]:
    """Return the pieces of a weight in a family that stores each expert's matrices separately.

    >>> qwen = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
    >>> [piece.tensor for piece in experts_apart(qwen, "mlp.experts.gate_up_proj", [2, 8, 4])]
    ... # doctest: +NORMALIZE_WHITESPACE
    ['mlp.experts.0.gate_proj.weight', 'mlp.experts.0.up_proj.weight',
     'mlp.experts.1.gate_proj.weight', 'mlp.experts.1.up_proj.weight']

    Args:
        matrices: see `Family.stored_experts`.
        name: of the weight.
        shape: of the whole weight.
    """
    layer, _, kind = name.rpartition(".experts.")
    stored = matrices.get(kind) if layer else None
    if stored is None:
        return same_names(name, shape)
    return [
        Piece(
            f"{layer}.experts.{expert}.{matrix}.weight",
            Part.whole(shape).rows(expert, expert + 1).cut(1, index, len(stored)),
            (shape[1] // len(stored), shape[2]),
        )
        for expert in range(shape[0])
        for index, matrix in enumerate(stored)
    ]


def sources_of(model: PreTrainedModel) -> Sources:
    """Return the names of a model's weights in the files that are written; adapters have files of their own."""
    return forms_of(model)[0]


def forms_of(model: PreTrainedModel) -> Sequence[Sources]:
    """Return the names of a model's weights in all files that can be read, those that are written first."""
    family = FAMILIES.get(str(model.config.model_type))
    matrices = {} if family is None else family.stored_experts

    def stacked(name: str, shape: Sequence[int]) -> Sequence[Piece]:
        return () if is_adapter_weight(name) else same_names(name, shape)

    def apart(name: str, shape: Sequence[int]) -> Sequence[Piece]:
        return () if is_adapter_weight(name) else experts_apart(matrices, name, shape)

    if not matrices:
        return [stacked]
    return [stacked, apart] if family is not None and family.stacks_experts else [apart, stacked]
