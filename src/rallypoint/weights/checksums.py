"""Numbers that tell whether weights are the same, without a look at them: for buckets on their way, and for copies.

Two kinds. On the host it is xxh3, the fastest there. On accelerators it is two sums that torch's own operations
compute where the weights are (`sums`): exact integers, the same on every device, in whatever order they are added.
Which of the two it is follows from the kind of device that a run has, and is one for all of its processes.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import xxhash
from torch import Tensor

_WIDTH = 1024
"""Words of a row, of which no more than the sum is weighted."""
_WORDS = {4: torch.int32, 2: torch.int16, 1: torch.uint8}


@torch.no_grad()
def sums(data: Tensor) -> Tensor:
    """Return the sum of a tensor's words, and that of each times its place from 1, modulo 2**64: [2] int64.

    Words have four bytes where that divides the tensor, otherwise two or one. Found with certainty, of up to 2**32
    words: any change of one word or two, so any flipped bit and any two words that have changed places. (If one word
    changes by d, |d| < 2**32, so does the first sum. If two do, at i and j, and the first sum stays, they change by d
    and -d, and the second one by d * (i - j), which is less than 2**64 and not 0.) Of what changes more it misses about
    one case in 2**64.

    >>> sums(torch.tensor([5, 0, 7], dtype=torch.int32))
    tensor([12, 26])

    The tensor is read twice, where it is; nothing waits for the device.
    """
    flat = data.detach().reshape(-1).view(torch.uint8)
    words = flat.view(next(dtype for size, dtype in _WORDS.items() if not flat.numel() % size))
    num = words.numel()
    first = num - num % _WIDTH
    rest = words[first:].long()
    plain, placed = rest.sum(), (rest * torch.arange(first + 1, num + 1, device=flat.device)).sum()
    if first:
        # The place of a word is that of its row's first one and that in the row: no word is weighted by itself.
        rows = words[:first].view(-1, _WIDTH)
        of_rows, of_columns = rows.sum(1, dtype=torch.int64), rows.sum(0, dtype=torch.int64)
        plain = plain + of_columns.sum()
        placed = placed + (of_rows * torch.arange(0, first, _WIDTH, device=flat.device)).sum()
        placed = placed + (of_columns * torch.arange(1, _WIDTH + 1, device=flat.device)).sum()
    return torch.stack([plain, placed])


def fingerprint(weights: Mapping[str, Tensor]) -> str:
    """Return a digest of names, shapes, types and bits of all weights, which are on one kind of device.

    What is not on the host is summed up where it is, and waited for once.
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
