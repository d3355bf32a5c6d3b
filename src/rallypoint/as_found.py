"""Settings of the process that runs change, and give back: without Ray the process is the user's own.

Owns: when they are given back. Must not know: which they are.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping

GiveBack = Callable[[], None]


class AsFound:
    """Makes blocks that may overlap in threads: the first one to begin looks, the last one to end gives back.

    >>> values = [1]
    >>> def look():
    ...     found = values[0]
    ...     return lambda: values.__setitem__(0, found)
    >>> as_found = AsFound(look)
    >>> with as_found():
    ...     with as_found():
    ...         values[0] = 2
    ...     print(values)
    [2]
    >>> values
    [1]
    """

    def __init__(self, look: Callable[[], GiveBack]) -> None:
        """Begin outside of all blocks.

        Args:
            look: returns what brings back what is there when it is called.
        """
        self._look, self._lock, self._num_blocks = look, threading.Lock(), 0
        self._give_back: GiveBack = lambda: None

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """Be in a block."""
        with self._lock:
            if not self._num_blocks:
                self._give_back = self._look()
            self._num_blocks += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_blocks -= 1
                if not self._num_blocks:
                    self._give_back()


def variables(names: Iterable[str]) -> GiveBack:
    """Look at variables of the environment; return what gives them back."""
    found = {name: os.environ.get(name) for name in names}
    return lambda: set_variables(found)


def set_variables(values: Mapping[str, str | None]) -> None:
    """Set variables of the environment, and remove those that are None."""
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
