"""Runs the model for the sequences that the scheduler chose: prefill, first tokens, and steps of decoding.

Owns: the KV cache, the batches that decode, tokens that were sampled ahead of need, and how work is cut over cores.
Must not know: requests that wait, or why a sequence ends. What is particular to a kind of device is behind `Backend`.
"""

from __future__ import annotations

from collections import abc, deque
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from rallypoint.config.limits import BLOCK_TOKENS
from rallypoint.cpu.threads import Lanes
from rallypoint.generation.native.block_manager import AttentionMetadata, BlockTables
from rallypoint.generation.native.decoder import Decoder, DecoderRows
from rallypoint.generation.native.kv_cache import CacheSize, KVCache, LayerShapes
from rallypoint.generation.native.recording_decoder import RecordingDecoder
from rallypoint.generation.native.recurrent import RecurrentStates, in_turns
from rallypoint.generation.native.sequence import PrefillChunk, Sequence
from rallypoint.generation.requests import prompt_logprobs, vocabulary_size
from rallypoint.generation.sampler import SampledTokens, Sampler, SamplingMetadata
from rallypoint.models.tensor_parallel import peers_of
from rallypoint.parallel import least_of

_WASTE, _WIDTH_OF_WASTE = 1 / 16, 128
"""Rows that may be wasted, as a share of a step's rows; and the hidden size up to which all of them may be.

Making batches takes about as long for any model. For one of 1M parameters, with a hidden size of 128, it takes as long
as a whole step, and for a larger one relatively less. A decoder that runs the model's own code may waste the first."""


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
        """Decode a step for each line of random numbers, [steps, B]; the host reads nothing in between."""
        ...

    def release(self) -> None:
        """Release all memory that belongs to a cache."""
        ...


class SampledStep(NamedTuple):
    """One token of each of B sequences."""

    sampled: SampledTokens
    experts: abc.Sequence[bytes] = ()
    """Experts of the pass that sampled each token, see `models.kinds.router_replay`: [B]; empty if not recorded."""


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

    def decode(self, num_steps: int) -> list[SampledStep]:
        """Send the newest token of every sequence through the model and sample the next one, so many times."""
        found = self._decode(num_steps)
        decoder = self._backend.decoder
        if isinstance(decoder, RecordingDecoder):
            chosen = decoder.take(len(self.sequences))
            return [SampledStep(*step) for step in zip(found, chosen, strict=True)]
        return [SampledStep(step) for step in found]

    def _decode(self, num_steps: int) -> list[SampledTokens]:
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

    def __init__(self, backend: Backend, cache_size: CacheSize, max_rows: int) -> None:
        self.cache: KVCache | None = None
        self._max_rows = max_rows
        self._backend, self._cache_size = backend, cache_size
        self._lanes = Lanes(backend.decoder.model.device)
        self._batches: list[DecodeBatch] = []
        self._num_threads_each: int | None = None
        self._ahead: deque[tuple[SampledStep, ...]] = deque()
        """Tokens of the next steps, of all batches."""

    @property
    def num_sampled_ahead(self) -> int:
        """Steps whose tokens have been sampled already."""
        return len(self._ahead)

    @property
    def max_waste(self) -> float:
        """Rows that may be wasted before new batches are made, as a share of a step's rows."""
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
        recurrent = None if shapes.delta is None else RecurrentStates(self._max_rows, shapes.delta)
        token_bytes = 2 * shapes.num_layers * shapes.kv_heads * shapes.head_dim * shapes.like.element_size()
        num_tokens = self._cache_size.num_tokens(token_bytes, shapes.like.device)
        num_tokens = least_of(peers_of(self._backend.decoder.model), num_tokens)  # they admit the same sequences
        self.cache = KVCache(-(-num_tokens // BLOCK_TOKENS), shapes, recurrent=recurrent)
        return self.cache

    def release_cache(self) -> None:
        """Release the cache, and everything that belongs to it."""
        self.end_batches()
        self.cache = None
        self._backend.release()

    def prefill(self, chunks: abc.Sequence[PrefillChunk]) -> None:
        """Store keys and values of chunks, and the last state of each that ends in a prompt's block."""
        assert self.cache is not None, "sequences were admitted"
        turns = [chunks] if self.cache.recurrent is None else in_turns(chunks)
        for turn in turns:
            self._prefill(self.cache, turn)

    def _prefill(self, cache: KVCache, chunks: abc.Sequence[PrefillChunk]) -> None:
        num, num_threads = self._backend.parts(sum(len(chunk.tokens) for chunk in chunks), self._lanes.num)
        parts = deal_out(chunks, num)
        jobs = [partial(self._backend.prefill, cache, part) for part in parts]
        for part, states in zip(parts, self._lanes.run(jobs, num_threads), strict=True):
            self._record(part)
            for chunk, wanted in zip(part, states, strict=True):
                block = chunk.slots[-1][0]
                if block.tokens:
                    block.last_state = wanted[-1]
                if (sequence := chunk.asked_by) is not None:
                    num, num_ids = sequence.request.prompt_logprobs or 0, vocabulary_size(self._backend.decoder.model)
                    said = prompt_logprobs(wanted, chunk.tokens, self._backend.logits, num, num_ids=num_ids)
                    sequence.prompt_logprobs = said

    def _record(self, chunks: abc.Sequence[PrefillChunk]) -> None:
        """Give blocks of prompts the experts of their tokens, if they are recorded."""
        if not isinstance(self._backend.decoder, RecordingDecoder):
            return
        (chosen,) = self._backend.decoder.take(sum(len(chunk.tokens) for chunk in chunks))
        for block in {block for chunk in chunks for block, _ in chunk.slots}:
            block.experts = []  # one that is computed again
        for (block, _), experts in zip([slot for chunk in chunks for slot in chunk.slots], chosen, strict=True):
            if block.tokens:
                block.experts.append(experts)

    def sample_first(self, sequences: abc.Sequence[Sequence]) -> list[tuple[abc.Sequence[Sequence], SampledStep]]:
        """Sample the first token of sequences whose prompts have been computed; return parts, with their tokens."""
        num, num_threads = self._backend.parts(len(sequences), self._lanes.num)
        parts = [sequences[first::num] for first in range(num)]
        sampled = self._lanes.run([partial(self._sample_first, part) for part in parts], num_threads)
        return list(zip(parts, sampled, strict=True))

    def _sample_first(self, sequences: abc.Sequence[Sequence]) -> SampledStep:
        states: list[Tensor] = []
        for sequence in sequences:
            state = sequence.prompt_blocks[-1].last_state
            assert state is not None, "prompts are prefilled first"
            states.append(state)
            sequence.prompt_experts = [experts for block in sequence.prompt_blocks for experts in block.experts]
        logits = self._backend.logits(torch.stack(states))
        rows = [(sequence.request, sequence.tokens) for sequence in sequences]
        experts = [one.prompt_experts[-1] for one in sequences if one.prompt_experts]
        return SampledStep(Sampler(rows, logits.device).sample(logits), experts)

    def make_batches(self, sequences: abc.Sequence[Sequence], tables: BlockTables, num_steps: int) -> None:
        """Make batches of sequences that have tokens, to decode so many steps, instead of those there are."""
        self._ahead.clear()
        self._settle(sequences)
        num, self._num_threads_each = self._backend.parts(len(sequences), self._lanes.num)
        parts = [sequences[first::num] for first in range(num)]
        jobs = [partial(self._make_batch, tables, num_steps, part) for part in parts]
        self._batches = self._lanes.run(jobs, self._num_threads_each)

    def _settle(self, sequences: abc.Sequence[Sequence]) -> None:
        """Begin the recurrent states of sequences that join: now, when nobody else decodes in their lines."""
        if self.cache is None or self.cache.recurrent is None:
            return
        for sequence in sequences:
            if not sequence.is_settled:
                snapshot = sequence.newest_block.snapshot
                assert snapshot is not None, "sequences are prefilled first"
                self.cache.recurrent.settle(sequence.line, snapshot)
                sequence.is_settled = True

    def _make_batch(self, tables: BlockTables, num_steps: int, sequences: abc.Sequence[Sequence]) -> DecodeBatch:
        assert self.cache is not None, "sequences run"
        lines, tokens, positions = np.array(
            [(one.line, one.tokens[-1], len(one.request.tokens) + len(one.tokens) - 1) for one in sequences]
        ).T
        metadata = tables.metadata(lines, tokens, positions)
        return DecodeBatch(sequences, self._backend.attention(self.cache, metadata, num_steps), self._backend)

    def decode(
        self, running: abc.Iterable[Sequence], num_steps_left: int
    ) -> list[tuple[abc.Sequence[Sequence], SampledStep]]:
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
        if isinstance(self._backend.decoder, RecordingDecoder):
            self._backend.decoder.forget()


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
