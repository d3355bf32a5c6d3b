"""A process that has imported what workers need, and from which a local Ray forks its workers.

Imports take a worker longer than all else at its start: with forks, one that was lost is back in a second or two. The
driver starts this process beside Ray, with a socket. Ray runs this file where it would prepare a worker: it asks there
for a fork that is the worker, and ends. Without an answer it becomes the worker itself, the slow way.

Owns: how a worker becomes a fork. Must not know: which modules they need. Nothing of rallypoint is imported at the top,
as this file is run by itself. Invariants: it has one thread when it forks. It ends with the driver, and its forks with
it; all of them have the environment that it was started with, so that the reaper knows them by its mark.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import NoReturn

IS_POSSIBLE = sys.platform == "linux"
"""Whether a fork can be told to end with its parent."""
SOCKET = "RALLYPOINT_WARM"
"""Variable with the path of the socket at which forks are given. Set before a run, it says that somebody else gives
them, as for many short runs."""
_OF_PREPARATION = ("--language=", "--serialized-runtime-env-context=")
"""What Ray tells only the program that prepares a worker. Without a runtime_env there is nothing to prepare."""
_DIE_WITH_PARENT = 1
"""Linux's number for it, of `prctl`."""


@contextlib.contextmanager
def forks(path: str, modules: Sequence[str], environment: Mapping[str, str]) -> Iterator[None]:
    """Have forks given at a socket while the block lasts, by a process that imports modules meanwhile.

    Call it from a thread that outlives the block: the process ends with it.

    Args:
        path: of the socket, at most 100 characters.
        modules: to import.
        environment: of the process.
    """
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(1024)
        command = [sys.executable, "-P", __file__, str(listener.fileno()), str(os.getpid()), *modules]
        null = subprocess.DEVNULL
        giving = subprocess.Popen(  # a key that interrupts the driver in its terminal must not end the workers
            command,
            pass_fds=[listener.fileno()],
            env=dict(environment),
            stdin=null,
            stdout=null,
            stderr=null,
            start_new_session=True,
        )
    try:
        yield
    finally:
        giving.kill()
        giving.wait()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def _die_with(parent: int) -> None:
    import ctypes  # which who only asks need not load

    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != parent:  # it has died already
        os._exit(1)


def _give(listener: socket.socket, driver: int, modules: Sequence[str]) -> NoReturn:
    """Import modules, then fork a worker for everybody who asks."""
    _die_with(driver)
    for module in modules:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # a collection would write to all pages that forks share
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for a fork
    here = os.getpid()
    while True:
        asking, _ = listener.accept()
        with asking, contextlib.suppress(OSError, ValueError):  # Ray may have ended who asks
            arguments, environment, folder = json.loads(asking.makefile().readline())
            if os.fork() == 0:
                listener.close()
                asking.close()
                _be_worker(here, arguments, environment, folder)
            asking.sendall(b"1")


def _be_worker(parent: int, arguments: list[str], environment: Mapping[str, str], folder: str) -> NoReturn:
    """Be what Ray would have started. Ray is imported here, because it reads the environment when it is."""
    import runpy

    status = 1
    try:
        _die_with(parent)
        os.setpgrp()  # as what Ray starts: when a worker ends, Ray kills all of its group
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        random.seed()
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    finally:
        os._exit(status)


def _ask(arguments: Sequence[str]) -> None:
    """Ask for a fork, or become the worker."""
    arguments = [argument for argument in arguments if not argument.startswith(_OF_PREPARATION)]
    with contextlib.suppress(KeyError, OSError), socket.socket(socket.AF_UNIX) as giving:
        giving.connect(os.environ.pop(SOCKET))  # a Ray that the worker starts gives its own
        giving.sendall(json.dumps((arguments, dict(os.environ), os.getcwd())).encode() + b"\n")
        if giving.recv(1):
            return
    os.execv(sys.executable, [sys.executable, *arguments])


if __name__ == "__main__":
    if sys.argv[1].isdigit():
        _give(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]), sys.argv[3:])
    _ask(sys.argv[1:])
