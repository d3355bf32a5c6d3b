"""The workers of `benchmarks/cluster.py`.

In a module of their own, because Ray ships what a program defines in its main file anew with every call.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Self

import numpy as np

from rallypoint.cluster import WorkerContext, broadcast, collect, shard


@dataclasses.dataclass
class Flat:
    """The simplest carrier: one flat buffer."""

    values: np.ndarray

    def split(self, num_parts: int) -> list[Flat]:
        """Cut into views."""
        return [Flat(part) for part in np.array_split(self.values, num_parts)]

    @classmethod
    def join(cls, parts: Sequence[Self]) -> Self:
        """Copy into one buffer."""
        return cls(np.concatenate([part.values for part in parts]))


class Echo:
    """Ours."""

    def __init__(self, context: WorkerContext) -> None:
        del context
        self.kept = np.zeros(0)

    @broadcast
    def nothing(self) -> None:
        """Answer at once."""

    @shard
    def echo(self, batch: Flat) -> Flat:
        return batch

    @shard
    def keep(self, batch: Flat) -> None:
        self.kept = batch.values

    @collect
    def parts(self) -> np.ndarray:
        return self.kept


class Plain:
    """Theirs: what one would write with Ray alone."""

    def nothing(self) -> None:
        """Answer at once."""

    def echo(self, values: np.ndarray) -> np.ndarray:
        return values
