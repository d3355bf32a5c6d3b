"""Paged attention of single tokens in Triton: keys and values are read where they lie, through block tables.

Owns: the kernels, and when they are used. Triton comes with torch's builds for accelerators of several vendors. A
program of the grid has a sequence, a key/value head, and a part of the sequence's blocks: one sequence of a small model
would leave most of a device idle. It goes block by block with a running maximum and sum (Milakov, Gimelshein: arXiv
1805.02867), and a second kernel joins the parts, as in Flash-Decoding. Queries that share a key/value head are the rows
of one product.

No bit depends on the values of other sequences; the number of parts depends on how many sequences and blocks there are.
With `TRITON_INTERPRET=1` the kernels run on a CPU, which is how they are tested without an accelerator.
"""

# pyright: reportMissingImports=false, reportPossiblyUnboundVariable=false, reportOperatorIssue=false
from __future__ import annotations

import functools
import logging
import subprocess
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rallypoint.models.kernels import launching_on
from rallypoint.models.products import Limits

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

if TYPE_CHECKING:
    from rallypoint.generation.native.accelerator.backend import PagedMetadata

_LOG = logging.getLogger(__name__)

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MANY_PROGRAMS = 1024
"""Programs that a grid should have, if there are so many blocks: some for each of about a hundred processors."""
_MOST_PARTS = 64
"""Parts of a sequence: one program joins them, and holds all of them."""
_LEAST = 16
"""Rows, columns and terms that a product must have."""


class PagedKernel:
    """Stores keys and values in blocks, and computes attention to them."""

    def __init__(self) -> None:
        """Wrap the kernels; each is compiled when it is first used, for every type and width."""
        assert triton is not None, "there is a kernel only where there is Triton"
        made: list[Any] = [triton.jit(kernel) for kernel in (_write, _attend, _join)]
        self._write, self._attend, self._join = made

    def write(self, metadata: PagedMetadata, keys: Tensor, values: Tensor, key: Tensor, value: Tensor) -> None:
        """Store keys and values of T tokens, [T, K, D] both, in those of one layer; see `gathered`."""
        kv_heads, dim, size = keys.shape[1:]
        key, value = (states if states.stride(2) == 1 else states.contiguous() for states in (key, value))
        with launching_on(keys.device):
            self._write[len(key), kv_heads](
                *(metadata.step, metadata.slot_mapping, keys, values, key, value),
                *(len(key), kv_heads, dim, key.stride(0), key.stride(1), value.stride(0), value.stride(1)),
                SIZE=size,
                DIM=_power_of_two(dim),
            )

    def attend(
        self, metadata: PagedMetadata, keys: Tensor, values: Tensor, query: Tensor, scaling: float, limits: Limits
    ) -> Tensor:
        """Return the attention of queries, [B, H, D]; see `gathered`."""
        query = query if query.stride(2) == 1 else query.contiguous()
        num, heads, dim = query.shape
        kv_heads, _, size = keys.shape[1:]
        num_columns = metadata.block_table.shape[1]
        parts = num_parts(num * kv_heads, num_columns)
        out = query.new_empty(query.shape)
        numbers = {"DIM": _power_of_two(dim), "PARTS": parts}
        room = query.new_empty(num, heads, parts, numbers["DIM"], dtype=torch.float32) if parts > 1 else out
        tops, sums = query.new_empty(2, num, heads, parts, dtype=torch.float32).unbind(0)
        _, position_ids, _, _, *blocks = metadata
        widths = (num_columns, -(-num_columns // parts), kv_heads, heads // kv_heads, dim)
        with launching_on(keys.device):
            self._attend[num, kv_heads, parts](
                *(out, room, tops, sums, query, keys, values, *blocks, position_ids),
                query if limits.sinks is None else limits.sinks.contiguous(),
                *(scaling, limits.softcap or 0.0, limits.window or 0, *widths, query.stride(0), query.stride(1)),
                SIZE=size,
                SHARE=_power_of_two(heads // kv_heads),
                HAS_CAP=limits.softcap is not None,
                HAS_WINDOW=limits.window is not None,
                HAS_SINKS=limits.sinks is not None,
                **numbers,
            )
            if parts > 1:
                self._join[num, heads](out, room, tops, sums, heads, dim, **numbers)
        return out


def find_kernel(
    device: torch.device,
    dtype: torch.dtype,
    is_right: Callable[[PagedKernel], bool],
    make: Callable[[], PagedKernel] | None = None if triton is None else PagedKernel,
) -> PagedKernel | None:
    """Return the kernel for a device and a type; None if there is none, or it computes something else.

    Args:
        device: where keys and values are.
        dtype: their type.
        is_right: compares the kernel with ordinary products.
        make: makes the kernel; None without Triton.
    """
    if make is None or device.type == "cpu" or dtype not in _DTYPES:
        return None
    try:
        kernel = make()
        if is_right(kernel):
            return kernel
        reason = "it computes something else there"
    except Exception as error:  # noqa: BLE001 - of torch, the driver, Triton, and the C compiler that it starts
        reason = _reason(error)
    _say_once(f"the kernel for attention over blocks is not used on {device}, decoding is slower: {reason}")
    return None


def _reason(error: Exception) -> str:
    """Return what was wrong; if a compiler failed, what it needs says more than its command."""
    if isinstance(error, subprocess.CalledProcessError | FileNotFoundError):
        return f"Triton needs a C compiler and Python's headers (gcc, python3-dev): {error}"
    return f"{type(error).__name__}: {error}"


@functools.cache
def _say_once(line: str) -> None:
    """Log a line once in this process, because every engine looks for its kernel."""
    _LOG.warning(line)


def num_parts(num_programs: int, num_slots: int) -> int:
    """Return into how many parts the blocks of each sequence are cut, given the programs that run without that.

    >>> num_parts(8, 32), num_parts(8, 1024), num_parts(2048, 32)
    (32, 64, 1)
    """
    parts = 1
    while 2 * parts <= min(num_slots, _MOST_PARTS) and 2 * parts * num_programs <= MANY_PROGRAMS:
        parts *= 2
    return parts


def _power_of_two(number: int) -> int:
    """Return the next power of two that a product may have."""
    return max(_LEAST, 1 << (number - 1).bit_length())


# Triton reads what follows, and knows no annotations but its own. Widths are padded to powers of two, and the padding
# is masked.


# fmt: off
def _write(
    step, places, keys, values, key, value, num, kv_heads, dim, key_row, key_head, value_row, value_head,
    SIZE: tl.constexpr, DIM: tl.constexpr,  # noqa: N803
):
    # fmt: on
    row, head = tl.program_id(0), tl.program_id(1)
    place = tl.load(places + tl.load(step) * num + row)
    start = (place // SIZE * kv_heads + head) * dim * SIZE
    within = place % SIZE
    number = tl.arange(0, DIM)
    inside = number < dim
    new = tl.load(key + row * key_row + head * key_head + number, mask=inside)
    tl.store(keys + start + number * SIZE + within, new, mask=inside)
    new = tl.load(value + row * value_row + head * value_head + number, mask=inside)
    tl.store(values + start + within * dim + number, new, mask=inside)


# fmt: off
def _attend(
    out, room, tops, sums, query, keys, values, table, num_blocks, first_positions, sizes, positions,
    sinks, scaling, softcap, window, num_slots, slots_of_a_part, kv_heads, share, dim, query_row, query_head,
    SIZE: tl.constexpr, DIM: tl.constexpr, SHARE: tl.constexpr, PARTS: tl.constexpr,  # noqa: N803
    HAS_CAP: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SINKS: tl.constexpr,  # noqa: N803
):
    # fmt: on
    row, kv_head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    line, number, token = tl.arange(0, SHARE), tl.arange(0, DIM), tl.arange(0, SIZE)
    head = kv_head * share + line
    is_head, is_number = line < share, number < dim
    asked = tl.load(
        query + row * query_row + head[:, None] * query_head + number[None, :],
        mask=is_head[:, None] & is_number[None, :],
        other=0.0,
    )
    position = tl.load(positions + row)
    top = tl.full([SHARE], float("-inf"), tl.float32)
    total = tl.zeros([SHARE], tl.float32)
    if HAS_SINKS:
        # The first part begins with the sink, whose value is zero.
        sink = tl.load(sinks + head, mask=is_head, other=0.0).to(tl.float32)
        top = tl.where(part == 0, sink, top)
        total = tl.where(part == 0, total + 1.0, total)
    found = tl.zeros([SHARE, DIM], tl.float32)
    begin = part * slots_of_a_part
    end = tl.minimum(begin + slots_of_a_part, tl.load(num_blocks + row))
    for slot in range(begin, end):
        block = tl.load(table + row * num_slots + slot).to(tl.int64)
        start = (block * kv_heads + kv_head) * dim * SIZE
        at = tl.load(first_positions + row * num_slots + slot) + token
        seen = (token < tl.load(sizes + row * num_slots + slot)) & (at <= position)
        if HAS_WINDOW:
            seen = seen & (at > position - window)
        here = tl.load(keys + start + number[:, None] * SIZE + token[None, :], mask=is_number[:, None], other=0.0)
        scores = tl.dot(asked, here, input_precision="ieee") * scaling
        if HAS_CAP:
            scores = softcap * (2.0 / (1.0 + tl.exp(-2.0 * scores / softcap)) - 1.0)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        # A block of which nothing is seen has no maximum, and -inf less -inf is not a number.
        level = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp(scores - level[:, None])
        kept = tl.exp(top - level)
        total = total * kept + tl.sum(weights, 1)
        here = tl.load(values + start + token[:, None] * dim + number[None, :], mask=is_number[None, :], other=0.0)
        found = found * kept[:, None] + tl.dot(weights.to(here.dtype), here, input_precision="ieee")
        top = higher
    at_head = row * (kv_heads * share) + head
    if PARTS == 1:
        result = (found / total[:, None]).to(out.dtype.element_ty)
        inside = is_head[:, None] & is_number[None, :]
        tl.store(out + at_head[:, None] * dim + number[None, :], result, mask=inside)
    else:
        at_part = at_head * PARTS + part
        tl.store(tops + at_part, top, mask=is_head)
        tl.store(sums + at_part, total, mask=is_head)
        tl.store(room + at_part[:, None] * DIM + number[None, :], found, mask=is_head[:, None])


def _join(out, room, tops, sums, heads, dim, DIM: tl.constexpr, PARTS: tl.constexpr):  # noqa: N803
    at_head = tl.program_id(0) * heads + tl.program_id(1)
    part, number = tl.arange(0, PARTS), tl.arange(0, DIM)
    tops_here = tl.load(tops + at_head * PARTS + part)
    weights = tl.exp(tops_here - tl.max(tops_here, 0))  # of a part of which nothing is seen: 0
    total = tl.sum(weights * tl.load(sums + at_head * PARTS + part), 0)
    parts = tl.load(room + (at_head * PARTS + part)[:, None] * DIM + number[None, :])
    result = tl.sum(parts * weights[:, None], 0) / total
    tl.store(out + at_head * dim + number, result.to(out.dtype.element_ty), mask=number < dim)
