"""Latent attention (MLA, arXiv 2405.04434): keys and values of all heads are products of one latent of a token."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Self

from rallypoint.families.family import Family
from rallypoint.families.kinds.kind import Mixer


@dataclasses.dataclass(frozen=True, slots=True)
class LatentAttention(Mixer):
    """Every token attends to those before it, whose keys and values of each head are cached, filled up to one width."""

    num_heads: int
    query_rank: int
    """Size of the latent that queries are products of; 0 if they are products of the token itself."""
    rank: int
    """Size of the latent that keys and values are products of."""
    plain_dim: int
    """Width of the part of queries and keys that is not rotated."""
    rotated_dim: int
    """Width of the part that is, the same for the keys of all heads."""
    value_dim: int

    @classmethod
    def read(cls, values: Mapping[str, Any], family: Family | None) -> Sequence[Self | None]:
        num_layers = int(values["num_hidden_layers"])
        if family is None or not family.has_latents or "kv_lora_rank" not in values:
            return [None] * num_layers
        layer = cls(
            hidden_size=int(values["hidden_size"]),
            num_heads=int(values["num_attention_heads"]),
            query_rank=int(values.get("q_lora_rank") or 0),
            rank=int(values["kv_lora_rank"]),
            plain_dim=int(values["qk_nope_head_dim"]),
            rotated_dim=int(values["qk_rope_head_dim"]),
            value_dim=int(values["v_head_dim"]),
        )
        return [layer] * num_layers

    @classmethod
    def small(cls, values: Mapping[str, int], family: Family) -> Mapping[str, int]:
        if not family.has_latents:
            return {}
        head_dim, rank = values["hidden_size"] // values["num_attention_heads"], values["hidden_size"] // 2
        rotated = 2 * -(-head_dim // 4)  # which is what transformers calls the size of a head
        sizes = {"head_dim": rotated, "qk_nope_head_dim": head_dim, "qk_rope_head_dim": rotated, "v_head_dim": head_dim}
        return sizes | {"q_lora_rank": rank, "kv_lora_rank": rank}

    @property
    def _width(self) -> int:
        """All heads, each as wide as the wider of its key and its value."""
        return self.num_heads * max(self.plain_dim + self.rotated_dim, self.value_dim)

    @property
    def _latent_products(self) -> Mapping[str, tuple[int, int]]:
        hidden = self.hidden_size
        queries = {"q_a_proj": (hidden, self.query_rank)} if self.query_rank else {}
        return {**queries, "kv_a_proj_with_mqa": (hidden, self.rank + self.rotated_dim)}

    @property
    def products(self) -> Mapping[str, tuple[int, int]]:
        heads, query = self.num_heads, self.num_heads * (self.plain_dim + self.rotated_dim)
        queries = {"q_b_proj": (self.query_rank, query)} if self.query_rank else {"q_proj": (self.hidden_size, query)}
        return {
            **self._latent_products,
            **queries,
            "kv_b_proj": (self.rank, heads * (self.plain_dim + self.value_dim)),
            "o_proj": (heads * self.value_dim, self.hidden_size),
        }

    @property
    def num_parameters(self) -> int:
        return self.token_cost + self.query_rank + self.rank

    @property
    def num_uncut_parameters(self) -> int:
        return sum(inputs * outputs for inputs, outputs in self._latent_products.values())

    @property
    def pair_cost(self) -> int:
        return self.num_heads * (self.plain_dim + self.rotated_dim + self.value_dim)

    @property
    def head_dims(self) -> frozenset[int]:
        return frozenset({self._width // self.num_heads})

    def shared(self, tp: int) -> Mapping[str, Mapping[str, int]]:
        of_rank = {"attention heads of a tp rank": self.num_heads // tp}
        return {"tp": {"attention heads": self.num_heads}, "sp": of_rank}

    def part(self, tp: int, ep: int | None) -> Self:
        del ep
        return dataclasses.replace(self, num_heads=-(-self.num_heads // tp))

    def cached_bytes(self, size: int) -> int:
        return 2 * size * self._width

    def served_bytes(self, size: int) -> int:
        """Bytes of the latent, and of the part of keys that is rotated."""
        return size * (self.rank + self.rotated_dim)

    def kept_bytes(self, size: int) -> int:
        """Bytes of what it returns, and of latents after their norms."""
        return size * (self.num_heads * self.value_dim + self.query_rank + self.rank)

    def norm_bytes(self, size: int) -> int:
        """Bytes of norms of latents: their input and a float32."""
        return size * (self.query_rank + self.rank) + 2 * 4

    def attended_bytes(self, size: int, num_scores: int) -> int:
        """Bytes of query, key, value, and scores."""
        return size * (3 * self._width + self.num_heads * num_scores)

    def attending_bytes(self, size: int) -> int:
        """Bytes of query, key and value."""
        return size * 3 * self._width

    def folded_bytes(self, size: int, num_scores: int, num_block_scores: int) -> int:
        """Bytes of query, key, value, the output, and shares."""
        return size * (4 * self._width + self.num_heads * (num_scores + num_block_scores))

    def position_bytes(self, size: int) -> int:
        """Bytes of cosines and sines."""
        return 2 * size * self.rotated_dim
