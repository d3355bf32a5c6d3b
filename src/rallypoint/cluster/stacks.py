"""What every thread of some processes of this machine is doing, as text.

py-spy is used when it is installed, because it shows local frames of any process, a stopped one too. Otherwise the
process writes its own stacks (`open_stacks`), which a stopped process cannot.
"""

from __future__ import annotations

import faulthandler
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rallypoint.cluster.process import ProcessInfo
from rallypoint.cluster.reaper import is_stopped

_PATIENCE_S = 5.0


def open_stacks() -> int:
    """Make SIGUSR1 write the stacks of all threads of this process, and return the descriptor they go to.

    It works while the interpreter is held by a call that never returns. The memory file leaves nothing behind.
    """
    if not hasattr(os, "memfd_create") or not hasattr(faulthandler, "register"):
        return -1
    descriptor = os.memfd_create("stacks")
    faulthandler.register(signal.SIGUSR1, file=descriptor, all_threads=True)
    return descriptor


def find_py_spy() -> str | None:
    """Return the path of py-spy, from this Python's folder or the PATH; None when it is not installed."""
    return shutil.which("py-spy", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))


def stacks_of(processes: Sequence[ProcessInfo], find: Callable[[], str | None] = find_py_spy) -> str:
    """Return the stacks of processes of this machine, one after another; the text says which are missing."""
    tool = find()
    with ThreadPoolExecutor(max(1, len(processes))) as at_once:  # patience with each, but not with one after the other
        texts = at_once.map(lambda one: _stacks(one, tool), processes)
        return "\n".join(
            f"=== pid {one.pid} on {one.node}\n{text.rstrip()}\n" for one, text in zip(processes, texts, strict=True)
        )


def _stacks(process: ProcessInfo, tool: str | None) -> str:
    seen = _by_py_spy(process.pid, tool)
    return seen if "Thread" in seen else f"{_by_itself(process)}\n{seen}"


def _by_py_spy(pid: int, tool: str | None) -> str:
    if tool is None:
        return "(py-spy is not installed; it would also show processes that are stopped: pip install py-spy)"
    try:
        # Not blocking: a process that is stopped already would not come back from being stopped once more.
        ran = subprocess.run(
            [tool, "dump", "--nonblocking", "--pid", str(pid)],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_PATIENCE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"(py-spy did not answer within {_PATIENCE_S:g} s)"
    return ran.stdout or f"(py-spy failed: {ran.stderr.strip()})"


def _by_itself(process: ProcessInfo) -> str:
    if process.stacks_fd < 0:
        return "(this process cannot write its own stacks)"
    written = Path(f"/proc/{process.pid}/fd/{process.stacks_fd}")
    stopped = "(the process is stopped, so it cannot write its stacks)"
    try:
        if is_stopped(process.pid):
            return stopped
        before = len(written.read_bytes())
        os.kill(process.pid, signal.SIGUSR1)
        until = time.monotonic() + _PATIENCE_S
        text, is_growing = b"", True
        while is_growing and time.monotonic() < until:
            time.sleep(0.05)
            seen, text = text, written.read_bytes()[before:]
            is_growing = not text or text != seen
        if not text and is_stopped(process.pid):  # a busy machine may let it stop late
            return stopped
    except OSError as error:
        return f"(cannot be asked for its stacks: {error})"
    return text.decode(errors="replace") or f"(did not write its stacks within {_PATIENCE_S:g} s)"
