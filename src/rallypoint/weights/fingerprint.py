"""One number for all of a model's weights, to see whether two ranks hold the same."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import xxhash
from torch import Tensor


def fingerprint(weights: Mapping[str, Tensor]) -> str:
    """Return a digest of names, shapes, types and bits of all weights."""
    digest = xxhash.xxh3_128()
    for name in sorted(weights):
        tensor = weights[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)};".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
