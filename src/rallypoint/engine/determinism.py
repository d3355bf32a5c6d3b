"""Equal bits for equal seeds on accelerators: kernels whose sums do not depend on which thread comes first.

On CPUs torch's kernels are of that kind. On CUDA some add by atomics, such as the backward pass of attention, which
stops only if torch is asked strictly; asked to warn, it adds as before. So training passes are strict: an operator that
has no deterministic kernel is an error that names it.

Sampling is not: nothing adds by atomics there, and strictly every write of keys and values would copy the whole cache
of a layer twice.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from typing import Any

import torch

from rallypoint.as_found import AsFound, GiveBack, variables
from rallypoint.errors import DeterminismError

_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
_ASKED = "torch.use_deterministic_algorithms(True"
"""Part of whatever torch says of an operator that has no such kernel."""

_memory: Any = torch.utils.deterministic  # its flags are properties that its stubs do not know
_lock = threading.Lock()
_passes = 0
"""Passes under way in this process, whose flags they share."""
_before: tuple[bool, bool, bool] = (False, False, False)
"""Flags that the first of them found."""


def prepare_process() -> None:
    """Prepare this process for an accelerator; call it before the device is used.

    That is when cuBLAS reads the size of its workspace, which decides whether its sums have an order. And torch prefers
    cuDNN's attention on newer devices, which builds a graph for each shape, takes tens of milliseconds for it and keeps
    all of them; packed rows have hundreds of shapes.
    """
    os.environ.setdefault(_CUBLAS, ":4096:8")
    torch.backends.cuda.enable_cudnn_sdp(False)


def _look() -> GiveBack:
    has_cudnn, give_back = torch.backends.cuda.cudnn_sdp_enabled(), variables([_CUBLAS])

    def give_all_back() -> None:
        torch.backends.cuda.enable_cudnn_sdp(has_cudnn)
        give_back()

    return give_all_back


process_as_found = AsFound(_look)
"""Blocks at whose end `prepare_process` is undone."""


@contextlib.contextmanager
def deterministic_kernels() -> Iterator[None]:
    """Run a training pass with kernels that give equal bits; passes of several threads may overlap.

    Raises:
        DeterminismError: an operator has no such kernel.
    """
    _enter()
    try:
        yield
    except RuntimeError as error:
        if _ASKED not in str(error):
            raise
        raise DeterminismError(
            f"equal seeds would give other bits: {str(error).splitlines()[0]} Use another operator, or set "
            f"engine.deterministic=false; if it is about {_CUBLAS}, set that to :4096:8 before Python starts"
        ) from error
    finally:
        _leave()


def _enter() -> None:
    global _passes, _before
    with _lock:
        if not _passes:
            _before = (
                torch.are_deterministic_algorithms_enabled(),
                torch.is_deterministic_algorithms_warn_only_enabled(),
                _memory.fill_uninitialized_memory,
            )
            torch.use_deterministic_algorithms(True)
            _memory.fill_uninitialized_memory = False  # it would cost a pass over every tensor
        _passes += 1


def _leave() -> None:
    global _passes
    with _lock:
        _passes -= 1
        if not _passes:
            is_on, only_warns, _memory.fill_uninitialized_memory = _before
            torch.use_deterministic_algorithms(is_on, warn_only=only_warns)
