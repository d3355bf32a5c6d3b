"""Attention with heads of queries that share heads of keys and values (GQA, arXiv 2305.13245)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Self

from rallypoint.families.family import Family
from rallypoint.families.kinds.kind import Mixer


@dataclasses.dataclass(frozen=True, slots=True)
class Attention(Mixer):
    """Every token attends to those before it, whose keys and values are cached."""

    num_heads: int
    num_key_value_heads: int
    head_dim: int
    norms_heads: bool = False
    """Whether queries and keys are normalized."""
    is_gated: bool = False
    """Whether what comes out of it has a gate, which is computed with the queries."""
    caps_scores: bool = False
    """Whether scores are bent to stay below a bound, which no fused kernel knows."""
    has_sinks: bool = False
    """Whether each head has the score of one more key, which of these kernels only flash attention can take."""
    has_biases: bool = False
    """Whether its products have biases that count: all four."""

    @classmethod
    def read(cls, values: Mapping[str, Any], family: Family | None) -> Sequence[Self]:
        heads, hidden = int(values["num_attention_heads"]), int(values["hidden_size"])
        layer = cls(
            hidden_size=hidden,
            num_heads=heads,
            num_key_value_heads=int(values.get("num_key_value_heads") or heads),
            head_dim=int(values.get("head_dim") or hidden // heads),
            norms_heads=bool(values.get("use_qk_norm", family is not None and family.norms_heads)),
            is_gated=bool(values.get("attn_output_gate", family is not None and family.gates_attention)),
            caps_scores=bool(values.get("attn_logit_softcapping")),
            has_sinks=family is not None and family.has_sinks,
            has_biases=family is not None and family.has_biases,
        )
        return [layer] * int(values["num_hidden_layers"])

    @classmethod
    def small(cls, values: Mapping[str, int], family: Family) -> Mapping[str, int]:
        del family
        return {"head_dim": values["hidden_size"] // values["num_attention_heads"]}

    @property
    def _query(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def _key_value(self) -> int:
        return self.num_key_value_heads * self.head_dim

    @property
    def products(self) -> Mapping[str, tuple[int, int]]:
        hidden = self.hidden_size
        return {
            "q_proj": (hidden, self._query * (1 + self.is_gated)),
            "k_proj": (hidden, self._key_value),
            "v_proj": (hidden, self._key_value),
            "o_proj": (self._query, hidden),
        }

    @property
    def num_parameters(self) -> int:
        biases = (self._query + 2 * self._key_value + self.hidden_size) * self.has_biases
        return self.token_cost + 2 * self.head_dim * self.norms_heads + biases + self.num_heads * self.has_sinks

    @property
    def pair_cost(self) -> int:
        return 2 * self._query  # a score, and a share of a value

    @property
    def head_dims(self) -> frozenset[int]:
        return frozenset({self.head_dim})

    def has_fused_kernel(self, *, has_flash: bool) -> bool:
        return not self.caps_scores and (has_flash or not self.has_sinks)

    def shared(self, tp: int) -> Mapping[str, Mapping[str, int]]:
        heads = {"attention heads": self.num_heads, "key/value heads": self.num_key_value_heads}
        return {"tp": heads, "sp": {"attention heads of a tp rank": self.num_heads // tp}}

    def part(self, tp: int, ep: int | None) -> Self:
        del ep
        heads, key_value_heads = -(-self.num_heads // tp), -(-self.num_key_value_heads // tp)
        return dataclasses.replace(self, num_heads=heads, num_key_value_heads=key_value_heads)

    def cached_bytes(self, size: int) -> int:
        return 2 * size * self._key_value

    def kept_bytes(self, size: int) -> int:
        """Bytes of what it returns, and its gate."""
        return size * self._query * (1 + self.is_gated)

    def norm_bytes(self, size: int) -> int:
        """Bytes of norms of heads: their input and a float32; what these return is not kept."""
        norms = (self._query + self._key_value) * size + (self.num_heads + self.num_key_value_heads) * 4
        return norms * self.norms_heads

    def attended_bytes(self, size: int, num_scores: int) -> int:
        """Bytes of query, key, value, and scores."""
        return size * (self._query + 2 * self._key_value + self.num_heads * num_scores)

    def attending_bytes(self, size: int) -> int:
        """Bytes of query, key and value."""
        return size * (self._query + 2 * self._key_value)

    def folded_bytes(self, size: int, num_scores: int, num_block_scores: int) -> int:
        """Bytes of query, key, value, the output, and shares."""
        of_heads = self.num_heads * (num_scores + num_block_scores)
        return size * (2 * self._query + 2 * self._key_value + of_heads)

    def position_bytes(self, size: int) -> int:
        """Bytes of cosines and sines."""
        return 2 * size * self.head_dim
