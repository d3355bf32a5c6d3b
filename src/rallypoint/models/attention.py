"""Attention over rows that lie end to end in one stream, hooked into transformers by its registry.

A model built with `attn_implementation=ATTENTION` receives its rows as the keyword argument `rows` of
the forward pass and asks it at every layer. During training that is `PackedRows`; the generator brings
its own, which reads and writes a cache. No model code is changed, and no padding leaves this file.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface

ATTENTION = "rallypoint_rows"

# What layers of some families pass along, by the names that transformers has for it.
_UNSUPPORTED = ("sliding_window", "softcap", "s_aux", "position_bias")

# Measured on CPUs: below this length two batched matrix products beat the fused kernel, forward and backward.
_LONGEST_FOR_BMM = 512


class Rows(Protocol):
    """What a forward pass knows about the rows in its stream."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Return the attention output of one layer.

        Args:
            layer: index of the layer, for those who keep a cache.
            query: [T, H, D].
            key: [T, K, D] with K key/value heads, H a multiple of K.
            value: [T, K, D].
            scaling: factor of the scores.

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
    rows: Rows,
    **options: Any,
) -> tuple[Tensor, None]:
    """Adapt transformers' calling convention ([1, H, T, D] in, [1, T, H, D] out) to `Rows`.

    Raises:
        ValueError: the layer asks for what would change the result and is not supported yet.
    """
    if attention_mask is not None or dropout:
        raise ValueError("packed attention takes neither a mask nor dropout: the rows say who sees whom")
    asked = [name for name in _UNSUPPORTED if options.get(name) is not None]
    if asked:
        raise ValueError(f"packed attention does not support {', '.join(asked)} yet")
    query, key, value = (states.transpose(1, 2).squeeze(0) for states in (query, key, value))
    out = rows.attend(int(module.layer_idx), query, key, value, scaling)  # pyright: ignore[reportArgumentType]
    return out.unsqueeze(0), None


AttentionInterface.register(ATTENTION, attend_rows)


class PackedRows:
    """Causal attention within each row of a packed stream; rows do not see each other.

    Rows are computed in classes of similar length (the same power of two), padded to the longest of
    their class inside the kernel's call only. The padding stands behind the last token, where causality
    hides it from every real query.
    """

    def __init__(self, offsets: Tensor, device: torch.device) -> None:
        lengths = offsets[1:] - offsets[:-1]
        self.position_ids = torch.arange(int(offsets[-1])) - torch.repeat_interleave(offsets[:-1], lengths)
        self.position_ids = self.position_ids.to(device).unsqueeze(0)
        self._classes = [
            _LengthClass(offsets[:-1][members], lengths[members], device) for members in _length_classes(lengths)
        ]
        self._whole = len(self._classes) == 1

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """See `Rows.attend`."""
        del layer
        if self._whole:
            return self._classes[0].attend(query, key, value, scaling, whole=True)
        out = torch.zeros_like(query)
        for rows in self._classes:
            out = out.index_copy(0, rows.tokens, rows.attend(query, key, value, scaling, whole=False))
        return out


def _length_classes(lengths: Tensor) -> list[Tensor]:
    """Return row indices grouped by the power of two that holds their length.

    >>> [rows.tolist() for rows in _length_classes(torch.tensor([3, 100, 4, 90, 0]))]
    [[0, 2], [1, 3]]
    """
    nearest = torch.tensor([math.ceil(math.log2(n)) if n > 1 else 0 for n in lengths.tolist()])
    full = lengths > 0
    return [torch.nonzero((nearest == power) & full).flatten() for power in torch.unique(nearest[full]).tolist()]


class _LengthClass:
    """Rows of similar length and where their tokens go in a rectangle of [R, L]."""

    def __init__(self, starts: Tensor, lengths: Tensor, device: torch.device) -> None:
        self.num_rows, self.longest = len(lengths), int(lengths.max())
        row = torch.repeat_interleave(torch.arange(self.num_rows), lengths)
        within = torch.cat([torch.arange(n) for n in lengths.tolist()])
        self.tokens = (starts[row] + within).to(device)
        self.slots = (row * self.longest + within).to(device)
        self.even = bool((lengths == self.longest).all())
        self._masks: dict[tuple[int, torch.dtype], Tensor] = {}

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scaling: float, *, whole: bool) -> Tensor:
        """Return [tokens of this class, H, D]; `whole` when the stream has no other tokens."""
        q, k, v = (self._rectangle(states, whole=whole) for states in (query, key, value))
        out = self._causal(q, k, v, scaling)
        flat = out.transpose(1, 2).reshape(self.num_rows * self.longest, query.shape[1], query.shape[2])
        return flat if self.even else flat.index_select(0, self.slots)

    def _rectangle(self, states: Tensor, *, whole: bool) -> Tensor:
        """[T, H, D] -> [R, H, L, D], zero where a row is shorter than the longest."""
        mine = states if whole else states.index_select(0, self.tokens)
        if not self.even:
            room = mine.new_zeros(self.num_rows * self.longest, *mine.shape[1:])
            mine = room.index_copy(0, self.slots, mine)
        return mine.view(self.num_rows, self.longest, *mine.shape[1:]).transpose(1, 2)

    def _causal(self, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """[R, H, L, D] x [R, K, L, D] -> [R, H, L, D]."""
        heads, kv_heads = query.shape[1], key.shape[1]
        if query.is_cuda or self.longest > _LONGEST_FOR_BMM:
            return functional.scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=scaling, enable_gqa=heads != kv_heads
            )
        # The queries of one key/value head are rows of one product, so that keys need no repeating.
        share = heads // kv_heads
        folded = (self.num_rows * kv_heads, share * self.longest, query.shape[-1])
        scores = torch.baddbmm(
            self._mask(share, query.dtype),
            query.reshape(folded),
            key.reshape(folded[0], self.longest, -1).transpose(1, 2),
            alpha=scaling,
        )
        out = torch.bmm(scores.softmax(-1), value.reshape(folded[0], self.longest, -1))
        return out.view(self.num_rows, heads, self.longest, -1)

    def _mask(self, share: int, dtype: torch.dtype) -> Tensor:
        """[share * L, L]: 0 where a query may look, -inf where it may not."""
        if (share, dtype) not in self._masks:
            blocked = torch.full((self.longest, self.longest), float("-inf"), dtype=dtype).triu(1)
            self._masks[share, dtype] = blocked.repeat(share, 1)
        return self._masks[share, dtype]
