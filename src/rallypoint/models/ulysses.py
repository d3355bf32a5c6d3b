"""Sequence parallelism (Ulysses, arXiv 2309.14509): ranks split the tokens of a stream, and in attention its heads.

Owns: which tokens of a packed stream a rank computes, and the exchange before and after attention. Must not know: how
attention is computed, or what follows the hidden states. All but attention is computed token by token, by each rank for
its own tokens; attention is computed over whole rows, by each rank for some of the heads:

    before attention        tokens 0 1 2 | 3 4 5        every rank has some tokens, with all heads
    exchange (all-to-all)   heads  0 1   | 2 3          every rank has some heads, of all tokens
    exchange back           tokens 0 1 2 | 3 4 5

Invariant: all ranks of the group call with the same stream and the same positions.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from rallypoint.models.attention import PackedRows
from rallypoint.models.products import NO_LIMITS, Limits
from rallypoint.parallel import Collective, exchange_for_columns, exchange_for_rows, gather_rows


@dataclasses.dataclass(frozen=True, slots=True)
class TokenSlice:
    """The tokens of a packed stream that one rank computes, and the positions that are predicted at these tokens.

    The hidden state of a token predicts the next one (see `engine.forward`): with two ranks and a stream of six
    tokens, positions 4 and 5 belong to the second rank, which has tokens 3 and 4.

    Every rank has a token, because transformers cannot compute none: a stream shorter than the number of ranks is
    filled up to it.
    """

    sp: Collective
    num_tokens: tuple[int, ...]
    """Tokens of every rank, filler included; they differ by at most one."""
    num_positions: tuple[int, ...]
    """Positions of every rank."""

    @classmethod
    def of(cls, num_tokens: int, sources: Tensor, sp: Collective) -> TokenSlice:
        """Return the slice of this rank.

        Args:
            num_tokens: tokens of the whole stream, without filler.
            sources: [N] int64, ascending: for each position, the token at which it is predicted.
            sp: the ranks that share the stream.
        """
        num_tokens = max(num_tokens, sp.size)
        sizes = tuple(num_tokens // sp.size + (rank < num_tokens % sp.size) for rank in range(sp.size))
        borders = torch.tensor([0, *itertools.accumulate(sizes)])
        found = torch.searchsorted(sources, borders).tolist()
        return cls(sp, sizes, tuple(stop - start for start, stop in itertools.pairwise(found)))

    @property
    def tokens(self) -> slice:
        """This rank's tokens in the stream."""
        return _part(self.num_tokens, self.sp.rank)

    @property
    def positions(self) -> slice:
        """This rank's positions among all of them."""
        return _part(self.num_positions, self.sp.rank)

    def join(self, outputs: Tensor) -> Tensor:
        """Gather the outputs of all positions, [N, ...]; backward, each rank gets the gradient of its own."""
        return gather_rows(outputs, self.sp, self.num_positions)


class SequenceParallelRows:
    """Packed rows whose tokens are split over ranks; see `Rows`, whose T is the number of this rank's tokens."""

    def __init__(self, rows: PackedRows, part: TokenSlice) -> None:
        """Take the rows of the whole stream, and this rank's slice of it."""
        self._rows, self._part = rows, part
        self.position_ids = rows.position_ids[:, part.tokens]

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, limits: Limits = NO_LIMITS
    ) -> Tensor:
        """See `Rows.attend`.

        Raises:
            ValueError: the heads do not divide by the number of ranks.
        """
        sp, sizes = self._part.sp, self._part.num_tokens
        if query.shape[1] % sp.size:
            raise ValueError(f"sp={sp.size} does not divide {query.shape[1]} attention heads")
        # Key/value heads are repeated just enough to be divisible; each still serves whole query heads.
        repeats = math.lcm(key.shape[1], sp.size) // key.shape[1]
        if repeats > 1:
            key, value = (states.repeat_interleave(repeats, 1) for states in (key, value))
        shares = [states.unflatten(1, (sp.size, -1)) for states in (query, key, value)]
        num_heads = [share.shape[2] for share in shares]
        query, key, value = exchange_for_columns(torch.cat(shares, 2), sp, sizes).split(num_heads, 1)
        out = self._rows.attend(layer, query, key, value, scaling, limits)
        return exchange_for_rows(out, sp, sizes).flatten(1, 2)


def _part(sizes: Sequence[int], rank: int) -> slice:
    start = sum(sizes[:rank])
    return slice(start, start + sizes[rank])
