"""Numbers that can be merged across micro-batches, ranks and mini-batches.

>>> first = Metrics({"actor/loss": Mean(6.0, 3)})
>>> second = Metrics({"actor/loss": Mean(2.0, 1), "actor/ratio_max": Maximum(1.5)})
>>> merge(first, second).scalars()
{'actor/loss': 2.0, 'actor/ratio_max': 1.5}
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Self


@dataclasses.dataclass(frozen=True, slots=True)
class Mean:
    """A weighted mean, kept as total and weight so that parts of different size add up correctly."""

    total: float
    weight: float

    @property
    def scalar(self) -> float:
        """The mean; NaN when nothing was counted."""
        return self.total / self.weight if self.weight else float("nan")

    def merge(self, other: Mean) -> Mean:
        """Add another part."""
        return Mean(self.total + other.total, self.weight + other.weight)


@dataclasses.dataclass(frozen=True, slots=True)
class Sum:
    """A count or amount that adds up."""

    scalar: float

    def merge(self, other: Sum) -> Sum:
        """Add another part."""
        return Sum(self.scalar + other.scalar)


@dataclasses.dataclass(frozen=True, slots=True)
class Maximum:
    """The largest value seen."""

    scalar: float

    def merge(self, other: Maximum) -> Maximum:
        """Keep the larger; NaN counts as largest, so that it is not lost."""
        if math.isnan(self.scalar) or math.isnan(other.scalar):
            return Maximum(math.nan)
        return Maximum(max(self.scalar, other.scalar))


@dataclasses.dataclass(frozen=True, slots=True)
class Minimum:
    """The smallest value seen."""

    scalar: float

    def merge(self, other: Minimum) -> Minimum:
        """Keep the smaller; NaN counts as smallest, so that it is not lost."""
        if math.isnan(self.scalar) or math.isnan(other.scalar):
            return Minimum(math.nan)
        return Minimum(min(self.scalar, other.scalar))


@dataclasses.dataclass(frozen=True, slots=True)
class Last:
    """A value that is the same everywhere, such as a learning rate; the latest counts."""

    scalar: float

    def merge(self, other: Last) -> Last:
        """Keep the later."""
        return other


@dataclasses.dataclass(frozen=True, slots=True)
class AtMaximum:
    """A number that belongs to the largest of others, such as the id of the token with the largest gap."""

    scalar: float
    of: float
    """The other number, which is compared."""

    def merge(self, other: AtMaximum) -> AtMaximum:
        """Keep that of the larger number, the first of equals; NaN counts as largest, as for `Maximum`."""
        if math.isnan(self.of) or self.of >= other.of:
            return self
        return other


Metric = Mean | Sum | Maximum | Minimum | Last | AtMaximum


class Metrics(Mapping[str, Metric]):
    """Named metrics of one call, one rank or one step; names are `role/what`."""

    def __init__(self, metrics: Mapping[str, Metric] | None = None) -> None:
        self._metrics = dict(metrics or {})

    def __getitem__(self, name: str) -> Metric:
        return self._metrics[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._metrics)

    def __len__(self) -> int:
        return len(self._metrics)

    def __repr__(self) -> str:
        return f"Metrics({self.scalars()})"

    def scalars(self) -> dict[str, float]:
        """Return one plain number per name."""
        return {name: metric.scalar for name, metric in self._metrics.items()}

    def prefixed(self, prefix: str) -> Metrics:
        """Return the metrics with a role's name in front, if they have none yet."""
        return Metrics({name if "/" in name else f"{prefix}/{name}": metric for name, metric in self._metrics.items()})

    @classmethod
    def join(cls, parts: Sequence[Self]) -> Metrics:
        """Merge the metrics of all ranks; dispatch calls it by this name."""
        return merge(*parts)


def merge(*parts: Mapping[str, Metric]) -> Metrics:
    """Merge metrics by name, each by its own rule.

    Raises:
        TypeError: one name stands for two kinds of metric.
    """
    merged: dict[str, Metric] = {}
    for part in parts:
        for name, metric in part.items():
            before = merged.get(name)
            if before is None:
                merged[name] = metric
            elif type(before) is type(metric):
                merged[name] = before.merge(metric)  # pyright: ignore[reportArgumentType]
            else:
                raise TypeError(f"{name}: cannot merge {type(before).__name__} with {type(metric).__name__}")
    return Metrics(merged)
