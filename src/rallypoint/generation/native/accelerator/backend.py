"""Decoding on accelerators: attention over block tables, several steps without a wait of the host.

Owns: what changes from step to step, all of it in memory of the device, so that one step can follow another without the
host (`PagedAttention`); and which kernel, captured graphs and padding a device gets (`AcceleratorBackend`).

Which tokens a query attends to follows from its position. So only tokens, positions and the number of the step change,
and a step that was captured (see `graphs`) can be replayed. Keys and values are read where they lie by a kernel (see
`kernel`). Where there is none they are copied, for batched products.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from rallypoint.config.limits import BLOCK_TOKENS
from rallypoint.generation.native.accelerator.graphs import Capture, GraphRunner, captures_on, num_padded
from rallypoint.generation.native.accelerator.kernel import MANY_PROGRAMS, PagedKernel, find_kernel
from rallypoint.generation.native.block_manager import AttentionMetadata, Integers
from rallypoint.generation.native.decoder import Decoder, DecoderRows, Network, by_operators, linear, norm
from rallypoint.generation.native.kv_cache import KVCache, LayerShapes
from rallypoint.generation.native.model_runner import DecodeAttention
from rallypoint.generation.native.prefill import prefill_packed
from rallypoint.generation.native.sequence import PrefillChunk
from rallypoint.generation.sampler import SampledTokens, SamplingMetadata
from rallypoint.models.head import soft_capped
from rallypoint.models.kinds.linear_attention import DeltaInputs
from rallypoint.models.layer_kernels import HeadNorms, LayerKernels, find_layer_kernels
from rallypoint.models.products import NO_LIMITS, Limits
from rallypoint.models.sinks import softmax_with_sinks

_STEPS_AT_ONCE = 8
"""Steps in one call: between calls the device waits for the host."""


class AcceleratorBackend:
    """See `Backend`."""

    min_steps = 1

    def __init__(self, model: PreTrainedModel, capture: Capture | None = None) -> None:
        """Take a model; `capture` captures steps of decoding, None: as torch does on the model's device."""
        self.decoder = Decoder(model, by_kernels)
        self._capture = capture
        self._kernel: PagedKernel | None = None
        self._graphs: GraphRunner | None = None
        self._network: object = None
        self._weights: list[Tensor] = []

    @property
    def max_steps(self) -> int:
        """See `Backend.max_steps`; recurrent states cannot go back to before tokens that new weights undo."""
        return 1 if self.decoder.is_recurrent else _STEPS_AT_ONCE

    def prepare(self, shapes: LayerShapes) -> None:
        """See `Backend.prepare`; the first time, find a kernel, and whether steps can be captured."""
        if self._graphs is not None:
            return
        device = shapes.like.device
        self._kernel = find_kernel(device, shapes.like.dtype, lambda kernel: is_right(kernel, shapes))
        capture = (self._capture or captures_on(device)) if self.decoder.may_be_captured else None
        self._graphs = GraphRunner(self._logits, capture)
        self._weights = [*self.decoder.model.parameters(), *self.decoder.model.buffers()]

    def parts(self, num_tokens: int, num_lanes: int) -> tuple[int, int | None]:
        """See `Backend.parts`: kernels fill the device by themselves."""
        del num_tokens, num_lanes
        return 1, None

    def prefill(self, cache: KVCache, chunks: Sequence[PrefillChunk]) -> Sequence[Tensor]:
        """See `Backend.prefill`."""
        return prefill_packed(self.decoder, cache, chunks, sum(len(chunk.tokens) for chunk in chunks))

    def attention(self, cache: KVCache, metadata: AttentionMetadata, num_steps: int) -> Sequence[PagedAttention]:
        """See `Backend.attention`; padded to few numbers of rows and columns, so that graphs serve many batches."""
        num_rows = num_columns = 1
        if self._graphs is not None and self._graphs.captures:
            num_rows = num_padded(len(metadata.tokens))
            num_columns = 1 << (int(metadata.num_blocks.max()) - 1).bit_length()
        padding = {"num_rows": num_rows, "num_columns": num_columns}
        return [PagedAttention(cache, metadata, num_steps=num_steps, kernel=self._kernel, **padding)]

    def decode(self, attention: Sequence[DecodeAttention]) -> Tensor:
        """See `Backend.decode`."""
        (part,) = attention
        return self.decoder(part)[: part.num_queries]

    def logits(self, states: Tensor) -> Tensor:
        """See `Backend.logits`."""
        return self.decoder.logits(states)

    def decode_steps(
        self, attention: Sequence[DecodeAttention], sampling: SamplingMetadata, numbers: Tensor
    ) -> list[SampledTokens]:
        """See `Backend.decode_steps`."""
        (part,) = cast("Sequence[PagedAttention]", attention)
        assert self._graphs is not None, "`prepare` was called"
        # Kept: joined weights are a tensor of its own, and another one might get its address later.
        network = self._network = self.decoder.network
        addresses = id(network), part.cache.keys.data_ptr(), *(weight.data_ptr() for weight in self._weights)
        return self._graphs.decode(part, sampling, numbers, addresses)

    def release(self) -> None:
        """See `Backend.release`: graphs read and write the cache that they were captured with."""
        if self._graphs is not None:
            self._graphs.release()

    def _logits(self, part: PagedAttention) -> Tensor:
        """Return the logits of all tokens of a batch, padding included: [B, V]."""
        return self.decoder.logits(self.decoder(part))


def by_kernels(
    network: Network, rows: DecoderRows, find: Callable[[Tensor], LayerKernels | None] = find_layer_kernels
) -> Tensor:
    """Do as `by_operators`, with what stands between products in few launches where there are kernels for it."""
    kernels = find(network.norm)
    if kernels is None:
        return by_operators(network, rows)
    states = functional.embedding(rows.tokens, network.embeddings)
    angles = rows.position_ids.view(-1, 1) * network.frequencies.chunk(2)[1]
    cos, sin = (
        (part * network.wave_height).to(states.dtype).unsqueeze(1).expand(-1, network.num_turned, -1)
        for part in (angles.cos(), angles.sin())
    )
    normed = norm(states, network.layers[0].attention_norm, network.eps)
    next_norms = [*(layer.attention_norm for layer in network.layers[1:]), network.norm]
    for index, (layer, next_norm) in enumerate(zip(network.layers, next_norms, strict=True)):
        heads = linear(layer.query_key_value, normed).view(len(states), -1, 2 * cos.shape[-1])
        norms = None
        if layer.query_norm is not None and layer.key_norm is not None:
            norms = HeadNorms(layer.query_norm, layer.key_norm)
        turned = kernels.turn(heads, cos, sin, network.num_heads, norms, network.eps)
        query, key = turned[:, : network.num_heads], turned[:, network.num_heads :]
        attended = rows.attend(index, query, key, heads[:, network.num_turned :], network.scaling)
        attended = linear(layer.out, attended.reshape(len(states), -1))
        states, normed = kernels.add_norm(states, attended, layer.mlp_norm, network.eps)
        gate, up = linear(layer.gate_up, normed).chunk(2, -1)
        states, normed = kernels.add_norm(states, linear(layer.down, kernels.swiglu(gate, up)), next_norm, network.eps)
    return normed


class PagedMetadata(NamedTuple):
    """What B tokens attend to, S blocks each, and where their own keys and values go."""

    tokens: Tensor
    """[B] int64; changes with every step."""
    position_ids: Tensor
    """[1, B] int64; changes with every step. A query attends to positions up to its own."""
    step: Tensor
    """[1] int64: number of this step, from 0; changes with every step."""
    slot_mapping: Tensor
    """[steps, B] int64: where a token's own keys and values go at every step, in tokens from the cache's beginning."""
    block_table: Tensor
    """[B, S] int32: the blocks of each sequence, in order; after its last one, its first."""
    num_blocks: Tensor
    """[B] int32."""
    first_positions: Tensor
    """[B, S] int32: position of the first token of each block."""
    sizes: Tensor
    """[B, S] int32: how many tokens each block is for; 0 after a sequence's last one."""


class PagedAttention:
    """See `DecodeAttention`.

    Args of the constructor:
        cache: keys and values.
        metadata: of the tokens; no two write to the same place.
        num_rows: pad to so many tokens with copies of the last one.
        num_columns: pad the block table to so many blocks of each.
        num_steps: steps to lay out, the first included; at most as many as a block has tokens. Sequences whose blocks
            end before stay at their last place, and what is computed there is of no use.
        kernel: reads keys and values where they lie; without one they are copied.
    """

    def __init__(
        self,
        cache: KVCache,
        metadata: AttentionMetadata,
        *,
        num_rows: int = 1,
        num_columns: int = 1,
        num_steps: int = 1,
        kernel: PagedKernel | None = None,
    ) -> None:
        self.num_queries = len(metadata.tokens)
        metadata = metadata.padded(num_rows)
        self.cache, self._kernel, self._device = cache, kernel, cache.keys.device
        self._num_steps, self.num_moves = num_steps, 0
        self._lines = self._tensor(metadata.table_lines)
        self._biases: dict[int | None, Tensor] = {}
        self._slots: tuple[Tensor, Tensor] | None = None
        column = np.arange(max(num_columns, int(metadata.num_blocks.max())))
        is_there = column < metadata.num_blocks[:, None]
        within = np.minimum(column, metadata.blocks.shape[1] - 1)
        self.metadata = PagedMetadata(
            tokens=self._tensor(metadata.tokens.copy()),
            position_ids=self._tensor(metadata.positions.copy()).unsqueeze(0),
            step=torch.zeros(1, dtype=torch.int64, device=self._device),
            slot_mapping=self._tensor(_slot_mapping(metadata, num_steps, cache.block_tokens)),
            # Padding must be finite, too, so it is of the sequence itself.
            block_table=self._tensor(np.where(is_there, metadata.blocks[:, within], metadata.blocks[:, :1])).int(),
            num_blocks=self._tensor(metadata.num_blocks.copy()).int(),
            first_positions=self._tensor(np.where(is_there, metadata.first_positions[:, within], 0)).int(),
            sizes=self._tensor(np.where(is_there, metadata.sizes[:, within], 0)).int(),
        )
        """Metadata of this step. Buffers of the same shapes may take its place, see `graphs`."""

    @property
    def tokens(self) -> Tensor:
        """[B] int64."""
        return self.metadata.tokens

    @property
    def position_ids(self) -> Tensor:
        """[1, B] int64."""
        return self.metadata.position_ids

    @property
    def has_next(self) -> bool:
        """See `DecodeAttention.has_next`."""
        return self.num_moves < self._num_steps - 1

    def advance(self, tokens: Tensor) -> None:
        """See `DecodeAttention.advance`."""
        missing = len(self.tokens) - len(tokens)
        self.move(torch.cat([tokens, tokens[-1:].expand(missing)]) if missing else tokens)
        self.num_moves += 1

    def move(self, tokens: Tensor) -> None:
        """Do the same on the device alone, given the tokens of padding, too."""
        self.metadata.tokens.copy_(tokens)
        self.metadata.position_ids.add_(1)
        self.metadata.step.add_(1)
        self.forget()

    def forget(self) -> None:
        """Forget what layers of one step have in common."""
        self._biases.clear()
        self._slots = None

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, limits: Limits = NO_LIMITS
    ) -> Tensor:
        """See `Rows.attend`."""
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        if self._kernel is not None:
            self._kernel.write(self.metadata, keys, values, key, value)
            return self._kernel.attend(self.metadata, keys, values, query, scaling, limits)
        self.cache.write(layer, *self._own_slots(), key, value)
        return gathered(self.metadata, keys, values, query, scaling, limits, self._bias_of(limits.window))

    def recall(self, layer: int, inputs: DeltaInputs) -> Tensor:
        """See `DeltaRows.recall`."""
        assert self.cache.recurrent is not None, "the model has such layers"
        return self.cache.recurrent.decode(layer, self._lines, inputs)

    def _own_slots(self) -> tuple[Tensor, Tensor]:
        """Return the block of each token, and its offset there, at this step: [B] both."""
        if self._slots is None:
            slots = self.metadata.slot_mapping.index_select(0, self.metadata.step).view(-1)
            size = self.cache.block_tokens
            self._slots = slots.div(size, rounding_mode="floor"), slots % size
        return self._slots

    def _bias_of(self, window: int | None) -> Tensor:
        """Return what is added to the scores, [B, S * tokens]: -inf where a query may not attend, else 0."""
        if window not in self._biases:
            metadata = self.metadata
            within = torch.arange(self.cache.block_tokens, device=self._device)
            positions = metadata.first_positions.unsqueeze(2) + within
            own = metadata.position_ids.view(-1, 1, 1)
            seen = (within < metadata.sizes.unsqueeze(2)) & (positions <= own)
            if window is not None:
                seen &= positions > own - window
            bias = self.cache.keys.new_zeros(seen.shape)
            self._biases[window] = bias.masked_fill_(~seen, float("-inf")).flatten(1)
        return self._biases[window]

    def _tensor(self, values: Integers) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self._device)


def gathered(
    metadata: PagedMetadata, keys: Tensor, values: Tensor, query: Tensor, scaling: float, limits: Limits, bias: Tensor
) -> Tensor:
    """Return the attention of queries, from copies of what they attend to: [B, H, D].

    Args:
        metadata: of the queries.
        keys: [blocks, K, D, tokens], of one layer.
        values: [blocks, K, tokens, D], of the same.
        query: [B, H, D].
        scaling: factor of the scores.
        limits: its softcap and sinks; the window is in the bias.
        bias: [B, S * tokens].
    """
    num, num_columns = metadata.block_table.shape
    kv_heads, dim, size = keys.shape[1:]
    blocks = metadata.block_table.flatten()
    keys = keys.index_select(0, blocks).view(num, num_columns, kv_heads, dim, size).permute(0, 2, 3, 1, 4).flatten(3)
    values = values.index_select(0, blocks).view(num, num_columns, kv_heads, size, dim).transpose(1, 2).flatten(2, 3)
    scores = (query.reshape(num, kv_heads, -1, dim) @ keys).mul_(scaling)
    scores = soft_capped(scores, limits.softcap).add_(bias.view(num, 1, 1, -1))
    sinks = None if limits.sinks is None else limits.sinks.view(kv_heads, -1, 1)
    return (softmax_with_sinks(scores, sinks) @ values).view(query.shape)


@torch.no_grad()
def is_right(kernel: PagedKernel, shapes: LayerShapes) -> bool:
    """Say whether a kernel gives the attention that products give, for layers of such shapes.

    One sequence has more blocks than the other, and one of them is not full. The two are computed alone, where a kernel
    cuts sequences into parts, and many times over, where it does not.
    """
    _, heads, kv_heads, dim, like, _ = shapes
    generator = torch.Generator().manual_seed(0)
    cache = KVCache(12, shapes._replace(num_layers=1))
    for memory in (cache.keys, cache.values):
        memory.copy_(torch.randn(memory.shape, generator=generator))
    blocks = np.array([[7, 2, 9, 0, 0], [3, 11, 5, 4, 8]])
    sizes = np.array(
        [[5, BLOCK_TOKENS, BLOCK_TOKENS, 0, 0], [BLOCK_TOKENS, BLOCK_TOKENS, 1, BLOCK_TOKENS, BLOCK_TOKENS]]
    )
    metadata = AttentionMetadata(
        np.zeros(2, np.int64), np.array([40, 100]), blocks, sizes, np.array([3, 5]), np.zeros(2, np.int64)
    )
    states = torch.randn(3, 2, heads, dim, generator=generator).to(like)
    query, key, value = states[0], states[1, :, :kv_heads], states[2, :, :kv_heads]
    tolerance = 1e-4 if like.dtype == torch.float32 else 3e-2
    few, many = np.arange(2), np.arange(MANY_PROGRAMS // kv_heads + 1) % 2
    sinks = torch.randn(heads, generator=generator).to(like)
    several = NO_LIMITS, Limits(window=50, softcap=20.0), Limits(window=50, sinks=sinks)
    for limits, lines in itertools.product(several, (few, many)):
        found, expected = (
            PagedAttention(cache, metadata.lines(lines), kernel=way).attend(
                0, query[lines], key[lines], value[lines], dim**-0.5, limits
            )
            for way in (kernel, None)
        )
        if not float((found - expected).abs().max()) <= tolerance:
            return False
    return True


def _slot_mapping(metadata: AttentionMetadata, num_steps: int, size: int) -> Integers:
    """Return where keys and values go at each of a block's steps, in tokens of the cache: [steps, B].

    Behind the last step it is the place of the last one.
    """
    columns, offsets = metadata.write_slots(min(num_steps, BLOCK_TOKENS))
    slots = metadata.blocks[np.arange(len(metadata.tokens)), columns] * size + offsets
    return np.pad(slots, ((0, BLOCK_TOKENS - len(slots)), (0, 0)), mode="edge")
