"""Attention by torch's own kernels, in a form that one of them takes without all scores in memory.

Owns: that form. Must not know: rows, layers, caches. On CUDA `scaled_dot_product_attention` looks for a kernel by these
rules (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp), and says nothing when it finds none and makes all scores:

    kernel      numbers                 grouped queries   mask   head sizes
    flash       bfloat16, float16       yes               no     to 256
    efficient   and float32             no                yes    whole multiples of 16 bytes
    math        all                     yes               yes    all, and keeps every score

So keys are shown once for each query of their group, without a copy, where flash is out of question; heads are filled
up with zeros; and a window is cut into pieces of its own length, each of which sees itself and the piece before, which
is less work as well:

    window 3        keys   0 1 2 | 3 4 5 | 6 7
    queries 3 4 5   see      1 2   3 4 5             of the keys 0 to 5, by a mask that all pieces have in common

What is left to the math kernel is float64, which nobody trains in. Scores with a soft cap are no kernel's: they are
computed by products (`rallypoint.models.products`), and counted by the plan.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from rallypoint.cpu.forms import computes_in_pieces

_MAX_FLASH_HEAD = 256
_HEAD_MULTIPLE = 8
"""Numbers of a head: 16 bytes in half precision."""
_MAX_BATCH = 2**16 - 1
"""The most blocks that a grid of CUDA has along its second and third axes."""


def attend_fused(query: Tensor, key: Tensor, value: Tensor, scaling: float, mask: Tensor | None = None) -> Tensor:
    """Return what queries find: [N, H, L, D], causal without a mask.

    Args:
        query: [N, H, L, D].
        key: [N, K, S, D], H a multiple of K; without a mask S is L.
        value: as `key`.
        scaling: factor of the scores.
        mask: [L, S], True where a query sees a key; None: itself and all before it.
    """
    is_grouped = query.shape[1] != key.shape[1]
    if computes_in_pieces(query.device):
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=is_grouped
        )
    size, shape = query.shape[-1], query.shape
    if size % _HEAD_MULTIPLE:
        query, key, value = (functional.pad(part, (0, -size % _HEAD_MULTIPLE)) for part in (query, key, value))
    takes_groups = takes_grouped_queries(query.dtype, query.shape[-1], has_mask=mask is not None)
    if is_grouped and not takes_groups:
        # The queries of a group become the heads, and its one key is shown to each of them.
        query, key, value = (
            part.reshape(-1, heads, *part.shape[2:]).expand(-1, shape[1] // key.shape[1], -1, -1)
            for part, heads in ((query, shape[1] // key.shape[1]), (key, 1), (value, 1))
        )
    outs = [
        functional.scaled_dot_product_attention(
            *parts, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=is_grouped and takes_groups
        )
        for parts in zip(*(part.split(_MAX_BATCH) for part in (query, key, value)), strict=True)
    ]
    return (torch.cat(outs) if len(outs) > 1 else outs[0])[..., :size].reshape(shape)


def takes_grouped_queries(dtype: torch.dtype, head_size: int, *, has_mask: bool) -> bool:
    """Return whether the kernel that a call finds on an accelerator takes several queries for a key.

    >>> takes_grouped_queries(torch.bfloat16, 128, has_mask=False)
    True
    >>> takes_grouped_queries(torch.float32, 128, has_mask=False)
    False
    """
    return dtype in (torch.bfloat16, torch.float16) and not has_mask and head_size <= _MAX_FLASH_HEAD


def attend_in_window(query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int) -> Tensor:
    """Return what queries find in their window, on an accelerator: [N, L, H, D] from [N, L, H, D] and [N, L, K, D].

    Args:
        query: [N, L, H, D].
        key: [N, L, K, D].
        value: likewise.
        scaling: factor of the scores.
        window: the last tokens that each sees, itself among them; fewer than L.
    """
    length = query.shape[1]
    filler = -length % window
    query, key, value = (
        functional.pad(part, (0, 0, 0, 0, 0, filler)).unflatten(1, (-1, window)) for part in (query, key, value)
    )
    first_query, first_key, first_value = (part[:, 0].transpose(1, 2) for part in (query, key, value))
    first = attend_fused(first_query, first_key, first_value, scaling)
    keys, values = (torch.cat([part[:, :-1], part[:, 1:]], 2).flatten(0, 1).transpose(1, 2) for part in (key, value))
    seen = _seen_in_piece(window, query.device)
    others = attend_fused(query[:, 1:].flatten(0, 1).transpose(1, 2), keys, values, scaling, seen)
    others = others.transpose(1, 2).unflatten(0, (len(query), -1))
    return torch.cat([first.transpose(1, 2).unsqueeze(1), others], 1).flatten(1, 2)[:, :length]


def _seen_in_piece(window: int, device: torch.device) -> Tensor:
    """Return which keys of the piece before, and of its own, each query of a piece sees: [window, 2 * window].

    >>> _seen_in_piece(3, torch.device("cpu")).int().tolist()
    [[0, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 0], [0, 0, 0, 1, 1, 1]]
    """
    return torch.ones(window, 2 * window, dtype=torch.bool, device=device).tril(window).triu(1)
