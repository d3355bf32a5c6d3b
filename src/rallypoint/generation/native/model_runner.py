"""Runs the model for the sequences that the scheduler chose: prefill, first tokens, and steps of decoding.

Owns: the KV cache, the batches that decode, tokens that were sampled ahead of need, and how work is cut over cores.
Must not know: requests that wait, or why a sequence ends. What is particular to a kind of device is behind `Backend`.
"""

from __future__ import annotations

import itertools
from collections import abc, deque
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from rallypoint.config.limits import BLOCK_TOKENS
from rallypoint.cpu.threads import Lanes
from rallypoint.generation.native.block_manager import AttentionMetadata, BlockTables
from rallypoint.generation.native.decoder import Decoder, DecoderRows
from rallypoint.generation.native.kv_cache import CacheSize, KVCache, LayerShapes
from rallypoint.generation.native.sequence import PrefillChunk, Sequence
from rallypoint.generation.requests import prompt_logprobs, vocabulary_of
from rallypoint.generation.sampler import SampledTokens, Sampler, SamplingMetadata
from rallypoint.models import PackedRows
from rallypoint.models.fused import attend_fused
from rallypoint.models.head import soft_capped
from rallypoint.models.products import NO_LIMITS, Limits
from rallypoint.types import offsets_from_lengths

_WASTE, _WIDTH_OF_WASTE = 1 / 16, 128
"""Rows that may be wasted, as a part of a step's rows. To make batches takes about as long for any model: at 1M, whose
hidden states have 128 numbers, as long as a whole step. A model's own code takes longer for each row."""


class DecodeAttention(DecoderRows, Protocol):
    """What one token of each of B sequences attends to, laid out for several steps; B is at least `num_queries`."""

    num_queries: int
    """Tokens without padding."""

    @property
    def has_next(self) -> bool:
        """Whether it was laid out for another step."""
        ...

    def advance(self, tokens: Tensor) -> None:
        """Go on to the next token of every sequence: [num_queries] int64."""
        ...


class Backend(Protocol):
    """How a kind of device runs the model: `CPUBackend`, `ExactBackend` or `AcceleratorBackend`."""

    decoder: Decoder
    min_steps: int
    """Fewest steps that `decode_steps` should make in one call; fewer are made one by one."""

    @property
    def max_steps(self) -> int:
        """Most steps that `decode_steps` should make in one call: nobody sees their tokens before its end."""
        ...

    def prepare(self, shapes: LayerShapes) -> None:
        """Get ready for a model whose layers have these shapes; called before every reservation of a cache."""
        ...

    def parts(self, num_tokens: int, num_lanes: int) -> tuple[int, int | None]:
        """Return into how many parallel parts to cut so many tokens, and the number of threads of each.

        Threads are None if each part has its share of them.
        """
        ...

    def prefill(self, cache: KVCache, chunks: abc.Sequence[PrefillChunk]) -> abc.Sequence[Tensor]:
        """Store keys and values of chunks, those without a past first; return the states that each wants: [n, E]."""
        ...

    def attention(self, cache: KVCache, metadata: AttentionMetadata, num_steps: int) -> abc.Sequence[DecodeAttention]:
        """Lay out what tokens attend to for so many steps, in parts that go through the model one after the other."""
        ...

    def decode(self, attention: abc.Sequence[DecodeAttention]) -> Tensor:
        """Send the tokens of a layout through the model, and return their last hidden states: [B, E]."""
        ...

    def logits(self, states: Tensor) -> Tensor:
        """Return the logits of last hidden states: [B, E] -> [B, V]."""
        ...

    def decode_steps(
        self, attention: abc.Sequence[DecodeAttention], sampling: SamplingMetadata, numbers: Tensor
    ) -> list[SampledTokens]:
        """Decode a step for each line of random numbers, [steps, B], without a look of the host in between."""
        ...

    def release(self) -> None:
        """Release all memory that belongs to a cache."""
        ...


class DecodeBatch:
    """Sequences that decode together for some steps, those that have ended meanwhile included."""

    def __init__(
        self, sequences: abc.Sequence[Sequence], attention: abc.Sequence[DecodeAttention], backend: Backend
    ) -> None:
        self.sequences = sequences
        self._attention, self._backend = attention, backend
        device = attention[0].tokens.device
        self._sampler = Sampler([(sequence.request, sequence.tokens) for sequence in sequences], device)

    @property
    def max_steps(self) -> int:
        """Most steps to make before their tokens are returned."""
        is_streamed = any(sequence.request.streamed for sequence in self.sequences)
        return self._backend.max_steps if self._sampler.is_stateless and not is_streamed else 1

    def decode(self, num_steps: int) -> list[SampledTokens]:
        """Send the newest token of every sequence through the model and sample the next one, so many times."""
        sampler, backend = self._sampler, self._backend
        if num_steps >= backend.min_steps and sampler.is_stateless:
            return backend.decode_steps(self._attention, sampler.metadata, sampler.numbers(num_steps))
        assert num_steps == 1, "`max_steps` said so"
        sampled = sampler.sample(backend.logits(backend.decode(self._attention)))
        newest = sampled.tokens.split([part.num_queries for part in self._attention])
        for part, tokens in zip(self._attention, newest, strict=True):
            if part.has_next:
                part.advance(tokens)
        return [sampled]


class ModelRunner:
    """One model, its cache and its batches."""

    def __init__(self, backend: Backend, cache_size: CacheSize) -> None:
        self.cache: KVCache | None = None
        self._backend, self._cache_size = backend, cache_size
        self._lanes = Lanes(backend.decoder.model.device)
        self._batches: list[DecodeBatch] = []
        self._num_threads_each: int | None = None
        self._ahead: deque[tuple[SampledTokens, ...]] = deque()
        """Tokens of the next steps, of all batches."""

    @property
    def num_sampled_ahead(self) -> int:
        """Steps whose tokens have been sampled already."""
        return len(self._ahead)

    @property
    def max_waste(self) -> float:
        """Rows that may be computed in vain before new batches pay, as a part of those of a step."""
        decoder = self._backend.decoder
        return min(1.0, _WIDTH_OF_WASTE / decoder.hidden_size) if decoder.is_plain else _WASTE

    def reserve_cache(self) -> KVCache:
        """Ask the model for the shapes of its layers, and reserve memory for their keys and values.

        Raises:
            CacheError: there is not enough.
            ModelError: see `Decoder.probe`.
        """
        shapes = self._backend.decoder.probe()
        self._backend.prepare(shapes)
        token_bytes = 2 * shapes.num_layers * shapes.kv_heads * shapes.head_dim * shapes.like.element_size()
        num_tokens = self._cache_size.num_tokens(token_bytes, shapes.like.device)
        self.cache = KVCache(-(-num_tokens // BLOCK_TOKENS), shapes)
        return self.cache

    def release_cache(self) -> None:
        """Release the cache, and everything that belongs to it."""
        self.end_batches()
        self.cache = None
        self._backend.release()

    def prefill(self, chunks: abc.Sequence[PrefillChunk]) -> None:
        """Store keys and values of chunks, and the last state of each that ends in a prompt's block."""
        assert self.cache is not None, "sequences were admitted"
        num, num_threads = self._backend.parts(sum(len(chunk.tokens) for chunk in chunks), self._lanes.num)
        parts = deal_out(chunks, num)
        jobs = [partial(self._backend.prefill, self.cache, part) for part in parts]
        for part, states in zip(parts, self._lanes.run(jobs, num_threads), strict=True):
            for chunk, wanted in zip(part, states, strict=True):
                block = chunk.slots[-1][0]
                if block.tokens:
                    block.last_state = wanted[-1]
                if (sequence := chunk.asked_by) is not None:
                    num, num_ids = sequence.request.prompt_logprobs or 0, vocabulary_of(self._backend.decoder.model)
                    said = prompt_logprobs(wanted, chunk.tokens, self._backend.logits, num, num_ids=num_ids)
                    sequence.prompt_logprobs = said

    def sample_first(self, sequences: abc.Sequence[Sequence]) -> list[tuple[abc.Sequence[Sequence], SampledTokens]]:
        """Sample the first token of sequences whose prompts have been computed; return parts, with their tokens."""
        num, num_threads = self._backend.parts(len(sequences), self._lanes.num)
        parts = [sequences[first::num] for first in range(num)]
        sampled = self._lanes.run([partial(self._sample_first, part) for part in parts], num_threads)
        return list(zip(parts, sampled, strict=True))

    def _sample_first(self, sequences: abc.Sequence[Sequence]) -> SampledTokens:
        states: list[Tensor] = []
        for sequence in sequences:
            state = sequence.prompt_blocks[-1].last_state
            assert state is not None, "prompts are prefilled first"
            states.append(state)
        logits = self._backend.logits(torch.stack(states))
        return Sampler([(sequence.request, sequence.tokens) for sequence in sequences], logits.device).sample(logits)

    def make_batches(self, sequences: abc.Sequence[Sequence], tables: BlockTables, num_steps: int) -> None:
        """Make batches of sequences that have tokens, to decode so many steps, instead of those there are."""
        self._ahead.clear()
        num, self._num_threads_each = self._backend.parts(len(sequences), self._lanes.num)
        parts = [sequences[first::num] for first in range(num)]
        jobs = [partial(self._make_batch, tables, num_steps, part) for part in parts]
        self._batches = self._lanes.run(jobs, self._num_threads_each)

    def _make_batch(self, tables: BlockTables, num_steps: int, sequences: abc.Sequence[Sequence]) -> DecodeBatch:
        assert self.cache is not None, "sequences run"
        lines, tokens, positions = np.array(
            [(one.line, one.tokens[-1], len(one.request.tokens) + len(one.tokens) - 1) for one in sequences]
        ).T
        metadata = tables.metadata(lines, tokens, positions)
        return DecodeBatch(sequences, self._backend.attention(self.cache, metadata, num_steps), self._backend)

    def decode(
        self, running: abc.Iterable[Sequence], num_steps_left: int
    ) -> list[tuple[abc.Sequence[Sequence], SampledTokens]]:
        """Return the next token of every sequence, batch by batch; if it pays, more steps are sampled with it."""
        if not self._ahead:
            most = min(num_steps_left, *(batch.max_steps for batch in self._batches))
            num_steps = steps_worth_sampling([one.max_new_tokens - len(one.tokens) for one in running], most)
            jobs = [partial(batch.decode, num_steps) for batch in self._batches]
            self._ahead += zip(*self._lanes.run(jobs, self._num_threads_each), strict=True)
        return [(batch.sequences, sampled) for batch, sampled in zip(self._batches, self._ahead.popleft(), strict=True)]

    def end_batches(self) -> None:
        """Drop the batches, and the tokens that were sampled ahead."""
        self._batches = []
        self._ahead.clear()


def deal_out(chunks: abc.Sequence[PrefillChunk], num_parts: int) -> list[abc.Sequence[PrefillChunk]]:
    """Cut chunks into at most so many parts that can run side by side, each in the order of `PrefillAttention`.

    There is one part if a chunk's past may be computed in another chunk, or two write to one block. Chunks with a past
    stay in their order, as each may attend to one before it.
    """
    ordered = sorted(chunks, key=lambda chunk: (bool(chunk.past), 0 if chunk.past else -len(chunk.tokens)))
    blocks = [block for chunk in ordered for block in {block for block, _ in chunk.slots}]
    if ordered[-1].past or len(set(blocks)) < len(blocks):
        num_parts = 1
    return [ordered[first::num_parts] for first in range(min(num_parts, len(ordered)))]


def steps_worth_sampling(left: abc.Sequence[int], most: int) -> int:
    """Return how many steps to sample at once, given how many tokens each sequence may still have: [B].

    A sixteenth of what is computed may be for sequences that have ended.

    >>> steps_worth_sampling([8, 8, 8], 8), steps_worth_sampling([2, 9], 8), steps_worth_sampling([1] + [9] * 99, 8)
    (8, 2, 8)
    """
    steps = np.arange(1, most + 1)
    wasted = (steps[:, None] - np.array(left)).clip(0).sum(1)
    return int(steps[wasted <= steps * len(left) / 16][-1])


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

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, limits: Limits = NO_LIMITS
    ) -> Tensor:
        """See `Rows.attend`."""
        num_tokens = int(self._offsets[-1])
        self._cache.write(layer, self._blocks, self._block_offsets, key[:num_tokens], value[:num_tokens])
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
        if limits.softcap is not None:
            share = query.shape[1] // key.shape[1]
            keys, values = (states.squeeze(0).repeat_interleave(share, 0) for states in (keys, values))
            scores = soft_capped((query.transpose(0, 1) @ keys.transpose(1, 2)) * scaling, limits.softcap)
            return (scores.masked_fill(~visible, float("-inf")).softmax(-1) @ values).transpose(0, 1)
        out = attend_fused(query.transpose(0, 1).unsqueeze(0), keys, values, scaling, visible)
        return out.squeeze(0).transpose(0, 1)
