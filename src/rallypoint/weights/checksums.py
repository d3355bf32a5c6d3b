"""Checksums of weights, for buckets in flight and for copies that must be equal.

There are two kinds. Hosts use xxh3, the fastest there. Accelerators use two sums that torch's own operations compute on
the device (`sums`): exact integers, equal on every device whatever the order of addition. The device of a run decides
which kind all of its processes use.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import xxhash
from torch import Tensor

_WIDTH = 1024
"""Words in a row of the sum; only sums of rows and columns are multiplied by places."""
_WORDS = {4: torch.int32, 2: torch.int16, 1: torch.uint8}


@torch.no_grad()
def sums(data: Tensor) -> Tensor:
    """Return the sum of a tensor's words, and that of each times its place from 1, modulo 2**64: [2] int64.

    Words have four bytes where that divides the tensor, otherwise two or one. Of up to 2**32 words, any change of one
    or two words is found with certainty: any flipped bit, and any two words that changed places. (If one word changes
    by d, |d| < 2**32, so does the first sum. If two do, at i and j, and the first sum stays, they change by d
    and -d, and the second one by d * (i - j), which is less than 2**64 and not 0.) Of larger changes, about
    one in 2**64 is missed.

    >>> sums(torch.tensor([5, 0, 7], dtype=torch.int32))
    tensor([12, 26])

    The tensor is read twice on its device; the host waits for nothing.
    """
    flat = data.detach().reshape(-1).view(torch.uint8)
    words = flat.view(next(dtype for size, dtype in _WORDS.items() if not flat.numel() % size))
    num = words.numel()
    first = num - num % _WIDTH
    rest = words[first:].long()
    plain, placed = rest.sum(), (rest * torch.arange(first + 1, num + 1, device=flat.device)).sum()
    if first:
        # The place of a word is that of its row plus that in its row, so that no word is multiplied by itself.
        rows = words[:first].view(-1, _WIDTH)
        of_rows, of_columns = rows.sum(1, dtype=torch.int64), rows.sum(0, dtype=torch.int64)
        plain = plain + of_columns.sum()
        placed = placed + (of_rows * torch.arange(0, first, _WIDTH, device=flat.device)).sum()
        placed = placed + (of_columns * torch.arange(1, _WIDTH + 1, device=flat.device)).sum()
    return torch.stack([plain, placed])


def digested(weights: Mapping[str, Tensor]) -> str:
    """Return a digest of the names, shapes, types and bits of all weights, which are on one kind of device.

    On accelerators the sums are computed there, and the host waits for them once.
    """
    digest = xxhash.xxh3_128()
    found: list[Tensor] = []
    for name in sorted(weights):
        tensor = weights[name].detach()
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)};".encode())
        if tensor.device.type == "cpu":
            digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        else:
            found.append(sums(tensor))
    if found:
        digest.update(torch.stack(found).cpu().numpy().tobytes())
    return digest.hexdigest()
