"""Many tokens of several rows in one packed pass, which leaves their keys and values in blocks."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from rallypoint.generation.native.block_manager import Block, BlockPool
from rallypoint.models import PackedRows
from rallypoint.models.attention import NO_LIMITS, Limits
from rallypoint.models.fused import attend_fused
from rallypoint.models.head import soft_capped
from rallypoint.types import offsets_from_lengths


@dataclasses.dataclass(frozen=True, slots=True)
class Stretch:
    """Consecutive tokens of one row that are computed together."""

    past: Sequence[Block]
    """Those whose keys and values are there already, from the beginning of the row."""
    tokens: Sequence[int]
    """At least one."""
    into: Sequence[tuple[Block, int]]
    """For each token its block, and its place in there."""

    @property
    def num_past(self) -> int:
        """Tokens of `past`."""
        return sum(len(block.tokens) for block in self.past)


def deal_out(stretches: Sequence[Stretch], num_parts: int) -> list[Sequence[Stretch]]:
    """Cut stretches into at most so many parts that can be computed side by side, each as `StretchRows` has them.

    There is one part where a stretch looks back at what may be computed for another, or two write to one block. Those
    that look back stay in their order, as each may look at what is computed for one before it.
    """
    ordered = sorted(stretches, key=lambda stretch: (bool(stretch.past), 0 if stretch.past else -len(stretch.tokens)))
    blocks = [block for stretch in ordered for block in {block for block, _ in stretch.into}]
    if ordered[-1].past or len(set(blocks)) < len(blocks):
        num_parts = 1
    return [ordered[first::num_parts] for first in range(min(num_parts, len(ordered)))]


class StretchRows:
    """See `rallypoint.models.Rows`; the stream is the stretches, end to end, those without a past first, and filler."""

    bags = None

    def __init__(self, pool: BlockPool, stretches: Sequence[Stretch], num_tokens: int) -> None:
        """Lay stretches out in a stream of so many tokens, at least theirs."""
        self._pool = pool
        device = pool.keys.device
        fresh = [stretch for stretch in stretches if not stretch.past]
        self._later = stretches[len(fresh) :]
        assert all(stretch.past for stretch in self._later), "those without a past come first"
        self._offsets = offsets_from_lengths(torch.tensor([len(stretch.tokens) for stretch in stretches]))
        self._packed = PackedRows(self._offsets[: len(fresh) + 1], device) if fresh else None
        self._num_fresh = len(fresh)
        tokens = [token for stretch in stretches for token in stretch.tokens]
        self._num_filler = num_tokens - len(tokens)
        self.tokens = torch.tensor(tokens + [0] * self._num_filler, device=device)
        """[T] int64."""
        # The first of each stretch stands behind its past.
        behind = self._offsets[:-1] - torch.tensor([stretch.num_past for stretch in stretches])
        positions = torch.arange(len(tokens)) - behind.repeat_interleave(self._offsets.diff())
        self.position_ids = functional.pad(positions, (0, self._num_filler)).to(device).unsqueeze(0)
        """[1, T] int64."""
        into = [one for stretch in stretches for one in stretch.into]
        self._blocks = torch.tensor([block.index for block, _ in into], device=device)
        self._places = torch.tensor([place for _, place in into], device=device)

    @property
    def ends(self) -> Tensor:
        """[R] int64: where in the stream the last token of each stretch is."""
        return self._offsets[1:] - 1

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, limits: Limits = NO_LIMITS
    ) -> Tensor:
        """See `Rows.attend`."""
        num_tokens = int(self._offsets[-1])
        self._pool.write(layer, self._blocks, self._places, key[:num_tokens], value[:num_tokens])
        parts: list[Tensor] = []
        if self._packed is not None:
            part = slice(0, int(self._offsets[self._num_fresh]))
            parts.append(self._packed.attend(layer, query[part], key[part], value[part], scaling, limits))
        for place, stretch in enumerate(self._later, self._num_fresh):
            part = slice(int(self._offsets[place]), int(self._offsets[place + 1]))
            parts.append(self._look_back(layer, stretch, query[part], key[part], value[part], scaling, limits))
        if self._num_filler:
            parts.append(query.new_zeros(self._num_filler, *query.shape[1:]))
        return torch.cat(parts)

    def _look_back(
        self, layer: int, stretch: Stretch, query: Tensor, key: Tensor, value: Tensor, scaling: float, limits: Limits
    ) -> Tensor:
        """Attention of one stretch to its past and to itself: [T, H, D]."""
        index = torch.tensor([block.index for block in stretch.past], device=query.device)
        past = self._pool.read(layer, index)
        keys, values = (
            torch.cat([old[: stretch.num_past], new]).transpose(0, 1).unsqueeze(0)
            for old, new in zip(past, (key, value), strict=True)
        )
        length = len(query)
        visible = torch.ones(length, length + stretch.num_past, dtype=torch.bool, device=query.device)
        visible = visible.tril(stretch.num_past)
        if limits.window is not None:
            visible = visible.triu(stretch.num_past - limits.window + 1)
        if limits.softcap is not None:
            share = query.shape[1] // key.shape[1]
            keys, values = (states.squeeze(0).repeat_interleave(share, 0) for states in (keys, values))
            scores = soft_capped((query.transpose(0, 1) @ keys.transpose(1, 2)) * scaling, limits.softcap)
            return (scores.masked_fill(~visible, float("-inf")).softmax(-1) @ values).transpose(0, 1)
        out = attend_fused(query.transpose(0, 1).unsqueeze(0), keys, values, scaling, visible)
        return out.squeeze(0).transpose(0, 1)
