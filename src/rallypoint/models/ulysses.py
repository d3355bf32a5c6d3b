"""Sequence parallelism (Ulysses, arXiv 2309.14509): ranks share the tokens of a stream, and in attention its heads.

Owns: which tokens of a packed stream a rank computes, and the exchange before and after attention. Must not know: how
attention is computed, or what becomes of hidden states. Everything but attention treats tokens one by one, so that a
rank computes it for its own; every row is attended to as a whole, by each rank for a part of the heads:

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

from rallypoint.models.attention import NO_LIMITS, Limits, PackedRows
from rallypoint.parallel import Collective, exchange_for_columns, exchange_for_rows, gather_rows


@dataclasses.dataclass(frozen=True, slots=True)
class TokenSlice:
    """What one rank computes of a packed stream: its tokens, and those positions whose choice was made at one of them.

    The hidden state at a token chooses the next one (`engine.forward`), so that positions 4 and 5 of a stream of
    six belong to the ranks that have tokens 3 and 4: both to the second of two.

    No rank is without tokens, which transformers cannot compute: a stream that is too short for all of them is filled
    up to their number.
    """

    sp: Collective
    num_tokens: tuple[int, ...]
    """Of every rank, filler included; they differ by one at most."""
    num_positions: tuple[int, ...]
    """Of every rank."""

    @classmethod
    def of(cls, num_tokens: int, sources: Tensor, sp: Collective) -> TokenSlice:
        """Return the slice of this rank.

        Args:
            num_tokens: of the whole stream, but for what is missing to one for each rank.
            sources: [N] int64, in order: of each position, the token at which it was chosen.
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
        """Return the outputs of all positions, [N, ...], from those of this rank; backward returns to each its own."""
        return gather_rows(outputs, self.sp, self.num_positions)


class SequenceParallelRows:
    """Packed rows whose tokens lie on several ranks; see `Rows`, whose T is this rank's number of tokens here."""

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
        # Key/value heads are repeated as little as makes them divide; each still serves whole heads of the queries.
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
