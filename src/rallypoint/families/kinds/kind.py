"""The questions that every kind of layer answers; the answers here are those of kinds that have nothing to say.

Bytes depend on `size`, the bytes of a number of the model: 2 in bfloat16.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

from rallypoint.families.family import Family


@dataclasses.dataclass(frozen=True, slots=True)
class Kind(abc.ABC):
    """One layer's mixer or MLP, without the norm before it."""

    hidden_size: int

    served_faster: ClassVar[str | None] = None
    """What of it a server samples faster than our own engine, in words; None for nothing."""

    @classmethod
    @abc.abstractmethod
    def read(cls, values: Mapping[str, Any], family: Family | None) -> Sequence[Self | None]:
        """Return this kind for each layer that is of it, and None for the others, from the fields of a config.json.

        Raises:
            KeyError, ValueError, TypeError: fields are missing or no numbers.
        """

    @classmethod
    def small(cls, values: Mapping[str, int], family: Family) -> Mapping[str, int]:
        """Return fields that a small model has for this kind, in addition to plain ones or in place of them.

        Args:
            values: `hidden_size`, `num_hidden_layers`, `num_attention_heads`, `intermediate_size`.
            family: of the model.
        """
        del values, family
        return {}

    @property
    @abc.abstractmethod
    def products(self) -> Mapping[str, tuple[int, int]]:
        """Linear layers that all tokens pass, which adapters may stand beside -> their inputs and outputs."""

    @property
    def stacks(self) -> Mapping[str, tuple[int, int, int]]:
        """Stacks of matrices that adapters may stand beside -> how many matrices, their inputs and outputs."""
        return {}

    @property
    def num_parameters(self) -> int:
        """Weights: those of products, and others."""
        return sum(map(math.prod, self.products.values()))

    @property
    def token_cost(self) -> int:
        """Multiplications for a token, whatever its row."""
        return sum(map(math.prod, self.products.values()))

    @property
    def num_uncut_parameters(self) -> int:
        """Weights that every rank of `tp` has whole, beside small ones."""
        return 0

    def num_idle(self, num_tokens: int) -> float:
        """Return how many weights a pass of so many tokens does not read, on average."""
        del num_tokens
        return 0.0

    @abc.abstractmethod
    def shared(self, tp: int) -> Mapping[str, Mapping[str, int]]:
        """Return the parts that ranks of an axis share equally: axis -> part -> how many there are.

        `tp` shares those of the layer; `sp`, `cp` together with `sp`, and `ep` share those of a rank of `tp`.
        """

    def of_ep_rank(self, ep: int) -> Self:
        """Return the weights that a rank of `ep` has."""
        del ep
        return self

    @abc.abstractmethod
    def part(self, tp: int, ep: int | None) -> Self:
        """Return what a rank of `tp` computes.

        Args:
            tp: its ranks.
            ep: ranks whose tokens it has room for, whether they are sent to it or not; None if it needs no such room.
        """


class Mixer(Kind):
    """Moves content along a row."""

    __slots__ = ()

    inexact: ClassVar[str | None] = None
    """What of it has other bits in prompts than token by token, in words; None for nothing."""

    @property
    def pair_cost(self) -> int:
        """Multiplications for a pair of tokens of a row."""
        return 0

    @property
    def head_dims(self) -> frozenset[int]:
        """Widths of heads whose keys and values are cached."""
        return frozenset()

    def has_fused_kernel(self, *, has_flash: bool) -> bool:
        """Return whether there is a kernel that keeps no scores.

        Args:
            has_flash: whether it runs on an accelerator in half precision.
        """
        del has_flash
        return True

    def cached_bytes(self, size: int) -> int:
        """Return what the cache keeps of every token."""
        del size
        return 0

    def served_bytes(self, size: int) -> int:
        """Return what the cache of a server keeps of every token."""
        return self.cached_bytes(size)

    def state_bytes(self, size: int) -> int:
        """Return what a sequence remembers, however long it is."""
        del size
        return 0

    @abc.abstractmethod
    def kept_bytes(self, size: int) -> int:
        """Return what is kept of a token for the backward pass, without norms and what `attended_bytes` counts."""

    def norm_bytes(self, size: int) -> int:
        """Return what norms inside it keep of a token for the backward pass."""
        del size
        return 0

    def attended_bytes(self, size: int, num_scores: int) -> int:
        """Return what is kept of a token of a row; tokens that rows share are attended to in every row.

        Args:
            size: bytes of a number.
            num_scores: tokens that every head has a score for.
        """
        del size, num_scores
        return 0

    def attending_bytes(self, size: int) -> int:
        """Return what exists of a token while it runs and keeps nothing, outside the rows."""
        del size
        return 0

    def folded_bytes(self, size: int, num_scores: int, num_block_scores: int) -> int:
        """Return the most that exists of a token of a row meanwhile.

        Args:
            size: bytes of a number.
            num_scores: tokens that every head has a share for.
            num_block_scores: scores of a token in the largest block, which are there in addition.
        """
        del size, num_scores, num_block_scores
        return 0

    def position_bytes(self, size: int) -> int:
        """Return what is known of a token's position."""
        del size
        return 0


class PerToken(Kind):
    """Works on each token alone."""

    __slots__ = ()

    @property
    @abc.abstractmethod
    def width(self) -> int:
        """Width that a token passes inside, by gate and up."""
