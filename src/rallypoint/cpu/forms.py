"""The two forms of a computation: small pieces that stay in a CPU's caches, or a few large kernels.

Both forms give the same numbers up to rounding. Which one a device gets is decided here and nowhere else, so that the
form for accelerators can run on a CPU too and be compared with an accelerator bit for bit.
"""

import torch

_IN_PIECES = {"cpu"}
"""Device types that compute in pieces."""


@torch.jit.unused  # TorchScript compiles functions for CPUs only, and they ask `is_scripting` first
def computes_in_pieces(device: torch.device) -> bool:
    """Return whether a device gets the form of CPUs.

    >>> computes_in_pieces(torch.device("cpu")), computes_in_pieces(torch.device("meta"))
    (True, False)
    """
    return device.type in _IN_PIECES
