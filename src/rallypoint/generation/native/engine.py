"""Our own engine, on the very modules that are trained: continuous batching over blocks of keys and values.

Owns: who runs, in which memory, and when a response ends. Must not know: what the responses are for.

A step computes the prompts of those that join, sends the newest token of everybody else through the model, and draws
one token for each; small models draw some steps ahead, which new weights undo. Rows are in cohorts, each on a core of
its own where that pays, until rows need memory, or too much is computed for those that left, or too many wait to join.

Requests are admitted in the order in which they were submitted, as long as there is memory. When a running one needs a
block and there is none, the one admitted last is set back: its memory is taken, and it is computed again when its turn
comes. Its tokens stay the same, because they do not depend on when they are drawn.

In the mode `fast` the last bits of logits depend on which rows are computed together, as matrix products round by
their size; so two runs that batch otherwise may draw another token where the random number lies within 1e-6 (float32)
or 1e-2 (bfloat16) of the border between two. In the mode `exact` every product has one shape: tokens go through the
model 32 at a time, prompts too. Then logits are the same bits in every company.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from rallypoint.cpu.threads import Lanes
from rallypoint.generation.native.batch import Cohort, first_draws, steps_that_are_of_use, steps_that_pay
from rallypoint.generation.native.block_manager import Block, BlockPool
from rallypoint.generation.native.block_tables import Seats
from rallypoint.generation.native.kv_cache import CacheRoom
from rallypoint.generation.native.model_runner import Passes
from rallypoint.generation.native.prefill import Stretch, deal_out
from rallypoint.generation.native.sequence import BLOCK_TOKENS, Row
from rallypoint.generation.native.settings import check_room, check_settings
from rallypoint.generation.protocol import Output, Request
from rallypoint.generation.requests import Decode, check_request, max_positions, not_finite, take_over, vocabulary_of
from rallypoint.generation.sampler import Draws

_PREFILL_TOKENS = 8192
"""Of prompts that are computed in one step; one prompt may have more."""


class NativeEngine:
    """See `GenerationEngine`."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_rows: int = 256,
        cache_tokens: int | CacheRoom = 65_536,
        mode: Literal["fast", "exact"] = "fast",
        on_load: Literal["keep", "recompute"] = "keep",
        decode: Decode | None = None,
        version: int = 0,
        keeps_memory: bool = False,
        passes: Passes | None = None,
    ) -> None:
        """Sample from a model that `load_policy` made.

        Args:
            model: its weights are used where they are, and never copied.
            max_rows: that run together.
            cache_tokens: whose keys and values there is memory for; a `CacheRoom` where that is found out later.
            mode: see the module.
            on_load: whether rows that run go on with their old keys and values under new weights.
            decode: turns token ids into text, for stop strings.
            version: of the model's weights.
            keeps_memory: while it sleeps, and with it the steps that were captured: where nobody else needs it.
            passes: ways through the model; None: those for its device and the mode.

        Raises:
            ValueError: one of these is none of what it can be.
        """
        self._room = CacheRoom.of(cache_tokens)
        check_settings(max_rows, self._room.least_tokens, mode, on_load)
        self.model, self.version, self.is_asleep = model, version, False
        self._max_rows, self._keeps_memory = max_rows, keeps_memory
        self._is_exact, self._recomputes = mode == "exact", on_load == "recompute"
        self._passes = passes or Passes(model, is_exact=self._is_exact)
        self._lanes, self._decode = Lanes(model.device), decode
        self._num_blocks = -(-self._room.least_tokens // BLOCK_TOKENS)
        # A prompt and its response begin a block each.
        self.max_request_tokens = min(max_positions(model), (self._num_blocks - 1) * BLOCK_TOKENS)
        self.num_set_back = 0
        """Times that a running request lost its memory to an older one."""
        self._pool: BlockPool | None = None
        self._lock = threading.Lock()
        self._arrived: deque[Row] = deque()
        self._cancelled: set[int] = set()
        self._waiting: deque[Row] = deque()
        self._running: list[Row] = []
        self._seats = Seats(max_rows, BLOCK_TOKENS)
        self._late: list[Output] = []
        self._cohorts: list[Cohort] = []
        self._num_threads_each: int | None = None
        self._next_id, self._num_steps_left, self._num_wasted = 0, 0, 0
        # Of the cohorts, each with what was drawn for the coming steps.
        self._ahead: deque[tuple[Draws, ...]] = deque()
        # Of rows that have left while their cohort goes on.
        self._num_gone, self._held = 0, list[Block]()
        self._is_full = False

    @property
    def has_work(self) -> bool:
        """See `GenerationEngine.has_work`."""
        return bool(self._arrived or self._waiting or self._running or self._late)

    def submit(self, request: Request) -> int:
        """See `GenerationEngine.submit`."""
        check_request(request, vocabulary_of(self.model), self.max_request_tokens, self._decode is not None)
        room = max_positions(self.model) - len(request.tokens)
        max_new_tokens = min(request.params.max_new_tokens, room)
        check_room(request, max_new_tokens, self._num_blocks)
        with self._lock:
            self._next_id += 1
            row = Row(self._next_id, request, max_new_tokens, self._decode)
            self._arrived.append(row)
        return row.id

    def cancel(self, request_id: int) -> None:
        """See `GenerationEngine.cancel`."""
        with self._lock:
            self._cancelled.add(request_id)

    @torch.no_grad()
    def step(self) -> list[Output]:
        """See `GenerationEngine.step`. After an error those that ran wait for their turn."""
        outputs = self._take_in()
        if self.is_asleep:
            return outputs
        with ExitStack() as if_it_fails:
            if_it_fails.callback(self._start_over, outputs)
            drawn = self._sample()
            if_it_fails.pop_all()
        return outputs + drawn

    def _sample(self) -> list[Output]:
        """Draw a token for every row that runs, and end those that are done."""
        self._count_waste()
        joined = self._admit() if self._num_steps_left <= 1 else []
        if joined:
            self._compute(joined)
        new = [row for row, _ in joined if not row.tokens]
        if not self._num_steps_left:
            self._regroup(1 if new else BLOCK_TOKENS)
            new = [row for row in new if row.seat >= 0]  # one may have been set back
        drawn = self._draw() if self._cohorts else []
        if new:
            num, num_threads_each = self._passes.parts(len(new), self._lanes.num)
            parts = [new[first::num] for first in range(num)]
            draws = self._lanes.run([partial(first_draws, part, self._passes) for part in parts], num_threads_each)
            drawn += zip(parts, draws, strict=True)
        return [output for rows, draws in drawn for output in self._hand_out(rows, draws)]

    def _draw(self) -> list[tuple[Sequence[Row], Draws]]:
        """Return the next token of every row; those of some more steps are drawn with it where that pays."""
        if not self._ahead:
            num_steps = self._steps_at_once()
            jobs = [partial(cohort.draw, num_steps) for cohort in self._cohorts]
            self._ahead += zip(*self._lanes.run(jobs, self._num_threads_each), strict=True)
        self._num_steps_left -= 1
        return [(cohort.rows, draws) for cohort, draws in zip(self._cohorts, self._ahead.popleft(), strict=True)]

    def _steps_at_once(self) -> int:
        """Return how many tokens of each row to draw before anybody looks at them."""
        most = min(self._num_steps_left, *(cohort.max_steps_at_once for cohort in self._cohorts))
        return steps_that_are_of_use([row.max_new_tokens - len(row.tokens) for row in self._running], most)

    def load(self, version: int, weights: Mapping[str, Tensor] | None) -> None:
        """See `GenerationEngine.load`."""
        take_over(self.model, version, weights)
        begun = (*self._running, *self._waiting)  # those that were set back, or slept, have tokens too
        self._late += [row.output(self.version) for row in begun if row.num_delivered < len(row.tokens)]
        self.version = version
        if self._recomputes:
            self._set_back(self._running)
        self._let_go()  # with what the weights of before have drawn ahead
        if self._pool is not None:
            self._pool.forget()

    def sleep(self) -> None:
        """See `GenerationEngine.sleep`."""
        self._set_back(self._running)
        if self._keeps_memory and self._pool is not None:
            self._pool.forget()  # an engine that is made anew, as by a run that goes on, knows no prompts either
        else:
            self._pool = None
            self._passes.forget()
        self.is_asleep = True

    def wake(self) -> None:
        """See `GenerationEngine.wake`."""
        self.is_asleep = False

    def _take_in(self) -> list[Output]:
        """Queue what was submitted, and end what was cancelled."""
        outputs, self._late = self._late, []
        with self._lock:
            self._waiting += self._arrived
            self._arrived.clear()
            cancelled, self._cancelled = self._cancelled, set()
        if cancelled:
            gone = [row for row in (*self._waiting, *self._running) if row.id in cancelled]
            self._remove([row for row in gone if row in self._running])
            self._waiting = deque(row for row in self._waiting if row.id not in cancelled)
            outputs += [row.output(self.version, "cancelled") for row in gone]
        return outputs

    def _admit(self) -> list[tuple[Row, int]]:
        """Have waiting rows join while there is room, oldest first, each with memory for all that it has so far.

        Returns:
            Rows, and how many of their prompt's blocks were there already.
        """
        joined: list[tuple[Row, int]] = []
        num_tokens = 0
        pool = self._pool = self._pool or self._passes.make_pool(self._room, BLOCK_TOKENS)
        while self._waiting and len(self._running) < self._max_rows and num_tokens < _PREFILL_TOKENS:
            row = self._waiting[0]
            row.prompt_blocks = pool.find(row.request.tokens)
            pool.hold(row.prompt_blocks)
            num_found = sum(len(block.tokens) for block in row.prompt_blocks)
            missing = len(row.request.tokens) - num_found
            needed = -(-missing // BLOCK_TOKENS) + len(row.tokens) // BLOCK_TOKENS + 1
            # Some spare memory, or rows would soon be set back again.
            if needed + len(self._running) // 4 > pool.num_available and self._running:
                pool.leave(row.prompt_blocks)
                row.prompt_blocks = []
                if self._held:
                    self._let_go()
                    continue
                self._is_full = True
                break
            self._waiting.popleft()
            joined.append((row, len(row.prompt_blocks)))
            parent = row.prompt_blocks[-1] if row.prompt_blocks else None
            for start in range(num_found, len(row.request.tokens), BLOCK_TOKENS):
                parent = pool.shared(parent, row.request.tokens[start : start + BLOCK_TOKENS])
                assert parent is not None, "there was enough memory"
                pool.hold([parent])
                row.prompt_blocks.append(parent)
            row.seat = self._seats.take()
            self._seats.add(row.seat, row.prompt_blocks)
            self._running.append(row)
            # Now, as others that join must not count on that memory.
            self._grow(row, len(row.tokens) - 1)
            num_tokens += missing + len(row.tokens)
        return joined

    def _compute(self, joined: Sequence[tuple[Row, int]]) -> None:
        """Compute the keys and values that rows lack: of prompts, and of responses that were set back."""
        assert self._pool is not None, "rows have joined"
        stretches: list[Stretch] = []
        coming: set[Block] = set()
        for row, num_found in joined:
            end = row.prompt_blocks[-1]
            past, new = row.prompt_blocks[:num_found], row.prompt_blocks[num_found:]
            if not new and end.last_state is None and end not in coming:
                past, new = past[:-1], [end]  # found in a longer prompt: nobody has kept the state that comes after it
            if new:
                into = [(block, place) for block in new for place in range(len(block.tokens))]
                stretches.append(Stretch(past, [token for block in new for token in block.tokens], into))
                coming.add(end)
            if len(row.tokens) > 1:
                into = [(row.own_blocks[n // BLOCK_TOKENS], n % BLOCK_TOKENS) for n in range(len(row.tokens) - 1)]
                stretches.append(Stretch(row.prompt_blocks, row.tokens[:-1], into))
        if not stretches:
            return
        self._pool.clean()
        num, num_threads_each = self._passes.parts(sum(len(stretch.tokens) for stretch in stretches), self._lanes.num)
        parts = deal_out(stretches, num)
        jobs = [partial(self._passes.prefill, self._pool, part) for part in parts]
        for part, states in zip(parts, self._lanes.run(jobs, num_threads_each), strict=True):
            for stretch, state in zip(part, states, strict=True):
                block = stretch.into[-1][0]
                if block.tokens:
                    block.last_state = state

    def _count_waste(self) -> None:
        """Have new cohorts made where too much has been computed for those that left, or others could join."""
        could_join = 0 if self._is_full else min(len(self._waiting), self._max_rows - len(self._running))
        self._num_wasted += self._num_gone + could_join
        if self._num_wasted > self._passes.waste_that_pays * len(self._running):
            # Who joins now is in a cohort from the next step on.
            self._num_steps_left = min(self._num_steps_left, max(len(self._ahead), 1 if could_join else 0))

    def _regroup(self, max_steps: int) -> None:
        """Make cohorts of all rows that have tokens, for at most so many steps."""
        self._let_go()
        for row in sorted(self._running, key=lambda row: row.id):
            if row.seat >= 0:  # it may have been set back by an older one
                self._grow(row, len(row.tokens))
        rows = [row for row in self._running if row.tokens]
        if not rows:
            return
        assert self._pool is not None, "rows run"
        self._num_steps_left = num_steps = min(max_steps, self._grow_ahead(rows))
        self._pool.clean()
        rows.sort(key=lambda row: -len(row.prompt_blocks) - len(row.own_blocks))
        num, self._num_threads_each = self._passes.parts(len(rows), self._lanes.num)
        make = partial(Cohort.of, self._passes, self._pool, self._seats, num_steps)
        jobs = [partial(make, rows[first::num]) for first in range(num)]
        self._cohorts = self._lanes.run(jobs, self._num_threads_each)

    def _hand_out(self, rows: Sequence[Row], draws: Draws) -> list[Output]:
        """Give rows the tokens that were drawn for them, and end those that are done."""
        tokens, logprobs = draws.tokens.tolist(), draws.logprobs.tolist()
        sampled = logprobs if draws.sampled_logprobs is draws.logprobs else draws.sampled_logprobs.tolist()
        outputs: list[Output] = []
        ended: list[Row] = []
        for row, token, logprob, sampled_logprob in zip(rows, tokens, logprobs, sampled, strict=True):
            if row.seat < 0:  # has left before
                continue
            if math.isnan(logprob):
                outputs.append(row.output(self.version, "failed", not_finite(row.request, len(row.tokens))))
                ended.append(row)
                continue
            row.tokens.append(token)
            row.logprobs.append(logprob)
            row.sampled_logprobs.append(sampled_logprob)
            if row.stops is not None and row.stops.end_with(row.tokens):
                outputs.append(row.output(self.version, "stop"))
                ended.append(row)
            elif len(row.tokens) == row.max_new_tokens:
                outputs.append(row.output(self.version, "length"))
                ended.append(row)
            elif row.request.streamed:
                outputs.append(row.output(self.version))
        if ended:
            self._remove(ended)
        return outputs

    def _grow(self, row: Row, num_tokens: int) -> None:
        """Have memory for some tokens of a response, if need be that of the row that was submitted last."""
        assert self._pool is not None, "rows run"
        while len(row.own_blocks) * BLOCK_TOKENS < num_tokens:
            block = self._pool.private()
            if block is not None:
                row.own_blocks.append(block)
                self._seats.add(row.seat, [block])
                continue
            newest = max(self._running, key=lambda row: row.id)
            self._set_back([newest])
            if newest is row:
                return

    def _grow_ahead(self, rows: Sequence[Row]) -> int:
        """Have memory for so many tokens of each row as pays, if nobody must leave for it, and return their number."""
        assert self._pool is not None, "rows run"
        room = np.array([row.room for row in rows])
        num_steps = steps_that_pay(room)
        for row, fits in zip(rows, room.tolist(), strict=True):
            if fits < num_steps and self._pool.num_available:
                self._grow(row, len(row.tokens) + fits)
            elif fits < num_steps:
                num_steps = fits
        return num_steps

    def _start_over(self, outputs: Sequence[Output]) -> None:
        """Have all rows wait for their turn, and prompts that may lack keys and values be unknown."""
        self._late += outputs
        self._set_back(self._running)
        if self._pool is not None:
            self._pool.forget()

    def _set_back(self, rows: Sequence[Row]) -> None:
        """Take memory from rows and have them wait for their turn, with the tokens that they have."""
        self.num_set_back += len(rows)
        self._waiting = deque(sorted((*rows, *self._waiting), key=lambda row: row.id))
        self._remove(rows)
        self._let_go()

    def _remove(self, rows: Sequence[Row]) -> None:
        """Have rows run no more. As long as their cohort goes on, so does what is computed for them."""
        for row in rows:
            self._held += (*row.prompt_blocks, *row.own_blocks)
            self._seats.leave(row.seat)
            row.prompt_blocks, row.own_blocks, row.seat = [], [], -1
        self._running = [row for row in self._running if row.seat >= 0]
        self._num_gone += len(rows)
        if not self._running:
            self._let_go()

    def _let_go(self) -> None:
        """Forget the cohorts, and have the memory of those that have left."""
        self._cohorts, self._num_steps_left, self._num_wasted, self._num_gone = [], 0, 0, 0
        self._ahead.clear()
        if self._held:
            assert self._pool is not None, "rows ran"
            self._pool.leave(self._held)
            self._held, self._is_full = [], False
