"""What Ray is told by variables of the environment, and what it changes in the process that starts it.

Owns: that both are put back. Must not know: which variables, and what they mean.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping


@contextlib.contextmanager
def environment(changes: Mapping[str, str | None]) -> Iterator[None]:
    """Set variables of the environment, or remove those that are None, and put everything back at the end."""
    before = {name: os.environ.get(name) for name in changes}
    _set(changes)
    try:
        yield
    finally:
        _set(before)


@contextlib.contextmanager
def process_as_found() -> Iterator[None]:
    """Put back what Ray sets for a driver: in this process nobody is debugged by Ray, and SIGTERM is the user's."""
    found = {name: os.environ.get(name) for name in ("PYTHONBREAKPOINT", "RAY_CLIENT_MODE")}
    on_error, on_sigterm = sys.excepthook, signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        _set(found)
        sys.excepthook = on_error
        if threading.current_thread() is threading.main_thread():  # elsewhere Ray sets none
            signal.signal(signal.SIGTERM, signal.SIG_DFL if on_sigterm is None else on_sigterm)


def _set(variables: Mapping[str, str | None]) -> None:
    for name in variables:
        os.environ.pop(name, None)
    os.environ.update({name: value for name, value in variables.items() if value is not None})
