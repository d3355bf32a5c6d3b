"""Functions of tensors that are computed without Python, so that threads which compute beside each other get its lock.

A step of decoding is hundreds of small operations. Python needs its lock between any two of them, and two threads spend
more time waiting for it than they win: with it, two lanes of a model of 1M parameters gain nothing, without it a third.
torch.compile would do as well, but takes longer to begin than the rollouts of many a step. TorchScript begins within
0.1 s and computes the same operations in the same order. It is deprecated, and knows a part of Python only: annotations
of named tuples must be types rather than strings, and globals that are numbers are passed as arguments. Where there is
none, Python computes by the same functions, and only lanes lose.
"""

import functools
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

from rallypoint.cpu.forms import computes_in_pieces

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])

_READING = threading.Lock()


def without_python(function: FunctionT, device: torch.device) -> FunctionT:
    """Return what computes the same without Python and its lock; the function itself where there is no TorchScript.

    On accelerators too: their operations do not wait for Python, and TorchScript would compile kernels of its own, with
    other bits.
    """
    if not computes_in_pieces(device) or sys.version_info >= (3, 14):
        return function
    with _READING:  # lanes ask side by side
        return _read(function)


@functools.cache
def _read(function: FunctionT) -> FunctionT:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return cast("FunctionT", torch.jit.script(function))
