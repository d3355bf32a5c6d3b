"""Equal bits for equal seeds on accelerators: kernels whose sums do not depend on which thread comes first.

On CPUs torch's kernels are of that kind. On CUDA some add by atomics unless asked (the backward pass of flash attention
is one), and for a few operators there is no other kernel: torch warns, and here such an operator is remembered, so that
the run can say that its bits may differ.
"""

from __future__ import annotations

import functools
import os
import re
import warnings

import torch

_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
_WARNING = re.compile(r"(\S+) does not have a deterministic implementation")
_operators: set[str] = set()


@functools.cache
def make_deterministic() -> None:
    """Ask for such kernels in this process, for good.

    Call it before the device is used: that is when cuBLAS reads the size of its workspace. Memory that was not written
    is left as it is: filling it would cost a pass over every tensor. What torch warns of is shown once an operator: it
    warns at every call. Another call of this function does nothing.
    """
    os.environ.setdefault(_CUBLAS, ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
    shown = warnings.showwarning

    def remember(message: Warning | str, *where: object, **more: object) -> None:
        if (found := _WARNING.search(str(message))) is not None:
            if found.group(1) in _operators:
                return
            _operators.add(found.group(1))
        shown(message, *where, **more)  # pyright: ignore[reportArgumentType] - passed on as it came

    warnings.showwarning = remember
    warnings.filterwarnings("always", message=".*does not have a deterministic implementation.*")


def operators_without() -> frozenset[str]:
    """Return the operators that ran in this process, and for which torch has no deterministic kernel."""
    return frozenset(_operators)
