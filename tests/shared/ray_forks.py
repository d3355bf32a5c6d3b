"""Workers of a local Ray that are forked from one process of these tests, which has imported all that they need.

These imports take a worker longer than most tests: runs of tests share that process, where each run has one of its own.
So do all processes of `make test`.
"""

import atexit
import contextlib
import functools
import os
import shutil
import tempfile
from collections.abc import Iterator

from rallypoint.cluster import warm

_SHARED = "RALLYPOINT_TEST_FORKS"
"""Variable with the path of the socket, for those that another process starts."""


def share() -> None:
    """Have processes that this one starts use its process, too."""
    os.environ[_SHARED] = _open_socket()


@contextlib.contextmanager
def forked_workers() -> Iterator[None]:
    """Have a Ray that is started within this context, here or in a process begun here, start its workers as forks."""
    os.environ[warm.SOCKET] = _open_socket()
    try:
        yield
    finally:
        del os.environ[warm.SOCKET]


@functools.cache
def _open_socket() -> str:
    """Return the path of the socket, in a folder of its own because paths of sockets are short."""
    if _SHARED in os.environ:
        return os.environ[_SHARED]
    folder = tempfile.mkdtemp(prefix="forks-")
    stack = contextlib.ExitStack()
    stack.callback(shutil.rmtree, folder, ignore_errors=True)
    stack.enter_context(warm.forks(f"{folder}/socket", ["rallypoint.recipes.loop", "frozen"], os.environ))
    atexit.register(stack.close)
    return f"{folder}/socket"
