"""Attention over rows packed end to end in one stream, hooked into transformers by its attention registry.

A model built with `attn_implementation=ATTENTION` takes its rows as the keyword argument `rows` of the forward pass and
calls them at every layer. Training passes `PackedRows`; the generator has its own, which read and write a cache. No
model code is changed, and no padding leaves this file.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface

from rallypoint.config.limits import LONGEST_FOR_PRODUCTS
from rallypoint.cpu.forms import computes_in_pieces
from rallypoint.models.fused import attend_fused, attend_in_window
from rallypoint.models.kinds.delta_kernel import RowScan, find_kernel
from rallypoint.models.kinds.linear_attention import DeltaInputs, Recurrence
from rallypoint.models.prefix import SharedPrefixes
from rallypoint.models.products import (
    NO_LIMITS,
    CausalProducts,
    Limits,
    SequenceBatch,
    cut_blocks,
    tokens_per_block,
)
from rallypoint.models.slots import Fold, Folded, PaddedRows, Slots, Unfolded
from rallypoint.models.varlen import PackedKeys, find_varlen, may_have_varlen
from rallypoint.parallel.transfer import sent

ATTENTION = "rallypoint_rows"

# Options of some families, by transformers' names.
_UNSUPPORTED = ("position_bias",)


class AttentionRows(Protocol):
    """The rows of a stream, as attention layers see them."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, limits: Limits = NO_LIMITS
    ) -> Tensor:
        """Return the attention output of one layer.

        Args:
            layer: index of the layer, for rows with a cache.
            query: [T, H, D].
            key: [T, K, D] with K key/value heads, H a multiple of K.
            value: [T, K, D].
            scaling: factor of the scores.
            limits: window, soft cap and sinks of the scores.

        Returns:
            [T, H, D].
        """
        ...


def attend_rows(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    *,
    rows: AttentionRows,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Adapt transformers' calling convention ([1, H, T, D] in, [1, T, H, D] out) to `AttentionRows`.

    Raises:
        ValueError: the layer has an option that is not supported yet and would change the result.
    """
    if attention_mask is not None or dropout:
        raise ValueError("packed attention takes neither a mask nor dropout: the rows say who sees whom")
    asked = [name for name in _UNSUPPORTED if options.get(name) is not None]
    if asked:
        raise ValueError(f"packed attention does not support {', '.join(asked)} yet")
    query, key, value = (states.transpose(1, 2).squeeze(0) for states in (query, key, value))
    width, widest = value.shape[-1], max(value.shape[-1], key.shape[-1])
    if value.shape[-1] != key.shape[-1]:  # zeros change no score, and are zeros in the output
        query, key, value = (functional.pad(part, (0, widest - part.shape[-1])) for part in (query, key, value))
    limits = Limits(sliding_window, softcap, s_aux)
    out = rows.attend(int(module.layer_idx), query, key, value, scaling, limits)  # pyright: ignore[reportArgumentType]
    return out[..., :width].unsqueeze(0), None


AttentionInterface.register(ATTENTION, attend_rows)


class PackedRows:
    """Causal attention within each row of a packed stream; rows do not see each other.

    Where one call computes all of them it does (see `varlen`). Elsewhere, and in float32, rows are computed in
    classes of similar length (the same power of two), padded to the longest of their class inside this file and
    `slots` only. Tokens that rows share are in the stream once: every row reads their keys and values, and their output
    is that of the first row. Filler tokens after the last row see nothing. Queries may be fewer than keys: then they
    are the last tokens of each row (`SharedPrefixes.asked`).
    """

    def __init__(
        self,
        offsets: Tensor,
        device: torch.device,
        shared: SharedPrefixes | None = None,
        *,
        num_filler: int = 0,
    ) -> None:
        """Lay rows out.

        Args:
            offsets: [B+1] of the rows.
            device: of the stream.
            shared: the tokens of the rows that are in the stream; None for all.
            num_filler: number of tokens after the last row.
        """
        self._layout = offsets, device, shared or SharedPrefixes.none(offsets)
        self._num_filler = num_filler
        # Layers of one kind share these; the first of them makes them.
        self._keys: PackedKeys | None = None
        self._recurrence: Recurrence | None = None
        self._row_scan: RowScan | None = None
        self._rectangles = None if may_have_varlen(device) else self._laid_out()
        self._folds: dict[tuple[int, int, int], tuple[Fold, Fold]] = {}
        self._batches: dict[tuple[int, int, int | None], list[SequenceBatch]] = {}

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, limits: Limits = NO_LIMITS
    ) -> Tensor:
        """See `AttentionRows.attend`."""
        del layer
        kv_heads, share = key.shape[1], query.shape[1] // key.shape[1]
        kernel = find_varlen(query, kv_heads, limits)
        if kernel is not None:
            if self._keys is None:
                self._keys = PackedKeys(*self._layout)
            return self._keys.attend(kernel, query, key, value, scaling, limits)
        # Rectangles are in order of length.
        by_products = [shape for shape in self._slots.rectangles if _suits_products(shape.longest, query, limits)]
        others = self._slots.rectangles[len(by_products) :]
        of_query, of_key = self._folds_of(by_products, others, kv_heads, share, query)
        parts = [
            _parted(Folded.apply(states, fold), [size(by_products), *(size([shape]) for shape in others)])
            for states, fold, size in ((query, of_query, _queries), (key, of_key, _slots), (value, of_key, _slots))
        ]
        first, *rest = zip(*parts, strict=True)
        outs = [
            _attend_fused(shape, kv_heads, part, scaling, limits.window)
            for shape, part in zip(others, rest, strict=True)
        ]
        if by_products or not others:
            batches = self._batches_of(by_products, kv_heads, share, limits.window, query)
            sinks = limits.sinks  # of all rows, as `_suits_products` says
            if sinks is not None:
                sinks = Folded.apply(sinks.expand(query.shape[:2]).unsqueeze(2), of_query)
            outs.insert(0, CausalProducts.apply(*first, sinks, batches, scaling, limits.softcap))
        return Unfolded.apply(torch.cat(outs) if len(outs) > 1 else outs[0], of_query).view(query.shape)

    def recall(self, layer: int, inputs: DeltaInputs) -> Tensor:
        """See `DeltaRows.recall`."""
        del layer
        if self._recurrence is None:
            self._recurrence = Recurrence(*self._layout)
        if (kernel := find_kernel(inputs.mixed, inputs.heads)) is not None:
            if self._row_scan is None:
                self._row_scan = RowScan(*self._layout)
            return self._row_scan.run(kernel, inputs, self._recurrence)
        return self._recurrence.run(inputs, self._recurrence.blank(inputs))[0]

    @functools.cached_property
    def position_ids(self) -> Tensor:
        """[1, T] int64: where each token of the stream is in its row."""
        offsets, device, shared = self._layout
        position_ids = torch.arange(int(offsets[-1])) - torch.repeat_interleave(offsets[:-1], offsets.diff())
        position_ids = position_ids[shared.kept]
        return sent(functional.pad(position_ids, (0, self._num_filler)), device).unsqueeze(0)

    @property
    def token_weights(self) -> Tensor:
        """[T] float64: how many tokens of the rows each of the stream stands for; 0 for filler."""
        _, device, shared = self._layout
        return sent(torch.bincount(shared.place, minlength=self.position_ids.shape[1]).double(), device)

    @property
    def _slots(self) -> Slots:
        if self._rectangles is None:
            self._rectangles = self._laid_out()
        return self._rectangles

    def _laid_out(self) -> Slots:
        offsets, _, shared = self._layout
        lengths = offsets.diff()
        asking = None if shared.asked is None else shared.num_kept(offsets)
        return Slots(offsets, _length_classes(lengths, asking), shared, self._num_filler)

    def _folds_of(
        self, by_products: Sequence[PaddedRows], others: Sequence[PaddedRows], kv_heads: int, share: int, like: Tensor
    ) -> tuple[Fold, Fold]:
        kind = (kv_heads, share, len(by_products))
        if kind not in self._folds:
            blocks = [tokens_per_block(shape.longest, like.itemsize) for shape in by_products]
            blocks += [shape.longest for shape in others]
            self._folds[kind] = self._slots.folds(kv_heads, share, blocks, like.device)
        return self._folds[kind]

    def _batches_of(
        self, rectangles: Sequence[PaddedRows], kv_heads: int, share: int, window: int | None, like: Tensor
    ) -> list[SequenceBatch]:
        kind = (kv_heads, share, window)
        if kind not in self._batches:
            self._batches[kind] = [
                SequenceBatch(
                    shape.num_rows * kv_heads,
                    shape.longest,
                    cut_blocks(shape.longest, share, window, like, shape.first),
                )
                for shape in rectangles
            ]
        return self._batches[kind]


def _parted(states: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
    """Return folded states of so many slots each."""
    return states.split([size * (len(states) // sum(sizes)) for size in sizes]) if len(sizes) > 1 else (states,)


def _queries(rectangles: Sequence[PaddedRows]) -> int:
    return sum(shape.num_queries for shape in rectangles)


def _slots(rectangles: Sequence[PaddedRows]) -> int:
    return sum(shape.num_slots for shape in rectangles)


def _length_classes(lengths: Tensor, asking: Tensor | None = None) -> list[Tensor]:
    """Return row indices grouped by the power of two that holds their length, the shortest first.

    >>> [rows.tolist() for rows in _length_classes(torch.tensor([3, 100, 4, 90, 0]))]
    [[0, 2], [1, 3]]

    Args:
        lengths: [B].
        asking: [B] how many tokens of each ask, of which groups are likewise.
    """
    kind = _power_of_two(lengths)
    if asking is not None:
        kind = kind * 64 + _power_of_two(asking)
    full = lengths > 0
    return [torch.nonzero((kind == one) & full).flatten() for one in torch.unique(kind[full]).tolist()]


def _power_of_two(numbers: Tensor) -> Tensor:
    return torch.tensor([math.ceil(math.log2(n)) if n > 1 else 0 for n in numbers.tolist()])


def _suits_products(longest: int, query: Tensor, limits: Limits) -> bool:
    """Whether rows of this length are computed by products rather than by the fused kernel."""
    if limits.softcap is not None or limits.sinks is not None:  # the fused kernel knows none
        return True
    return computes_in_pieces(query.device) and min(limits.window or longest, longest) <= LONGEST_FOR_PRODUCTS


def _attend_fused(
    shape: PaddedRows, kv_heads: int, states: Sequence[Tensor], scaling: float, window: int | None
) -> Tensor:
    """Attention by torch's own kernel: folded queries, keys and values of a rectangle -> [slots * heads, D]."""
    size = states[0].shape[-1]
    lengths = shape.longest - shape.first, shape.longest, shape.longest
    query, key, value = (
        x.view(shape.num_rows * kv_heads, length, -1, size) for x, length in zip(states, lengths, strict=True)
    )
    window = None if window is None or window >= shape.longest else window
    if window is not None and not shape.first and not computes_in_pieces(query.device):
        return attend_in_window(query, key, value, scaling, window).reshape(-1, size)
    is_causal = window is None and not shape.first
    seen = None if is_causal else _seen(shape.longest, window, query.device, shape.first)
    out = attend_fused(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), scaling, seen)
    return out.transpose(1, 2).reshape(-1, size)


def _seen(length: int, window: int | None, device: torch.device, first: int = 0) -> Tensor:
    """Return which keys each query sees, from the first one on: [length - first, length].

    >>> _seen(4, 2, torch.device("cpu")).int().tolist()
    [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
    """
    seen = torch.ones(length - first, length, dtype=torch.bool, device=device).tril(first)
    return seen if window is None else seen.triu(first + 1 - window)
