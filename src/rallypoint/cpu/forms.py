"""The two forms of a computation: small pieces that stay in a CPU's caches, or a few large kernels.

Both forms give the same numbers up to rounding. Which one a device gets is decided here and nowhere else, so that the
form for accelerators can run on a CPU too and be compared with an accelerator bit for bit.
"""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

_IN_PIECES = {"cpu"}
"""Device types that compute in pieces."""

_STRIP_ELEMENTS = 2**18
"""Elements of one tensor in a strip: 1 MiB in float32. Smaller strips cost more in calls than the cache saves."""


@torch.jit.unused  # TorchScript compiles functions for CPUs only, and they ask `is_scripting` first
def computes_in_pieces(device: torch.device) -> bool:
    """Return whether a device gets the form of CPUs.

    >>> computes_in_pieces(torch.device("cpu")), computes_in_pieces(torch.device("meta"))
    (True, False)
    """
    return device.type in _IN_PIECES


@contextlib.contextmanager
def accelerator_forms() -> Iterator[None]:
    """Have CPUs use the form of accelerators in the block; for tests, in a process that computes nothing else."""
    _IN_PIECES.discard("cpu")
    try:
        yield
    finally:
        _IN_PIECES.add("cpu")


def in_strips(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield strips of rows, the same rows of each tensor, for a chain of elementwise operations.

    Each operation of such a chain is bound by memory when it runs over all rows, and faster when the chain runs over a
    strip that stays in the cache. Where a device computes with large kernels, one strip has all rows.

    >>> [(a.tolist(), b.tolist()) for a, b in in_strips(torch.arange(2), torch.arange(2))]
    [([0, 1], [0, 1])]

    Args:
        tensors: with the same first dimension, the widest one first.
    """
    first = tensors[0]
    num_rows = len(first)
    num_strips = max(1, -(-first.numel() // _STRIP_ELEMENTS) if computes_in_pieces(first.device) else 1)
    # Strips have equal sizes: a reduction over a single left-over row may add up in another order.
    step = max(1, -(-num_rows // num_strips))
    for start in range(0, num_rows, step):
        yield tuple(tensor[start : start + step] for tensor in tensors)
