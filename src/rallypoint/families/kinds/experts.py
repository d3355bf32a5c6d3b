"""A mixture of experts: each token passes those that a router chooses, and an MLP beside them where there is one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

from rallypoint.families.family import Family
from rallypoint.families.kinds.kind import PerToken
from rallypoint.families.kinds.mlp import gated_products


@dataclasses.dataclass(frozen=True, slots=True)
class Experts(PerToken):
    """Experts are MLPs with a gate. What stands beside them is one, too."""

    num_experts: int
    num_chosen: int
    """Experts that a token is sent to."""
    size: int
    """Width inside an expert."""
    shared_size: int = 0
    """Width inside the MLP beside them, which all tokens pass; 0 for none."""
    gates_shared: bool = False
    """Whether each token has a gate for that MLP."""
    has_biases: bool = False
    """Whether experts and their router have biases."""

    served_faster: ClassVar[str | None] = "its experts"

    @classmethod
    def read(cls, values: Mapping[str, Any], family: Family | None) -> Sequence[Self | None]:
        """Read the fields as Qwen, DeepSeek, GLM and gpt-oss name them; None for each dense layer."""
        layers = range(int(values["num_hidden_layers"]))
        names = ("num_experts", "num_local_experts", "n_routed_experts")
        if not (num_experts := next((values[name] for name in names if values.get(name)), None)):
            return [None] * len(layers)
        size = int(values.get("moe_intermediate_size") or values["intermediate_size"])
        layer = cls(
            hidden_size=int(values["hidden_size"]),
            num_experts=int(num_experts),
            num_chosen=int(values["num_experts_per_tok"]),
            size=size,
            shared_size=int(
                values.get("shared_expert_intermediate_size") or size * (values.get("n_shared_experts") or 0)
            ),
            gates_shared=bool(values.get("shared_expert_intermediate_size")),
            has_biases=family is not None and family.has_biases,
        )
        dense, every = values.get("mlp_only_layers") or (), int(values.get("decoder_sparse_step") or 1)
        first = int(values.get("first_k_dense_replace") or 0)
        return [layer if at >= first and at not in dense and (at + 1) % every == 0 else None for at in layers]

    @classmethod
    def small(cls, values: Mapping[str, int], family: Family) -> Mapping[str, int]:
        quarter = max(1, values["intermediate_size"] // 4)
        fields = {name: quarter if size == "quarter" else size for name, size in family.small_experts.items()}
        if "first_k_dense_replace" in fields:  # one layer at least has experts
            fields["first_k_dense_replace"] = min(fields["first_k_dense_replace"], values["num_hidden_layers"] - 1)
        return fields

    @property
    def products(self) -> Mapping[str, tuple[int, int]]:
        gate = {"shared_expert_gate": (self.hidden_size, 1)} if self.gates_shared else {}
        return {**gated_products(self.hidden_size, self.shared_size), **gate} if self.shared_size else {}

    @property
    def stacks(self) -> Mapping[str, tuple[int, int, int]]:
        return {
            "gate_up_proj": (self.num_experts, self.hidden_size, 2 * self.size),
            "down_proj": (self.num_experts, self.size, self.hidden_size),
        }

    @property
    def width(self) -> int:
        return self.num_chosen * self.size + self.shared_size

    @property
    def token_cost(self) -> int:
        return self.hidden_size * (3 * self.width + self.num_experts + self.gates_shared)

    @property
    def num_parameters(self) -> int:
        expert = 3 * self.size * self.hidden_size + (2 * self.size + self.hidden_size) * self.has_biases
        of_router = self.hidden_size + self.has_biases
        beside = self.hidden_size * (3 * self.shared_size + self.gates_shared)
        return self.num_experts * (expert + of_router) + beside

    def num_idle(self, num_tokens: int) -> float:
        is_idle = (1 - self.num_chosen / self.num_experts) ** num_tokens
        return is_idle * self.num_experts * 3 * self.size * self.hidden_size

    def shared(self, tp: int) -> Mapping[str, Mapping[str, int]]:
        beside = {"columns of the MLP beside experts": self.shared_size} if self.shared_size else {}
        of_rank = {"experts of a tp rank": self.num_experts // tp}
        return {"tp": {"experts": self.num_experts} | beside, "ep": of_rank}

    def of_ep_rank(self, ep: int) -> Self:
        return dataclasses.replace(self, num_experts=self.num_experts // ep)

    def part(self, tp: int, ep: int | None) -> Self:
        """Each rank of `tp` has some experts: their part of the work on average, or room for all of it."""
        cut = dataclasses.replace(self, shared_size=-(-self.shared_size // tp))
        if ep is not None:
            return dataclasses.replace(cut, num_chosen=self.num_chosen * ep)
        return dataclasses.replace(cut, size=-(-self.size // tp))
