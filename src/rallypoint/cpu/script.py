"""Tensor functions compiled by TorchScript, so that parallel threads do not wait for Python's lock.

A decoding step is hundreds of small operations. Python needs its lock between any two of them, and two threads lose
more time waiting for it than they gain: with the lock, two lanes of a 1M model gain nothing, without it a third.
torch.compile would work too, but takes longer to start than the rollouts of many steps. TorchScript starts within 0.1 s
and computes the same operations in the same order. It is deprecated and knows only a part of Python: annotations of
named tuples must be types rather than strings, and globals that are numbers are passed as arguments. Without
TorchScript the same functions run in Python, and only lanes lose.
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
    """Return the function compiled by TorchScript; the function itself where there is no TorchScript.

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
