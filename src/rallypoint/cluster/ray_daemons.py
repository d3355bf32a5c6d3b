"""Ray's daemons that this program cannot do without, and what Ray changes in the process that starts it.

Owns: which they are, and what can be seen of them without asking Ray: the raylet of this machine (starts workers, keeps
the object store) and, of a cluster of our own, the GCS (knows where everything is). Must not know: what is done about
a fault. Nothing here blocks. Variables of the environment, and what Ray sets for a driver, are put back.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rallypoint.as_found import set_variables, variables
from rallypoint.cluster.reaper import stat_of

_UNUSED = ("start_log_monitor", "start_monitor", "start_api_server")
"""Methods by which a node of Ray starts what prints logs of workers, asks for more machines, and shows a page."""
_REASON = re.compile(r'reason_message: "([^"]+)"')
_LOG_BYTES = 2**16
_LOOK_MS = 1000


@dataclasses.dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong with one of Ray's daemons."""

    what: str
    """As in "Ray's raylet (pid 12) was killed by signal 9"."""
    is_gone: bool
    """Whether it is gone for good; one that is stopped may still be continued."""
    is_raylet: bool
    """Whether it is the raylet, which workers need for their calls; without a GCS running workers continue."""

    def __str__(self) -> str:
        return self.what


@dataclasses.dataclass(frozen=True, slots=True)
class _Process:
    name: str
    pid: int
    is_raylet: bool
    started: subprocess.Popen[Any] | None
    """If it is a child of this process."""

    def fault(self) -> str | None:
        """Return what is wrong with it; a process under a debugger does not count as stopped."""
        state = _state(self.pid)  # first, so that the status of one that has just ended is known by then
        code = None if self.started is None else self.started.poll()
        if code is not None and code < 0:
            return f"was killed by signal {-code}"
        if code is not None or state in {None, "Z", "X"}:
            return "has ended"
        return "is stopped" if state == "T" else None


class RayDaemons:
    """The daemons of the cluster that this process has just started, or joined."""

    def __init__(self, node: Any, logs: Path | None) -> None:
        """Find them; `node` is Ray's own account of them, and `logs` the folder of logs of a cluster of our own."""
        self._logs, self._processes = logs, tuple(_find(node))

    def fault(self) -> Fault | None:
        """Return what is wrong with one of them; that of the raylet first, because workers end with it."""
        for one in self._processes:
            if (how := one.fault()) is not None:
                is_gone = how != "is stopped"
                reason = self._reason() if one.is_raylet and is_gone else ""
                what = f"Ray's {one.name} (pid {one.pid}) {how}{reason}"
                return Fault(what, is_gone, one.is_raylet)
        return None

    def wait_for_raylet(self, leaving: threading.Event) -> None:
        """Wait until the raylet has ended, or until a second after this program leaves the cluster."""
        for one in self._processes:
            if one.is_raylet and hasattr(os, "pidfd_open"):
                with contextlib.suppress(ProcessLookupError):
                    raylet = os.pidfd_open(one.pid)
                    poller = select.poll()
                    poller.register(raylet, select.POLLIN)
                    while not leaving.is_set() and not poller.poll(_LOOK_MS):
                        pass
                    os.close(raylet)
                return
        leaving.wait()

    def why_workers_ended(self) -> str:
        """Return why all workers of this machine ended at once, as far as is known."""
        found = self.fault()
        return found.what if found is not None and found.is_raylet else f"Ray's raylet is ending{self._reason()}"

    def _reason(self) -> str:
        """Return what the raylet wrote about its end; it ends itself if an agent that it started does."""
        if self._logs is None:
            return ""
        with contextlib.suppress(OSError), (self._logs / "raylet.out").open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - _LOG_BYTES))
            if found := _REASON.findall(file.read().decode(errors="replace")):
                return f": {found[-1]}"
        return ""


def _find(node: Any) -> Iterator[_Process]:
    started = {kind: found[0].process for kind, found in node.all_processes.items() if found}
    if "raylet" in started:
        yield _Process("raylet", started["raylet"].pid, is_raylet=True, started=started["raylet"])
    elif pid := _listener(node.raylet_socket_name):
        yield _Process("raylet", pid, is_raylet=True, started=None)
    if "gcs_server" in started:
        yield _Process("GCS", started["gcs_server"].pid, is_raylet=False, started=started["gcs_server"])


def _listener(path: str) -> int:
    """Return the pid of the process that listens at a Unix socket; 0 if that cannot be seen from here."""
    with contextlib.suppress(OSError, AttributeError), socket.socket(socket.AF_UNIX) as client:
        client.connect(path)
        return struct.unpack("3i", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
    return 0


def _state(pid: int) -> str | None:
    """Return the letter of a process's state; None when it is gone. Where there is no /proc all seem to run."""
    if not Path("/proc/self/stat").exists():
        return "S"
    found = stat_of(pid)
    return None if found is None else found[1]


@contextlib.contextmanager
def only_needed(node_class: Any) -> Iterator[None]:
    """Have Ray start, inside the block, only the daemons that a cluster for one program needs."""
    found = {name: getattr(node_class, name) for name in _UNUSED if hasattr(node_class, name)}
    for name in found:
        setattr(node_class, name, lambda *_, **__: None)
    try:
        yield
    finally:
        for name, method in found.items():
            setattr(node_class, name, method)


@contextlib.contextmanager
def environment(changes: Mapping[str, str | None]) -> Iterator[None]:
    """Set variables of the environment, or remove those that are None, and put everything back at the end."""
    give_back = variables(changes)
    set_variables(changes)
    try:
        yield
    finally:
        give_back()


@contextlib.contextmanager
def process_as_found() -> Iterator[None]:
    """Put back what Ray sets for a driver: in this process nobody is debugged by Ray, and SIGTERM is the user's."""
    give_back = variables(("PYTHONBREAKPOINT", "RAY_CLIENT_MODE"))
    on_error, on_sigterm = sys.excepthook, signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        give_back()
        sys.excepthook = on_error
        if threading.current_thread() is threading.main_thread():  # elsewhere Ray sets none
            signal.signal(signal.SIGTERM, signal.SIG_DFL if on_sigterm is None else on_sigterm)


class _Voice(logging.Handler):
    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__(logging.ERROR)
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        self._say(f"Ray: {record.getMessage()}")


def speak_for_ray(say: Callable[[str], None]) -> None:
    """Print Ray's errors as lines of ours, which do not tear up the screen."""
    logging.getLogger("ray").handlers = [_Voice(say)]
