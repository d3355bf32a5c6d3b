"""Our own engine, on the very modules that are trained: continuous batching over blocks of keys and values.

Owns: who runs, in which memory, and when a response ends. Must not know: what the responses are for.

A step computes the prompts of those that join, sends the newest token of everybody else through the model, and draws
one token for each. Requests are admitted in the order in which they were submitted, as long as there is memory. When
a running one needs a block and there is none, the one admitted last is set back: its memory is taken, and it is
computed again when its turn comes. Its tokens stay the same, because they do not depend on when they are drawn.

In the mode `fast` the last bits of logits depend on which rows are computed together, as matrix products round by
their size; so two runs that batch otherwise may draw another token where the random number lies within 1e-6 (float32)
or 1e-2 (bfloat16) of the border between two. In the mode `exact` every product has one shape: tokens go through the
model 32 at a time, prompts too. Then logits are the same bits in every company.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from rallypoint.errors import RequestError
from rallypoint.generation.blocks import Block, BlockPool
from rallypoint.generation.decoder import Backbone, PlainDecoder, ShapeProbe, check_decoder
from rallypoint.generation.drawing import Drawing
from rallypoint.generation.layout import QueryRows
from rallypoint.generation.prefill import Stretch, StretchRows
from rallypoint.generation.protocol import Piece, Request
from rallypoint.generation.requests import Decode, check_request, max_positions, not_finite, take_over, vocabulary_of
from rallypoint.generation.row import BLOCK_TOKENS, Row
from rallypoint.generation.seats import Queries, Seats
from rallypoint.models import lm_head
from rallypoint.models.families import logit_softcap
from rallypoint.models.head import soft_capped

_EXACT_TOKENS = 32
"""That go through the model together in the mode `exact`."""
_PREFILL_TOKENS = 8192
"""Of prompts that are computed in one step; one prompt may have more."""


class NativeEngine:
    """See `GenerationEngine`."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_rows: int = 256,
        cache_tokens: int = 65_536,
        mode: Literal["fast", "exact"] = "fast",
        on_load: Literal["keep", "recompute"] = "keep",
        decode: Decode | None = None,
        version: int = 0,
    ) -> None:
        """Sample from a model that `load_policy` made.

        Args:
            model: its weights are used where they are, and never copied.
            max_rows: that run together.
            cache_tokens: whose keys and values there is memory for.
            mode: see the module.
            on_load: whether rows that run go on with their old keys and values under new weights.
            decode: turns token ids into text, for stop strings.
            version: of the model's weights.
        """
        self.model, self.version, self.is_asleep = model, version, False
        self._max_rows, self._is_exact, self._recomputes = max_rows, mode == "exact", on_load == "recompute"
        self._decode = decode
        self._num_blocks = -(-cache_tokens // BLOCK_TOKENS)
        # A prompt and its response begin a block each.
        self.max_request_tokens = min(max_positions(model), (self._num_blocks - 1) * BLOCK_TOKENS)
        self.num_set_back = 0
        """Times that a running request lost its memory to an older one."""
        self._own_code = Backbone(model)
        self._decode_tokens: Callable[[QueryRows], Tensor] = self._own_code
        self._pool: BlockPool | None = None
        self._heads = 0
        self._next_id = 0
        self._lock = threading.Lock()
        self._arrived: deque[Row] = deque()
        self._cancelled: set[int] = set()
        self._waiting: deque[Row] = deque()
        self._running: list[Row] = []
        self._seats = Seats(max_rows, BLOCK_TOKENS)
        self._late: list[Piece] = []
        # Made for the rows that run, and forgotten when they change.
        self._drawing: Drawing | None = None
        self._layouts: list[QueryRows] = []
        self._num_steps_left = 0
        self._newest = torch.zeros(0, dtype=torch.int64)

    @property
    def has_work(self) -> bool:
        """See `GenerationEngine.has_work`."""
        return bool(self._arrived or self._waiting or self._running or self._late)

    def submit(self, request: Request) -> int:
        """See `GenerationEngine.submit`."""
        check_request(request, vocabulary_of(self.model), self.max_request_tokens, self._decode is not None)
        room = max_positions(self.model) - len(request.tokens)
        max_new_tokens = min(request.params.max_new_tokens, room)
        needed = sum(-(-count // BLOCK_TOKENS) for count in (len(request.tokens), max_new_tokens))
        if needed > self._num_blocks:
            raise RequestError(
                f"prompt {request.prompt_index} has {len(request.tokens)} tokens and its response up to "
                f"{max_new_tokens}, which takes {needed} blocks of {BLOCK_TOKENS} tokens, but the cache has "
                f"{self._num_blocks}; give it more memory, or shorten one of them"
            )
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
    def step(self) -> list[Piece]:
        """See `GenerationEngine.step`."""
        pieces = self._take_in()
        if self.is_asleep:
            return pieces
        joined = self._admit()
        if joined:
            self._compute(joined)
        states = self._advance()
        if states is not None:
            self._draw(states, pieces)
        return pieces

    def load(self, version: int, weights: Mapping[str, Tensor] | None) -> None:
        """See `GenerationEngine.load`."""
        take_over(self.model, version, weights)
        begun = (*self._running, *self._waiting)  # those that were set back, or slept, have tokens too
        self._late += [row.piece(self.version) for row in begun if row.num_delivered < len(row.tokens)]
        self.version = version
        if self._recomputes:
            self._set_back(self._running)
        if self._pool is not None:
            self._pool.forget()

    def sleep(self) -> None:
        """See `GenerationEngine.sleep`."""
        self._set_back(self._running)
        self._pool = None
        self.is_asleep = True

    def wake(self) -> None:
        """See `GenerationEngine.wake`."""
        self.is_asleep = False

    def _take_in(self) -> list[Piece]:
        """Queue what was submitted, and end what was cancelled."""
        pieces, self._late = self._late, []
        with self._lock:
            self._waiting += self._arrived
            self._arrived.clear()
            cancelled, self._cancelled = self._cancelled, set()
        if cancelled:
            gone = [row for row in (*self._waiting, *self._running) if row.id in cancelled]
            self._remove([row for row in gone if row in self._running])
            self._waiting = deque(row for row in self._waiting if row.id not in cancelled)
            pieces += [row.piece(self.version, "cancelled") for row in gone]
        return pieces

    def _admit(self) -> list[tuple[Row, int]]:
        """Have waiting rows join while there is room, oldest first, each with memory for all that it has so far.

        Returns:
            Rows, and how many of their prompt's blocks were there already.
        """
        joined: list[tuple[Row, int]] = []
        num_tokens = 0
        pool = self._pool = self._pool or self._make_pool()
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
        if joined:
            # Those whose first token comes from their prompt stand last.
            self._running.sort(key=lambda row: not row.tokens)
            self._drawing = None
            self._forget_layout()
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
        stretches.sort(key=lambda stretch: bool(stretch.past))
        self._pool.clean()
        states = self._pass_in_tiles(stretches) if self._is_exact else self._pass_packed(stretches)
        for stretch, state in zip(stretches, states, strict=True):
            block = stretch.into[-1][0]
            if block.tokens:
                block.last_state = state

    def _pass_packed(self, stretches: Sequence[Stretch]) -> Tensor:
        """Return the state after each stretch: [R, E]."""
        assert self._pool is not None, "rows have joined"
        rows = StretchRows(self._pool, stretches)
        return self._own_code(rows).index_select(0, rows.ends.to(rows.tokens.device))

    def _pass_in_tiles(self, stretches: Sequence[Stretch]) -> Tensor:
        """Return the same, from products of one shape."""
        queries: list[tuple[int, int, Sequence[Block], int]] = []
        ends: list[int] = []
        for stretch in stretches:
            blocks = list(stretch.past)
            for token, (block, place) in zip(stretch.tokens, stretch.into, strict=True):
                if not blocks or blocks[-1] is not block:
                    blocks = [*blocks, block]
                position = stretch.num_past + len(queries) - (ends[-1] + 1 if ends else 0)
                queries.append((token, position, blocks, place + 1))
            ends.append(len(queries) - 1)
        states = [self._decode_tokens(layout) for layout in self._lay_out(Queries.of(queries, BLOCK_TOKENS))]
        return torch.cat(states)[ends]

    def _advance(self) -> Tensor | None:
        """Send the newest token of every row through the model: [B, E] for the rows that run; None for none."""
        decoding = [row for row in self._running if row.tokens]
        if decoding and not self._num_steps_left:
            for row in sorted(decoding, key=lambda row: row.id):
                if row in self._running:  # it may have been set back by an older one
                    self._grow(row, len(row.tokens))
            decoding = [row for row in self._running if row.tokens]
            self._layouts = self._lay_out(self._newest_queries(decoding)) if decoding else []
        elif decoding:
            for layout, tokens in zip(self._layouts, self._newest.split(self._tile), strict=True):
                layout.advance(tokens)
        self._num_steps_left -= bool(decoding)
        if not self._running:
            return None
        states = [self._decode_tokens(layout)[: layout.num_queries] for layout in self._layouts]
        for row in self._running[len(decoding) :]:
            state = row.prompt_blocks[-1].last_state
            assert state is not None, "the prompts of those that join are computed first"
            states.append(state.unsqueeze(0))
        return torch.cat(states)

    def _draw(self, states: Tensor, pieces: list[Piece]) -> None:
        """Draw a token for every row that runs, and end those that are done."""
        if self._drawing is None:
            self._drawing = Drawing([(row.request, row.tokens) for row in self._running], states.device)
        if not self._running[-1].tokens:
            self._forget_layout()  # who joins now is decoded from the next step on
        draws = self._drawing.draw(self._logits(states))
        self._newest = draws.tokens
        tokens, logprobs = draws.tokens.tolist(), draws.logprobs.tolist()
        sampled = logprobs if draws.sampled_logprobs is draws.logprobs else draws.sampled_logprobs.tolist()
        ended: list[Row] = []
        for row, token, logprob, sampled_logprob in zip(self._running, tokens, logprobs, sampled, strict=True):
            if math.isnan(logprob):
                pieces.append(row.piece(self.version, "failed", not_finite(row.request, len(row.tokens))))
                ended.append(row)
                continue
            row.tokens.append(token)
            row.logprobs.append(logprob)
            row.sampled_logprobs.append(sampled_logprob)
            if row.stops is not None and row.stops.end_with(row.tokens):
                pieces.append(row.piece(self.version, "stop"))
                ended.append(row)
            elif len(row.tokens) == row.max_new_tokens:
                pieces.append(row.piece(self.version, "length"))
                ended.append(row)
            elif row.request.streamed:
                pieces.append(row.piece(self.version))
        if ended:
            self._remove(ended)

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

    def _set_back(self, rows: Sequence[Row]) -> None:
        """Take memory from rows and have them wait for their turn, with the tokens that they have."""
        self.num_set_back += len(rows)
        self._waiting = deque(sorted((*rows, *self._waiting), key=lambda row: row.id))
        self._remove(rows)

    def _remove(self, rows: Sequence[Row]) -> None:
        """Have rows run no more."""
        for row in rows:
            assert self._pool is not None, "rows run"
            self._pool.leave((*row.prompt_blocks, *row.own_blocks))
            self._seats.leave(row.seat)
            row.prompt_blocks, row.own_blocks = [], []
        gone = set(map(id, rows))
        self._running = [row for row in self._running if id(row) not in gone]
        self._drawing = None
        self._forget_layout()

    def _forget_layout(self) -> None:
        self._layouts, self._num_steps_left = [], 0

    @property
    def _tile(self) -> int:
        """How many tokens go through the model together, at most; in the mode `exact` always as many."""
        return _EXACT_TOKENS if self._is_exact else 2**31 - 1

    def _newest_queries(self, rows: Sequence[Row]) -> Queries:
        """Return the newest token of each row, with memory for it, and note for how many steps it lasts."""
        numbers = [(row.seat, row.tokens[-1], len(row.tokens) - 1, len(row.request.tokens)) for row in rows]
        seats, tokens, num_stored, num_prompt = np.array(numbers).T
        num_own = num_stored % BLOCK_TOKENS + 1
        self._num_steps_left = BLOCK_TOKENS + 1 - int(num_own.max())
        return self._seats.queries(seats, tokens, num_prompt + num_stored, num_own)

    def _lay_out(self, queries: Queries) -> list[QueryRows]:
        assert self._pool is not None, "there are queries"
        self._pool.clean()
        pool, heads, tile = self._pool, self._heads, self._tile if self._is_exact else None
        in_bags = self._is_exact or self.model.device.type == "cpu"
        return [QueryRows(pool, part, heads, tile=tile, in_bags=in_bags) for part in queries.parts(self._tile)]

    def _logits(self, states: Tensor) -> Tensor:
        """[B, E] -> [B, V]."""
        head, softcap = lm_head(self.model), logit_softcap(self.model.config)
        if not self._is_exact:
            return soft_capped(head(states), softcap)
        tiles = functional.pad(states, (0, 0, 0, -len(states) % self._tile)).split(self._tile)
        return soft_capped(torch.cat([head(tile) for tile in tiles]), softcap)[: len(states)]

    def _make_pool(self) -> BlockPool:
        """Ask the model for the shapes of its layers, and reserve memory for their keys and values."""
        if PlainDecoder.fits(self.model) and self._decode_tokens is self._own_code:
            decoder = PlainDecoder(self.model)
            check_decoder(self.model, decoder)
            self._decode_tokens = decoder
        probe = ShapeProbe()
        tokens = torch.zeros(1, 1, dtype=torch.int64, device=self.model.device)
        self.model.base_model(input_ids=tokens, position_ids=tokens, use_cache=False, rows=probe)
        (self._heads, kv_heads, head_dim, like), *others = probe.layers
        assert all(other[:3] == (self._heads, kv_heads, head_dim) for other in others), "layers are alike"
        return BlockPool(self._num_blocks, BLOCK_TOKENS, len(probe.layers), kv_heads, head_dim, like)
