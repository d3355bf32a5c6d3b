"""Which sequences run, on which blocks, and for how many steps they stay together.

Owns: the queue, admission, preemption, and when batches are made again. Must not know: models, tensors, or outputs.

Sequences are admitted in the order of their requests, as long as there will probably be memory whenever one that runs
needs it: responses are expected to be as long as those that have ended, and leave their memory then. When a running one
needs a block and none is left, the one admitted last is preempted: it loses its blocks, waits, and is computed again
when its turn comes. Its tokens stay the same, because they do not depend on when they are sampled.

Sequences that decode together form batches. Making batches costs more than computing a few wasted rows, so they last
for several steps: sequences get memory for some tokens ahead, and one that has ended keeps its row until new batches
are made. That happens when memory is needed, when too many rows are wasted, or when too many could join.
"""

from __future__ import annotations

from collections import abc, deque

import numpy as np

from rallypoint.config.limits import BLOCK_TOKENS, PREFILL_TOKENS
from rallypoint.generation.native.block_manager import Block, BlockManager, BlockTables, Integers
from rallypoint.generation.native.sequence import PrefillChunk, Sequence

_LENGTHS = 256
"""Responses over which the mean of their lengths is taken, roughly."""


class Scheduler:
    """The sequences of one engine."""

    def __init__(self, max_sequences: int) -> None:
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.tables = BlockTables(max_sequences)
        self.blocks: BlockManager | None = None
        """Blocks of the KV cache; None until there is one."""
        self.num_steps = 0
        """Steps that are left of the current batches."""
        self.is_recurrent = False
        """Whether the model has layers of linear attention, whose states begin with a snapshot (see `recurrent`)."""
        self.num_preempted = 0
        """Times that a running sequence lost its memory."""
        self._max_sequences = max_sequences
        self._num_ended, self._num_wasted = 0, 0
        self._held: list[Block] = []
        """Blocks of sequences that have ended while their batch goes on, and still writes to them."""
        self._is_full = False
        self._mean_length: float | None = None
        """Tokens of the responses that ended last; None until one has."""

    def cancel(self, request_ids: abc.Set[int]) -> list[Sequence]:
        """Drop the sequences with these ids, and return those found."""
        cancelled = [one for one in (*self.waiting, *self.running) if one.id in request_ids]
        self.end([one for one in cancelled if one.is_running])
        self.waiting = deque(one for one in self.waiting if one.id not in request_ids)
        return cancelled

    def admit(self) -> tuple[list[Sequence], list[PrefillChunk]]:
        """Admit waiting sequences while there is room, oldest first; return them, and what must be prefilled."""
        admitted: list[tuple[Sequence, int]] = []
        num_tokens, prospects = 0, list(map(self._prospect, self.running))
        most_to_come = sum(_blocks(left) for left, _ in prospects)
        while self.waiting and len(self.running) < self._max_sequences and num_tokens < PREFILL_TOKENS:
            sequence = self.waiting[0]
            num_found = self._allocate_prompt(sequence, prospects, most_to_come)
            if num_found is None:
                if self._held:
                    self.end_batches()
                    continue
                self._is_full = True
                break
            self.waiting.popleft()
            admitted.append((sequence, num_found))
            sequence.line, sequence.is_settled = self.tables.take_line(), False
            self.tables.append(sequence.line, sequence.prompt_blocks)
            self.running.append(sequence)
            # Now, as the next ones must not count on that memory.
            self._grow(sequence, len(sequence.tokens) - 1)
            prospects.append(self._prospect(sequence))
            most_to_come += _blocks(prospects[-1][0])
            num_cached = sum(len(block.tokens) for block in sequence.prompt_blocks[:num_found])
            num_tokens += len(sequence.request.tokens) - num_cached + len(sequence.tokens)
        return [sequence for sequence, _ in admitted], _chunks(admitted, is_recurrent=self.is_recurrent)

    def make_batches(self, max_steps: int) -> list[Sequence]:
        """Give all sequences with tokens memory for at most so many steps; return them, the longest first."""
        self.end_batches()
        for sequence in sorted(self.running, key=lambda one: one.id):
            if sequence.is_running:  # an older one may have preempted it
                self._grow(sequence, len(sequence.tokens))
        sequences = [sequence for sequence in self.running if sequence.tokens]
        if sequences:
            self.num_steps = min(max_steps, self._grow_ahead(sequences))
            sequences.sort(key=lambda one: -len(one.prompt_blocks) - len(one.own_blocks))
        return sequences

    def count_waste(self, num_sampled_ahead: int, max_waste: float) -> None:
        """End the batches soon if too much was computed for sequences that have ended, or others could join.

        Args:
            num_sampled_ahead: steps whose tokens are sampled already.
            max_waste: rows that may be wasted before new batches pay, as a part of those that run.
        """
        could_join = 0 if self._is_full else min(len(self.waiting), self._max_sequences - len(self.running))
        self._num_wasted += self._num_ended + could_join
        if self._num_wasted > max_waste * len(self.running):
            # A sequence that joins now is in a batch from the next step on.
            self.num_steps = min(self.num_steps, max(num_sampled_ahead, 1 if could_join else 0))

    def preempt(self, sequences: abc.Sequence[Sequence]) -> None:
        """Preempt sequences: take their memory, and queue them again with the tokens that they have."""
        self.num_preempted += len(sequences)
        self.waiting = deque(sorted((*sequences, *self.waiting), key=lambda one: one.id))
        self.end(sequences)
        self.end_batches()

    def end(self, sequences: abc.Sequence[Sequence]) -> None:
        """Stop running sequences. Until their batch ends, it still writes to their blocks."""
        for sequence in sequences:
            self._held += sequence.blocks
            self.tables.free_line(sequence.line)
            sequence.prompt_blocks, sequence.own_blocks, sequence.line = [], [], -1
        self.running = [sequence for sequence in self.running if sequence.is_running]
        self._num_ended += len(sequences)
        if not self.running:
            self.end_batches()

    def note_length(self, num_tokens: int) -> None:
        """Take into account how long a response was that has ended by itself."""
        before = float(num_tokens) if self._mean_length is None else self._mean_length
        self._mean_length = before + (num_tokens - before) / _LENGTHS

    def end_batches(self) -> None:
        """Drop the batches, and free the memory of sequences that have ended."""
        self.num_steps = self._num_wasted = self._num_ended = 0
        if self._held:
            assert self.blocks is not None, "sequences ran"
            self.blocks.release(self._held)
            self._held, self._is_full = [], False

    def forget_prompts(self) -> None:
        """Empty the prefix cache."""
        if self.blocks is not None:
            self.blocks.forget_prompts()

    def _prospect(self, sequence: Sequence) -> tuple[int, int]:
        """Return how many more tokens a response will probably have, and how many blocks it has."""
        limit, num = sequence.max_new_tokens, len(sequence.tokens)
        mean = limit / 2 if self._mean_length is None else self._mean_length
        # One that is longer than most may be much longer.
        return max(0, int(min(limit, max(mean, num + mean / 4))) - num), len(sequence.own_blocks)

    def _allocate_prompt(
        self, sequence: Sequence, prospects: abc.Sequence[tuple[int, int]], most_to_come: int
    ) -> int | None:
        """Allocate the blocks of a prompt, and return how many were in the prefix cache.

        Return None if there is too little memory for them, the response, and what others will need meanwhile, which are
        at most `most_to_come` blocks.
        """
        blocks, tokens = self.blocks, sequence.request.tokens
        assert blocks is not None, "there is a cache"
        found = [] if sequence.asks_of_prompt else blocks.find(tokens)
        blocks.acquire(found)
        num_cached = sum(len(block.tokens) for block in found)
        needed = _blocks(len(tokens) - num_cached) + len(sequence.tokens) // BLOCK_TOKENS + 1
        room, own = blocks.num_available - needed, self._prospect(sequence)
        # What is needed at once costs a look at all that run, for each that joins; mostly there is room for everything.
        is_roomy = most_to_come + _blocks(own[0]) <= room
        if self.running and not is_roomy and blocks_to_come([*prospects, own]) > room:
            blocks.release(found)
            return None
        sequence.prompt_blocks = list(found)
        for start in range(num_cached, len(tokens), BLOCK_TOKENS):
            parent = sequence.prompt_blocks[-1] if sequence.prompt_blocks else None
            part = tokens[start : start + BLOCK_TOKENS]
            if sequence.asks_of_prompt:  # others may have the same blocks, computed already
                block = blocks.allocate(parent, part)
            elif block := blocks.allocate_shared(parent, part):
                blocks.acquire([block])
            assert block is not None, "there was enough memory"
            sequence.prompt_blocks.append(block)
        return len(found)

    def _grow(self, sequence: Sequence, num_tokens: int) -> None:
        """Get memory for some tokens of a response, if necessary by preempting the sequence that was submitted last."""
        assert self.blocks is not None, "sequences run"
        while len(sequence.own_blocks) * BLOCK_TOKENS < num_tokens:
            block = self.blocks.allocate()
            if block is not None:
                sequence.own_blocks.append(block)
                self.tables.append(sequence.line, [block])
                continue
            newest = max(self.running, key=lambda one: one.id)
            self.preempt([newest])
            if newest is sequence:
                return

    def _grow_ahead(self, sequences: abc.Sequence[Sequence]) -> int:
        """Get memory for as many steps as pay without preempting a sequence, and return their number."""
        assert self.blocks is not None, "sequences run"
        in_memory = np.array([sequence.num_steps_in_memory for sequence in sequences])
        num_steps = steps_that_pay(in_memory)
        for sequence, fits in zip(sequences, in_memory.tolist(), strict=True):
            if fits < num_steps and self.blocks.num_available:
                self._grow(sequence, len(sequence.tokens) + fits)
            elif fits < num_steps:
                num_steps = fits
        return num_steps


def _blocks(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK_TOKENS)


def blocks_to_come(prospects: abc.Sequence[tuple[int, int]]) -> int:
    """Return how many more blocks sequences will have at once, given the tokens left of each and the blocks it has.

    That is most when one of them is about to end, and those that end before it have left their blocks.

    >>> blocks_to_come([(64, 1)]), blocks_to_come([(64, 1), (64, 1)])
    (2, 4)
    >>> blocks_to_come([(96, 0), (32, 2)])  # when the second is about to end, or when only the first is left
    2
    """
    left, held = np.array(sorted(prospects, reverse=True)).T
    blocks = -(-left // BLOCK_TOKENS)
    freed = held[::-1].cumsum()[::-1] - held
    return max(0, int((np.arange(1, len(left) + 1) * blocks - freed).max()))


def _chunks(admitted: abc.Sequence[tuple[Sequence, int]], *, is_recurrent: bool) -> list[PrefillChunk]:
    """Return what sequences lack of their keys and values, given how many blocks of their prompts were found.

    That is of prompts, and of responses of sequences that were preempted.
    """
    chunks: list[PrefillChunk] = []
    coming: set[Block] = set()
    for sequence, num_found in admitted:
        end = sequence.prompt_blocks[-1]
        past, new = sequence.prompt_blocks[:num_found], sequence.prompt_blocks[num_found:]
        if not new and end.last_state is None and end not in coming:
            past, new = past[:-1], [end]  # found inside a longer prompt, so the state of its last token was not kept
        if is_recurrent and end not in coming and any(block.snapshot is None for block in past[-1:]):
            past, new = [], sequence.prompt_blocks  # nothing to go on from
        if new:
            slots = [(block, offset) for block in new for offset in range(len(block.tokens))]
            asked_by = sequence if sequence.asks_of_prompt else None
            chunks.append(PrefillChunk(past, [token for block in new for token in block.tokens], slots, asked_by))
            coming.add(end)
        if len(sequence.tokens) > 1:
            num = len(sequence.tokens) - 1
            slots = [(sequence.own_blocks[n // BLOCK_TOKENS], n % BLOCK_TOKENS) for n in range(num)]
            chunks.append(PrefillChunk(sequence.prompt_blocks, sequence.tokens[:-1], slots))
    return chunks


def steps_that_pay(in_memory: Integers) -> int:
    """Return for how many steps to make batches, given for how many steps each sequence has memory: [B].

    To make them costs about as much as three more blocks of every sequence for one step. A sequence whose memory lasts
    for fewer steps gets another block, which is of no use until its memory is full.

    >>> steps_that_pay(np.array([31, 31, 31]))
    31
    >>> steps_that_pay(np.array([31, 2, 17]))  # the second one gets a block, which is of no use for 2 steps
    17
    """
    steps = np.arange(1, BLOCK_TOKENS + 1)
    wasted = (in_memory * (in_memory < steps[:, None])).sum(1)
    return int(steps[np.argmin((3 * len(in_memory) + wasted) / steps)])
