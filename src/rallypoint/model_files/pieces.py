"""The tensors in files that a weight consists of, and the rectangle of it that each of them fills.

Must not know: families, and how files name what a model has. Imported where only torch is certain.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import TypeAlias

from torch import Tensor

from rallypoint.models.part import Part


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """A tensor in a file, and the rectangle of a weight that it fills."""

    tensor: str
    part: Part
    """Rectangle of the weight."""
    stored: Part
    """Rectangle of the tensor in the file, with as many elements; of the same sizes, or all of the tensor."""

    def place(self, within: Part) -> Part:
        """Return where a rectangle within `part` is in the file.

        >>> weight = Part.whole([6, 4])
        >>> piece = Piece("qkv", weight.rows(2, 4), Part.whole([6, 4]).rows(0, 2))
        >>> piece.place(weight.rows(3, 4))
        Part(shape=(6, 4), starts=(1, 0), sizes=(1, 4))
        """
        seen = within.seen_from(self.part)
        if self.stored.is_whole:
            return seen
        starts = tuple(map(operator.add, self.stored.starts, seen.starts))
        return Part(self.stored.shape, starts, seen.sizes)


Sources: TypeAlias = Callable[[str, Sequence[int]], Sequence[Piece]]
"""(name of a weight, its whole shape) -> the pieces that fill it without overlap, in the order of their file."""


def same_names(name: str, shape: Sequence[int]) -> Sequence[Piece]:
    """Return the single piece of a weight that is stored under its own name.

    >>> same_names("norm.weight", [16])  # doctest: +NORMALIZE_WHITESPACE
    [Piece(tensor='norm.weight', part=Part(shape=(16,), starts=(0,), sizes=(16,)),
           stored=Part(shape=(16,), starts=(0,), sizes=(16,)))]
    """
    return [Piece(name, Part.whole(shape), Part.whole(shape))]


def stored_tensors(sources: Sources, name: str, weight: Tensor) -> dict[str, Tensor]:
    """Return the tensors in files that a whole weight becomes."""
    found: dict[str, Tensor] = {}
    for piece in sources(name, weight.shape):
        values = weight.detach()[piece.part.within(Part.whole(weight.shape))]
        if piece.stored.is_whole:
            found[piece.tensor] = values.reshape(piece.stored.shape).contiguous()
            continue
        into = found.setdefault(piece.tensor, weight.new_empty(piece.stored.shape))
        into[piece.stored.within(Part.whole(piece.stored.shape))] = values
    return found
