"""Attention by torch's own kernels, in a form that a kernel takes which does not keep all scores in memory.

Owns: that form. Must not know: rows, layers, caches. On CUDA `scaled_dot_product_attention` chooses a kernel by these
rules (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp); if no other fits, it takes the math kernel without a word.
cuDNN's kernel, which newer devices prefer, is turned off where a process is prepared (`rallypoint.engine.determinism`):

    kernel      types                                grouped queries   mask   head sizes                  devices
    flash       bfloat16, float16                    yes               no     up to 256                   8.0 and later
    efficient   float32, float16; bfloat16 from 8.0  no                yes    multiples of 16 bytes       all
    math        all                                  yes               yes    all; it keeps every score   all

So where flash is out of the question, keys are expanded to one for each query of their group, without a copy; heads are
padded with zeros; and a window is cut into pieces of its own length, each of which sees itself and the piece before:

    window 3        keys   0 1 2 | 3 4 5 | 6 7
    queries 3 4 5   see      1 2   3 4 5             of the keys 0 to 5, by a mask that all pieces have in common

Left to the math kernel are float64, which nobody trains in, and bfloat16 on devices before 8.0, of which the log warns.
No kernel knows scores with a soft cap or sinks: they are computed by products (`rallypoint.models.products`), and the
plan of memory counts them. Next to sinks flash can be had (`rallypoint.models.varlen`).
"""

from __future__ import annotations

import functools
import logging

import torch
from torch import Tensor
from torch.nn import functional

from rallypoint.cpu.forms import computes_in_pieces

_MAX_FLASH_HEAD = 256
_HEAD_MULTIPLE = 8
"""Multiple that head sizes are padded to: 16 bytes in half precision."""
_MAX_BATCH = 2**16 - 1
"""Most blocks that a grid of CUDA has along its second and third axes."""
_FLASH_CAPABILITY = (8, 0)
"""Compute capability of CUDA devices from which on there is flash attention, and kernels in bfloat16."""

_LOG = logging.getLogger(__name__)


def attend_fused(query: Tensor, key: Tensor, value: Tensor, scaling: float, mask: Tensor | None = None) -> Tensor:
    """Return the attention output: [N, H, L, D], causal without a mask.

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
    capability = _capability(query.device)
    takes_groups = takes_grouped_queries(query.dtype, query.shape[-1], capability, has_mask=mask is not None)
    if keeps_all_scores(query.dtype, capability):
        _warn_of_scores(query.device)
    if is_grouped and not takes_groups:
        # The queries of a group become the heads, and its one key is expanded to them.
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


def takes_grouped_queries(
    dtype: torch.dtype, head_size: int, capability: tuple[int, int] | None = None, *, has_mask: bool
) -> bool:
    """Return whether a call gets the flash kernel, the one that takes several queries for a key.

    >>> takes_grouped_queries(torch.bfloat16, 128, has_mask=False)
    True
    >>> takes_grouped_queries(torch.float32, 128, has_mask=False)
    False
    >>> takes_grouped_queries(torch.float16, 128, (7, 5), has_mask=False)
    False

    Args:
        dtype: of queries and keys.
        head_size: D.
        capability: compute capability of the device; None where it is not a CUDA device.
        has_mask: whether there is a mask.
    """
    has_flash = capability is None or capability >= _FLASH_CAPABILITY
    is_half = dtype in (torch.bfloat16, torch.float16)
    return has_flash and is_half and not has_mask and head_size <= _MAX_FLASH_HEAD


def keeps_all_scores(dtype: torch.dtype, capability: tuple[int, int] | None) -> bool:
    """Return whether only the math kernel is left, whose scores the plan of memory does not count.

    >>> keeps_all_scores(torch.bfloat16, (7, 5)), keeps_all_scores(torch.float32, (7, 5))
    (True, False)
    """
    return dtype == torch.bfloat16 and capability is not None and capability < _FLASH_CAPABILITY


@functools.cache
def _capability(device: torch.device) -> tuple[int, int] | None:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


@functools.cache
def _warn_of_scores(device: torch.device) -> None:
    _LOG.warning(
        "attention in bfloat16 keeps all scores in memory on %s, which the memory plan does not count: other kernels "
        "need compute capability 8.0; set model.dtype=float32",
        device,
    )


def attend_in_window(query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int) -> Tensor:
    """Return the output of attention in a window, on an accelerator: [N, L, H, D].

    Args:
        query: [N, L, H, D].
        key: [N, L, K, D].
        value: likewise.
        scaling: factor of the scores.
        window: number of tokens that each sees, itself included; less than L.
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
    """Return which keys of the previous piece and of its own each query of a piece sees: [window, 2 * window].

    >>> _seen_in_piece(3, torch.device("cpu")).int().tolist()
    [[0, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 0], [0, 0, 0, 1, 1, 1]]
    """
    return torch.ones(window, 2 * window, dtype=torch.bool, device=device).tril(window).triu(1)
