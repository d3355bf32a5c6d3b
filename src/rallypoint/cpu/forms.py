"""Which of two forms a computation takes: small pieces that stay in a CPU's caches, or few large kernels.

Both forms give the same numbers up to rounding. Which of them a device gets is decided here and nowhere else, so that
the form of accelerators can be computed on a CPU too, and compared with an accelerator bit for bit.
"""

import contextlib
from collections.abc import Iterator

import torch

_IN_PIECES = {"cpu"}
"""Types of devices."""


@torch.jit.unused  # TorchScript, which reads functions for CPUs only, asks `is_scripting` before
def computes_in_pieces(device: torch.device) -> bool:
    """Return whether a device gets the form of CPUs.

    >>> computes_in_pieces(torch.device("cpu")), computes_in_pieces(torch.device("meta"))
    (True, False)
    """
    return device.type in _IN_PIECES


@contextlib.contextmanager
def accelerator_forms() -> Iterator[None]:
    """Have CPUs take the form of accelerators inside; for tests, in a process that computes nothing else meanwhile."""
    _IN_PIECES.discard("cpu")
    try:
        yield
    finally:
        _IN_PIECES.add("cpu")
