"""Decoding on CPUs: attention in bags, and steps without Python in between.

Owns: which numbers each query attends to, and how that moves from step to step (`BagAttention`); in which parts and
over how many threads tokens go through the model (`CPUBackend`); and products of one shape, for bits that do not depend
on what else is in the batch (`ExactBackend`, on every device).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from rallypoint.cpu.onednn import filled_up
from rallypoint.cpu.script import without_python
from rallypoint.generation.native.block_manager import AttentionMetadata, Block, Integers
from rallypoint.generation.native.cpu.bags import Bags, Moves, advance, attend, decode, decode_steps
from rallypoint.generation.native.decoder import Decoder
from rallypoint.generation.native.kv_cache import KVCache, LayerShapes
from rallypoint.generation.native.model_runner import DecodeAttention
from rallypoint.generation.native.prefill import prefill_packed, wanted_states
from rallypoint.generation.native.sequence import PrefillChunk
from rallypoint.generation.sampler import SampledTokens, SamplingMetadata
from rallypoint.models.kinds.experts import same_shapes
from rallypoint.models.kinds.linear_attention import DeltaInputs
from rallypoint.models.products import NO_LIMITS, Limits

_SLOTS_OF_A_CLASS = 64
"""Blocks of padding tolerated per head; one more class of lengths costs about as much."""
_NUMBERS_OF_A_LANE = 4_000
"""Fewest numbers of hidden states (rows times width) for a second thread; with fewer, handing over the work costs
what it saves. At 1M, where hidden states have 128 numbers, 64 rows gain a twentieth and 128 a third."""
_WIDTH_OF_SEVERAL_THREADS = 1024
"""Least width of hidden states for operations on few rows to be cut over threads: up to 50M, one thread is faster."""
_STEPS_AT_ONCE = 8
"""Steps in one call, for models below that width: their steps are short, so nobody waits long, and the time that
Python takes between two of them matters."""
_TILE = 32
"""Tokens that go through the model together in the mode `exact`."""


class CPUBackend:
    """See `Backend`."""

    min_steps = 2

    def __init__(self, model: PreTrainedModel) -> None:
        self.decoder = Decoder(model)
        self._heads = 0

    @property
    def max_steps(self) -> int:
        """See `Backend.max_steps`."""
        decoder = self.decoder
        is_short = decoder.is_plain and decoder.hidden_size < _WIDTH_OF_SEVERAL_THREADS
        return _STEPS_AT_ONCE if is_short and decoder.plain_head is not None else 1

    def prepare(self, shapes: LayerShapes) -> None:
        """See `Backend.prepare`."""
        self._heads = shapes.heads

    def parts(self, num_tokens: int, num_lanes: int) -> tuple[int, int | None]:
        """See `Backend.parts`.

        A model's own code is one part, as it may keep a state, and ranks that compute together need one order.
        """
        size, is_plain = self.decoder.hidden_size, self.decoder.is_plain
        if is_plain and num_tokens * size >= num_lanes * _NUMBERS_OF_A_LANE:
            return min(num_lanes, num_tokens), None
        return 1, None if size >= _WIDTH_OF_SEVERAL_THREADS or not is_plain else 1

    def prefill(self, cache: KVCache, chunks: Sequence[PrefillChunk]) -> Sequence[Tensor]:
        """See `Backend.prefill`."""
        return prefill_packed(self.decoder, cache, chunks, self._padded(sum(len(chunk.tokens) for chunk in chunks)))

    def attention(self, cache: KVCache, metadata: AttentionMetadata, num_steps: int) -> Sequence[BagAttention]:
        """See `Backend.attention`."""
        num_rows = self._padded(len(metadata.tokens))
        return [BagAttention(cache, metadata, self._heads, num_rows=num_rows, num_steps=num_steps)]

    def decode(self, attention: Sequence[DecodeAttention]) -> Tensor:
        """See `Backend.decode`."""
        network = self.decoder.network
        if network is None:
            states = [self.decoder(part)[: part.num_queries] for part in attention]
        else:
            parts = cast("Sequence[BagAttention]", attention)
            run = without_python(decode, parts[0].tokens.device)
            states = [run(network, part.bags)[: part.num_queries] for part in parts]
        return states[0] if len(states) == 1 else torch.cat(states)

    def logits(self, states: Tensor) -> Tensor:
        """See `Backend.logits`."""
        padding = self._padded(len(states)) - len(states)
        return self.decoder.logits(functional.pad(states, (0, 0, 0, padding)))[: len(states)]

    def decode_steps(
        self, attention: Sequence[DecodeAttention], sampling: SamplingMetadata, numbers: Tensor
    ) -> list[SampledTokens]:
        """See `Backend.decode_steps`."""
        (part,) = cast("Sequence[BagAttention]", attention)
        network, head = self.decoder.network, self.decoder.plain_head
        assert network is not None, "`max_steps` said so"
        assert head is not None, "`max_steps` said so"
        run = without_python(decode_steps, numbers.device)
        found = run(network, head, part.bags, part.moves, part.num_moves, sampling, numbers)
        part.num_moves = min(part.num_moves + len(numbers), len(part.moves.distances[0]))
        return [SampledTokens(*step) for step in zip(*found, strict=True)]

    def release(self) -> None:
        """See `Backend.release`; nothing belongs to a cache here."""

    def _padded(self, num_tokens: int) -> int:
        model = self.decoder.model
        return filled_up(num_tokens, model.dtype, model.device)


class ExactBackend(CPUBackend):
    """See `Backend`: 32 tokens go through the model at a time, prompts too, in one thread.

    Matrix products round by their size. Here all have the same, so that the bits of a token do not depend on others.
    """

    @property
    def max_steps(self) -> int:
        """See `Backend.max_steps`."""
        return 1

    def parts(self, num_tokens: int, num_lanes: int) -> tuple[int, int | None]:
        """See `Backend.parts`; each part has one thread, as a product in several threads might round differently."""
        return (min(num_lanes, -(-num_tokens // _TILE)) if self.decoder.is_plain else 1), 1

    def prefill(self, cache: KVCache, chunks: Sequence[PrefillChunk]) -> Sequence[Tensor]:
        """See `Backend.prefill`."""
        queries: list[tuple[int, int, Sequence[Block]]] = []
        for chunk in chunks:
            blocks = list(chunk.past)
            slots = zip(chunk.tokens, chunk.slots, strict=True)
            for position, (token, (block, _)) in enumerate(slots, chunk.num_past):
                if not blocks or blocks[-1] is not block:
                    blocks = [*blocks, block]
                queries.append((token, position, blocks))
        states = self.decode(self.attention(cache, AttentionMetadata.of(queries, cache.block_tokens), 1))
        return wanted_states(states, chunks)

    def attention(self, cache: KVCache, metadata: AttentionMetadata, num_steps: int) -> Sequence[BagAttention]:
        """See `Backend.attention`."""
        tiles = [metadata.lines(slice(start, start + _TILE)) for start in range(0, len(metadata.tokens), _TILE)]
        return [BagAttention(cache, tile, self._heads, num_rows=_TILE, num_steps=num_steps) for tile in tiles]

    def decode(self, attention: Sequence[DecodeAttention]) -> Tensor:
        """See `Backend.decode`."""
        with same_shapes(_TILE):
            return super().decode(attention)

    def logits(self, states: Tensor) -> Tensor:
        """See `Backend.logits`."""
        tiles = functional.pad(states, (0, 0, 0, -len(states) % _TILE)).split(_TILE)
        return torch.cat([self.decoder.logits(tile) for tile in tiles])[: len(states)]


class BagAttention:
    """See `DecodeAttention`: bags for single tokens, which move from step to step.

    Args of the constructor:
        cache: keys and values.
        metadata: of the tokens; no two write to the same place.
        heads: query heads of a layer.
        num_rows: pad to so many tokens with copies of the last one.
        num_steps: steps to lay out, the first included. They lie in the block of the first one and in the one after
            it; for sequences whose blocks end before, what is computed is of no use.
    """

    def __init__(
        self, cache: KVCache, metadata: AttentionMetadata, heads: int, *, num_rows: int = 1, num_steps: int = 1
    ) -> None:
        self.num_queries = len(metadata.tokens)
        metadata = metadata.padded(num_rows)
        self._cache, self._device = cache, cache.keys.device
        self._heads, self._share = heads, heads // cache.keys.shape[2]
        self._windows: dict[int, Tensor] = {}
        self._lines = self._tensor(metadata.table_lines)
        self._moving: list[tuple[Tensor, Tensor]] = []
        self.num_moves = 0
        """Moves to the next step that have been made."""
        columns, offsets = metadata.write_slots(num_steps)
        order = np.argsort(-metadata.num_blocks, kind="stable")
        self.bags = Bags(
            # Copies, as they change.
            tokens=self._tensor(metadata.tokens.copy()),
            position_ids=self._tensor(metadata.positions.copy()).unsqueeze(0),
            keys=cache.keys,
            key_numbers=cache.key_numbers,
            values=cache.values,
            back=None if np.array_equal(order, np.arange(len(order))) else self._tensor(np.argsort(order)),
            **self._written(metadata, columns, offsets),
            **self._read(metadata.lines(order), order, columns[:, order], offsets[:, order]),
        )
        places_that_move, distances = map(list, zip(*self._moving, strict=True))
        self.moves = Moves(places_that_move, distances, self._newest)
        """Moves to the next step, all of them."""

    @property
    def tokens(self) -> Tensor:
        """[B] int64."""
        return self.bags.tokens

    @property
    def position_ids(self) -> Tensor:
        """[1, B] int64."""
        return self.bags.position_ids

    @property
    def has_next(self) -> bool:
        """See `DecodeAttention.has_next`."""
        return self.num_moves < len(self.moves.distances[0])

    def advance(self, tokens: Tensor) -> None:
        """See `DecodeAttention.advance`."""
        missing = len(self.tokens) - len(tokens)
        padded = torch.cat([tokens, tokens[-1:].expand(missing)]) if missing else tokens
        advance(self.bags, self.moves, self.num_moves, padded)
        self.num_moves += 1
        self._windows.clear()

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, limits: Limits = NO_LIMITS
    ) -> Tensor:
        """See `Rows.attend`."""
        bags, bias = self.bags, self._bias_of(limits.window)
        return attend(bags, layer, query, key, value, scaling, limits.softcap, bias, limits.sinks).view(query.shape)

    def recall(self, layer: int, inputs: DeltaInputs) -> Tensor:
        """See `DeltaRows.recall`."""
        assert self._cache.recurrent is not None, "the model has such layers"
        return self._cache.recurrent.decode(layer, self._lines, inputs)

    def _bias_of(self, window: int | None) -> Tensor:
        """Return what is added to the scores, [slots of all heads, tokens]: -inf or 0."""
        if window is None:
            return self.bags.bias
        if window not in self._windows:
            asked = self.bags.asked[self.bags.scored]
            first = self.position_ids.view(-1)[asked // self._heads].unsqueeze(1) - window + 1
            places = self._first_positions + torch.arange(self._cache.block_tokens, device=self._device)
            self._windows[window] = self.bags.bias.masked_fill(places < first, float("-inf"))
        return self._windows[window]

    def _written(self, metadata: AttentionMetadata, columns: Integers, offsets: Integers) -> dict[str, Tensor]:
        """Return where keys and values are written to, as fields of `Bags`."""
        kv_heads, dim, size = self._cache.keys.shape[2:]
        blocks = metadata.blocks[np.arange(len(metadata.tokens)), columns]
        head = self._tensor(blocks[0])[:, None] * kv_heads + torch.arange(kv_heads, device=self._device)
        number = head[:, :, None] * dim + torch.arange(dim, device=self._device)
        offset = self._tensor(offsets[0])
        key_places = (number * size + offset[:, None, None]).flatten()
        value_places = (head * size + offset[:, None]).flatten()
        self._moving += [
            (key_places, self._distances(blocks * (kv_heads * dim * size) + offsets)),
            (value_places, self._distances(blocks * (kv_heads * size) + offsets)),
        ]
        return {"key_places": key_places, "value_places": value_places}

    def _read(
        self, metadata: AttentionMetadata, lines: Integers, columns: Integers, offsets: Integers
    ) -> dict[str, Any]:
        """Return what is attended to, in the order (query, head, slot), the longest first, as fields of `Bags`.

        `lines` has the number of each query among those of the batch.
        """
        kv_heads, dim, size = self._cache.keys.shape[2:]
        heads, head = self._heads, np.arange(self._heads)
        classes = list(_classes(metadata.num_blocks, heads))
        widths = [int(metadata.num_blocks[start:stop].max()) for start, stop in classes]
        slot = np.arange(max(widths))
        is_padding = slot >= metadata.num_blocks[:, None]
        # Padding must be finite, too, so it is of the query's own sequence.
        blocks = np.where(is_padding, metadata.blocks[:, :1], metadata.blocks[:, : len(slot)])
        first_positions = metadata.first_positions[:, : len(slot)]
        seen = (metadata.positions[:, None] + 1 - first_positions).clip(0, metadata.sizes[:, : len(slot)])
        visible = np.where(is_padding, 0, seen)

        def of_slots(numbers: Integers) -> Tensor:
            """[B, slots] or [B, H, slots] -> [slots of all heads, 1] int32, without those a class lacks."""
            numbers = np.broadcast_to(
                numbers[:, None] if numbers.ndim == 2 else numbers, (len(lines), heads, len(slot))
            )
            parts = [numbers[a:b, :, :width].ravel() for (a, b), width in zip(classes, widths, strict=True)]
            return self._tensor(np.concatenate(parts)).int().unsqueeze(1)

        within = torch.arange(max(dim, size), dtype=torch.int32, device=self._device)
        tables = of_slots(blocks[:, None] * kv_heads + head[:, None] // self._share)
        in_memory = tables.view(-1).argsort(stable=True)
        counts = np.repeat(widths, [(stop - start) * heads for start, stop in classes])
        ends = counts.cumsum()
        starts = ends - counts
        bias = self._cache.keys.new_zeros(len(tables), size)
        bias.masked_fill_(within[:size] >= of_slots(visible), float("-inf"))
        self._first_positions = of_slots(first_positions)
        self._newest = self._tensor((starts + np.repeat(columns[0], heads)) * size + np.repeat(offsets[0], heads))
        self._moving.append((self._newest, self._distances(columns * size + offsets)))
        return {
            "asked": self._tensor(np.repeat((lines[:, None] * heads + head).flatten(), counts))[in_memory],
            "key_rows": (tables[in_memory] * dim + within[:dim]).flatten(),
            "scored": in_memory.argsort(),
            "key_bags": torch.arange(0, tables.numel() * dim, dim, dtype=torch.int32, device=self._device),
            "value_rows": (tables * size + within[:size]).flatten(),
            "value_bags": self._tensor(starts * size).int(),
            "bias": bias,
            "classes": [
                (int(starts[first * heads]), int(ends[stop * heads - 1]), (stop - first) * heads)
                for first, stop in classes
            ],
        }

    def _distances(self, places: Integers) -> Tensor:
        """Return how far each query's place moves from step to step, [moves, B, 1], given the places: [steps, B]."""
        return self._tensor(np.diff(places, axis=0)).unsqueeze(2)

    def _tensor(self, values: Integers) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self._device)


def _classes(num_blocks: Integers, heads: int) -> Iterator[tuple[int, int]]:
    """Return where classes begin and end, of queries by falling number of blocks.

    >>> list(_classes(np.array([20, 19, 19, 4, 4, 3]), heads=8))
    [(0, 3), (3, 6)]
    """
    start, num_wasted = 0, 0
    for line, number in enumerate(num_blocks.tolist()):
        num_wasted += (int(num_blocks[start]) - number) * heads
        if num_wasted > _SLOTS_OF_A_CLASS:
            yield start, line
            start, num_wasted = line, 0
    yield start, len(num_blocks)
