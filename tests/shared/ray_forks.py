"""Workers of a local Ray that are forked from a process that has imported torch, transformers and rallypoint.

These imports take a worker longer than most tests. Ray starts a worker with this file instead of with Python: it asks
the process of the tests, over a socket, for a fork that is the worker (see `forks`), and ends.
"""

import atexit
import contextlib
import functools
import json
import os
import shutil
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator
from typing import Any

HOOK = "RAY_RUNTIME_ENV_HOOK"
"""Variable that names what `ray.init` calls to change how workers are started."""
SOCKET = "RALLYPOINT_TEST_FORKS"
"""Variable with the path of the socket."""


@contextlib.contextmanager
def forked_workers() -> Iterator[None]:
    """Have a Ray that is started within this context, here or in a process begun here, start its workers as forks."""
    os.environ |= {HOOK: f"{__name__}.started_by_this_file", SOCKET: _open_socket()}
    try:
        yield
    finally:
        del os.environ[HOOK], os.environ[SOCKET]


def started_by_this_file(runtime_env: dict[str, Any] | None) -> dict[str, Any]:
    """Be called by `ray.init`."""
    return {**(runtime_env or {}), "py_executable": f"{sys.executable} -I -S {__file__} {os.environ[SOCKET]}"}


@functools.cache
def _open_socket() -> str:
    """Return the path of the socket, in a folder of its own because paths of sockets are short."""
    folder = tempfile.mkdtemp(prefix="forks-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{folder}/socket")
    listener.listen()
    threading.Thread(target=_serve, args=(listener,), name="forks", daemon=True).start()
    return f"{folder}/socket"


def _serve(listener: socket.socket) -> None:
    """Fork a worker for everybody who asks."""
    from forks import fork_context

    context = fork_context()
    while True:
        asking, _ = listener.accept()
        with contextlib.suppress(OSError, ValueError), asking, asking.makefile() as request:  # Ray may have ended it
            context.Process(target=_be_worker, args=json.load(request), daemon=True).start()


def _be_worker(arguments: list[str], environment: dict[str, str], cwd: str) -> None:
    """Be what Ray would have started. Ray is imported here, because it reads the environment when it is."""
    import runpy

    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)  # until the worker opens its logs
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = arguments
    runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    with socket.socket(socket.AF_UNIX) as tests:
        tests.connect(sys.argv[1])
        tests.sendall(json.dumps((sys.argv[2:], dict(os.environ), os.getcwd())).encode())
