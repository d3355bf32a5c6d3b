"""Linear attention by the gated delta rule (arXiv 2412.06464), as in Qwen3-Next and Qwen3.5."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

from rallypoint.families.family import Family
from rallypoint.families.kinds.kind import Mixer


@dataclasses.dataclass(frozen=True, slots=True)
class LinearAttention(Mixer):
    """A state of fixed size, which every token changes and reads, after a convolution."""

    num_keys: int
    """Heads of queries and keys."""
    num_values: int
    key_dim: int
    value_dim: int
    width: int
    """Tokens that the convolution sees."""
    joins_inputs: bool = False
    """Whether two products make of a token what four do elsewhere, as in Qwen3-Next."""

    inexact: ClassVar[str | None] = (
        "linear attention, whose states are computed token after token, and prompts in chunks"
    )

    @classmethod
    def read(cls, values: Mapping[str, Any], family: Family | None) -> Sequence[Self | None]:
        num_layers = int(values["num_hidden_layers"])
        if "linear_num_key_heads" not in values:
            return [None] * num_layers
        every = int(values.get("full_attention_interval") or 4)
        names = values.get("layer_types") or [
            "full_attention" if layer % every == 0 else "linear_attention" for layer in range(1, 1 + num_layers)
        ]
        fields = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
        sizes = (int(values[f"linear_{field}"]) for field in fields)
        joins = family is not None and "in_proj_qkvz" in family.blocks.get("linear_attn", ())
        layer = cls(int(values["hidden_size"]), *sizes, joins_inputs=joins)
        return [layer if name == "linear_attention" else None for name in names]

    @classmethod
    def small(cls, values: Mapping[str, int], family: Family) -> Mapping[str, int]:
        if not family.linear_attentions:
            return {}
        heads = values["num_attention_heads"]
        sizes = dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), heads)
        sizes |= dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), values["hidden_size"] // heads)
        return sizes | {"linear_conv_kernel_dim": 4, "full_attention_interval": 2}

    @property
    def num_channels(self) -> int:
        """Channels of queries, keys and values: of the convolution."""
        return 2 * self.num_keys * self.key_dim + self.num_values * self.value_dim

    @property
    def products(self) -> Mapping[str, tuple[int, int]]:
        hidden, values = self.hidden_size, self.num_values * self.value_dim
        if self.joins_inputs:
            return {
                "in_proj_qkvz": (hidden, self.num_channels + values),
                "in_proj_ba": (hidden, 2 * self.num_values),
                "out_proj": (values, hidden),
            }
        return {
            "in_proj_qkv": (hidden, self.num_channels),
            "in_proj_z": (hidden, values),
            "in_proj_b": (hidden, self.num_values),
            "in_proj_a": (hidden, self.num_values),
            "out_proj": (values, hidden),
        }

    @property
    def num_parameters(self) -> int:
        products = sum(map(math.prod, self.products.values()))
        return products + self.num_channels * self.width + 2 * self.num_values + self.value_dim

    @property
    def token_cost(self) -> int:
        """A state is written once and read twice."""
        states = 3 * self.num_values * self.key_dim * self.value_dim
        return sum(map(math.prod, self.products.values())) + states

    def shared(self, tp: int) -> Mapping[str, Mapping[str, int]]:
        """Along `cp` heads only: a row is scanned token after token, so its tokens cannot be shared."""
        of_rank = {"key heads of linear attention of a tp rank": self.num_keys // tp}
        return {"tp": {"key heads of linear attention": self.num_keys}, "cp": of_rank}

    def part(self, tp: int, ep: int | None) -> Self:
        del ep
        return dataclasses.replace(self, num_keys=-(-self.num_keys // tp), num_values=-(-self.num_values // tp))

    def state_bytes(self, size: int) -> int:
        """Bytes of the state, in float32, and what the convolution looks back at."""
        return 4 * self.num_values * self.key_dim * self.value_dim + size * (self.width - 1) * self.num_channels

    def kept_bytes(self, size: int) -> int:
        """Bytes of a token in chunks of 64.

        Taps and sum of the convolution; then, in float32, channels twice, eight tensors of the size of value heads'
        keys, five of values, and five of a chunk's scores.
        """
        of_heads = self.num_values * (8 * self.key_dim + 5 * self.value_dim + 5 * 64)
        return size * (self.width + 1) * self.num_channels + 4 * (2 * self.num_channels + of_heads)
