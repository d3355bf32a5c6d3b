"""The MLP with a gate: down(act(gate(x)) * up(x)) (arXiv 2002.05202)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Self

from rallypoint.families.family import Family
from rallypoint.families.kinds.kind import PerToken


def gated_products(hidden_size: int, width: int) -> Mapping[str, tuple[int, int]]:
    """Return the products of an MLP."""
    return dict.fromkeys(("gate_proj", "up_proj"), (hidden_size, width)) | {"down_proj": (width, hidden_size)}


@dataclasses.dataclass(frozen=True, slots=True)
class MLP(PerToken):
    """All tokens pass all of it."""

    intermediate_size: int

    @classmethod
    def read(cls, values: Mapping[str, Any], family: Family | None) -> Sequence[Self | None]:
        """Take all layers; none if there is no size, as where all have experts."""
        del family
        size = values.get("intermediate_size")
        layer = None if size is None else cls(int(values["hidden_size"]), int(size))
        return [layer] * int(values["num_hidden_layers"])

    @property
    def width(self) -> int:
        return self.intermediate_size

    @property
    def products(self) -> Mapping[str, tuple[int, int]]:
        return gated_products(self.hidden_size, self.intermediate_size)

    def shared(self, tp: int) -> Mapping[str, Mapping[str, int]]:
        del tp
        return {"tp": {"columns of the MLP": self.intermediate_size}}

    def part(self, tp: int, ep: int | None) -> Self:
        del ep
        return dataclasses.replace(self, intermediate_size=-(-self.intermediate_size // tp))
