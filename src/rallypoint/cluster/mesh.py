"""How the ranks of a group are arranged: a grid with named axes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True, slots=True)
class Mesh:
    """Ranks as the cells of a grid; the last axis varies fastest, as in torch's DeviceMesh.

    A batch is split over `ep` and the axes whose names begin with "dp". The ranks that differ on other axes only
    (`tp`, `sp`, `cp`) are peers: they get the same part, and the one at 0 on all of those axes, their leader,
    answers for them.

    >>> mesh = Mesh({"dp": 2, "tp": 2})
    >>> [mesh.coordinates(rank) for rank in range(4)]
    [{'dp': 0, 'tp': 0}, {'dp': 0, 'tp': 1}, {'dp': 1, 'tp': 0}, {'dp': 1, 'tp': 1}]
    >>> mesh.num_parts, [mesh.part(rank) for rank in range(4)], mesh.leaders
    (2, [0, 0, 1, 1], (0, 2))
    """

    axes: Mapping[str, int]
    """Axis name to size."""

    def __post_init__(self) -> None:
        wrong = [f"{name}={size}" for name, size in self.axes.items() if size < 1]
        if wrong or not self.axes:
            raise ValueError(f"a mesh needs axes of size 1 or more, found {', '.join(wrong) or 'none'}")

    @property
    def size(self) -> int:
        """Number of ranks."""
        return math.prod(self.axes.values())

    @property
    def num_parts(self) -> int:
        """Number of parts that a batch is split into."""
        return math.prod(size for name, size in self.axes.items() if _splits(name))

    @property
    def leaders(self) -> tuple[int, ...]:
        """The rank that answers for each part, in the order of the parts."""
        ranks = range(self.size)
        return tuple(
            rank for rank in ranks if all(at == 0 for name, at in self.coordinates(rank).items() if not _splits(name))
        )

    def sharing(self, part: int) -> list[int]:
        """Return the ranks that get a part of a batch, their leader first."""
        return [rank for rank in range(self.size) if self.part(rank) == part]

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the position of a rank on each axis."""
        found: dict[str, int] = {}
        for name, size in reversed(list(self.axes.items())):
            rank, found[name] = divmod(rank, size)
        return {name: found[name] for name in self.axes}

    def part(self, rank: int) -> int:
        """Return which part of a batch a rank gets."""
        index = 0
        for name, at in self.coordinates(rank).items():
            if _splits(name):
                index = index * self.axes[name] + at
        return index


def _splits(axis: str) -> bool:
    return axis.startswith("dp") or axis == "ep"
