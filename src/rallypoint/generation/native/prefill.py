"""Prefill: the tokens of several sequences in one packed pass, whose keys and values go to the cache.

Owns: how chunks lie in the stream, and which keys each sees: its own, and its past in the cache. Must not know: which
chunks are due, or what becomes of their states.
"""

from __future__ import annotations

import itertools
from collections import abc
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from rallypoint.generation.native.decoder import Decoder
from rallypoint.generation.native.kv_cache import KVCache
from rallypoint.generation.native.sequence import PrefillChunk
from rallypoint.models import PackedRows
from rallypoint.models.fused import attend_fused
from rallypoint.models.head import soft_capped
from rallypoint.models.kinds.linear_attention import DeltaInputs
from rallypoint.models.products import NO_LIMITS, Limits
from rallypoint.models.sinks import softmax_with_sinks
from rallypoint.models.varlen import Borders, Varlen, find_varlen
from rallypoint.types import offsets_from_lengths


def prefill_packed(
    decoder: Decoder, cache: KVCache, chunks: abc.Sequence[PrefillChunk], num_tokens: int
) -> abc.Sequence[Tensor]:
    """Prefill chunks in one packed pass over so many tokens, at least theirs; see `Backend.prefill`."""
    attention = PrefillAttention(cache, chunks, num_tokens)
    return wanted_states(decoder(attention), chunks)


def wanted_states(states: Tensor, chunks: abc.Sequence[PrefillChunk]) -> abc.Sequence[Tensor]:
    """Return the states that each chunk wants, [n, E], of those of all their tokens, [T, E]."""
    ends = itertools.accumulate(len(chunk.tokens) for chunk in chunks)
    numbers = [range(end - chunk.num_states, end) for chunk, end in zip(chunks, ends, strict=True)]
    index = torch.tensor(list(itertools.chain.from_iterable(numbers)), device=states.device)
    return states.index_select(0, index).split([chunk.num_states for chunk in chunks])


class _SeenKeys(NamedTuple):
    """The keys that chunks see, end to end: first the own ones of those without a past, then what the cache has."""

    rows: tuple[Borders, Borders]
    blocks: Tensor
    """[S] int64: of chunks with a past, the block of each token that they see, their own included."""
    block_offsets: Tensor
    """[S] int64: its place there."""

    @classmethod
    def of(cls, offsets: Tensor, num_fresh: int, later: abc.Sequence[PrefillChunk], device: torch.device) -> _SeenKeys:
        """Lay them out for chunks of a stream, given its [N+1] offsets."""
        lengths, num_seen = offsets.diff(), offsets.diff()
        num_seen[num_fresh:] += torch.tensor([chunk.num_past for chunk in later], dtype=torch.int64)
        slots: list[tuple[int, int]] = []
        for chunk in later:
            slots += [(block.index, offset) for block in chunk.past for offset in range(len(block.tokens))]
            slots += [(block.index, offset) for block, offset in chunk.slots]
        places = torch.tensor(slots, dtype=torch.int64).view(-1, 2)
        return cls((Borders.of(lengths, device), Borders.of(num_seen, device)), *places.to(device).unbind(1))


class PrefillAttention:
    """See `rallypoint.models.Rows`; the stream is the chunks, end to end, those without a past first, and padding."""

    def __init__(self, cache: KVCache, chunks: abc.Sequence[PrefillChunk], num_tokens: int) -> None:
        """Lay chunks out in a stream of so many tokens, at least theirs."""
        self._cache = cache
        device = cache.keys.device
        fresh = [chunk for chunk in chunks if not chunk.past]
        self._later = chunks[len(fresh) :]
        assert all(chunk.past for chunk in self._later), "those without a past come first"
        self._offsets = offsets_from_lengths(torch.tensor([len(chunk.tokens) for chunk in chunks]))
        self._packed = PackedRows(self._offsets[: len(fresh) + 1], device) if fresh else None
        self._num_fresh = len(fresh)
        tokens = [token for chunk in chunks for token in chunk.tokens]
        self._num_padding = num_tokens - len(tokens)
        self.tokens = torch.tensor(tokens + [0] * self._num_padding, device=device)
        """[T] int64."""
        # The first token of each chunk stands behind its past.
        behind = self._offsets[:-1] - torch.tensor([chunk.num_past for chunk in chunks])
        positions = torch.arange(len(tokens)) - behind.repeat_interleave(self._offsets.diff())
        self.position_ids = functional.pad(positions, (0, self._num_padding)).to(device).unsqueeze(0)
        """[1, T] int64."""
        slots = [slot for chunk in chunks for slot in chunk.slots]
        self._blocks = torch.tensor([block.index for block, _ in slots], device=device)
        self._block_offsets = torch.tensor([offset for _, offset in slots], device=device)
        self._seen: _SeenKeys | None = None
        self._scan = None if cache.recurrent is None else cache.recurrent.prefill(chunks, self._offsets)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, limits: Limits = NO_LIMITS
    ) -> Tensor:
        """See `Rows.attend`."""
        num_tokens = int(self._offsets[-1])
        self._cache.write(layer, self._blocks, self._block_offsets, key[:num_tokens], value[:num_tokens])
        kernel = find_varlen(query, key.shape[1], limits)
        if kernel is not None:
            return self.attend_at_once(kernel, layer, query, key, value, scaling, limits)
        parts: list[Tensor] = []
        if self._packed is not None:
            part = slice(0, int(self._offsets[self._num_fresh]))
            parts.append(self._packed.attend(layer, query[part], key[part], value[part], scaling, limits))
        for at, chunk in enumerate(self._later, self._num_fresh):
            part = slice(int(self._offsets[at]), int(self._offsets[at + 1]))
            parts.append(self._attend_to_past(layer, chunk, query[part], key[part], value[part], scaling, limits))
        if self._num_padding:
            parts.append(query.new_zeros(self._num_padding, *query.shape[1:]))
        return torch.cat(parts)

    def recall(self, layer: int, inputs: DeltaInputs) -> Tensor:
        """See `DeltaRows.recall`."""
        assert self._scan is not None, "the model has such layers"
        return self._scan.recall(layer, inputs)

    def attend_at_once(
        self,
        kernel: Varlen,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        limits: Limits,
    ) -> Tensor:
        """Return the attention of all chunks, in one call, when their keys are in the cache: [T, H, D]."""
        if self._seen is None:
            self._seen = _SeenKeys.of(self._offsets, self._num_fresh, self._later, query.device)
        seen, num_tokens = self._seen, int(self._offsets[-1])
        if self._later:
            num_fresh = int(self._offsets[self._num_fresh])
            cached = self._cache.read_slots(layer, seen.blocks, seen.block_offsets)
            key, value = (torch.cat([new[:num_fresh], old]) for new, old in zip((key, value), cached, strict=True))
        out = kernel(query[:num_tokens], key, value, seen.rows, scaling, limits)
        return functional.pad(out, (0, 0, 0, 0, 0, self._num_padding)) if self._num_padding else out

    def _attend_to_past(
        self, layer: int, chunk: PrefillChunk, query: Tensor, key: Tensor, value: Tensor, scaling: float, limits: Limits
    ) -> Tensor:
        """Return the attention of one chunk to its past and to itself: [T, H, D]."""
        index = torch.tensor([block.index for block in chunk.past], device=query.device)
        past = self._cache.read(layer, index)
        keys, values = (
            torch.cat([old[: chunk.num_past], new]).transpose(0, 1).unsqueeze(0)
            for old, new in zip(past, (key, value), strict=True)
        )
        length = len(query)
        visible = torch.ones(length, length + chunk.num_past, dtype=torch.bool, device=query.device)
        visible = visible.tril(chunk.num_past)
        if limits.window is not None:
            visible = visible.triu(chunk.num_past - limits.window + 1)
        if limits.softcap is not None or limits.sinks is not None:
            share = query.shape[1] // key.shape[1]
            keys, values = (states.squeeze(0).repeat_interleave(share, 0) for states in (keys, values))
            scores = soft_capped((query.transpose(0, 1) @ keys.transpose(1, 2)) * scaling, limits.softcap)
            sinks = None if limits.sinks is None else limits.sinks.view(-1, 1, 1)
            shares = softmax_with_sinks(scores.masked_fill(~visible, float("-inf")), sinks)
            return (shares @ values).transpose(0, 1)
        out = attend_fused(query.transpose(0, 1).unsqueeze(0), keys, values, scaling, visible)
        return out.squeeze(0).transpose(0, 1)
