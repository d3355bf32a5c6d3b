"""What is left of a Ray cluster when its driver has gone is ended and tidied here: by a tiny process of its own.

Owns the end of a cluster that rallypoint started, whether the driver shut it down or was killed with -9. It runs as a
script (`python -I -S reaper.py ...`) beside the driver, in a session of its own, and sleeps until the driver says that
it is done, or dies. It must know neither Ray nor rallypoint, and imports little, because it lives as long as a run.

A process belongs to the cluster if the cluster's mark stands in the environment it was started with. The driver sets
the mark only while it starts Ray, so Ray's processes, its workers and whatever these start inherit it, and nobody
else has it: not the driver, not another cluster, not a terminal in which somebody reads the logs.

Linux only knows whom to end (`/proc`, pidfds); elsewhere the folders are tidied and Ray's own clean-up has to do.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time

MARK = "RALLYPOINT_CLUSTER"
"""The environment variable that says to which cluster a process belongs."""

GRACE_S = 2.0
"""How long processes may take to end after SIGTERM, and again after SIGKILL."""

_ROUNDS = 3
"""A process that starts another one just before it dies is met in the next round."""


def main(driver: int, mark: str, folder: str, logs: str) -> None:
    """Wait for the driver's end, end what it left, and put the logs where they are looked for.

    Args:
        driver: process id of the driver, which is the parent of this process.
        mark: value of `MARK` in the environment of the cluster's processes.
        folder: the cluster's private folder, which is removed.
        logs: a link to Ray's logs inside that folder, which is replaced by the logs themselves.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # who stops the run means the driver, and then there is work to do
    _wait_for_the_end_of(driver)
    num_ended = end_processes(mark)
    _tidy(folder, logs)
    if num_ended and os.path.isdir(logs):
        with open(os.path.join(logs, "reaper.log"), "a", encoding="utf-8") as file:
            file.write(f"driver {driver} left {num_ended} processes behind, which were ended\n")


def _wait_for_the_end_of(driver: int) -> None:
    """Sleep until the driver says, by a byte on standard input, that it has shut Ray down, or until it dies.

    That the pipe is closed says too little where a pidfd can be had: a driver that ends without a word still has
    Ray's own clean-up before it, and a process that it forked may hold the pipe open after its death.
    """
    pipe = sys.stdin.fileno()
    watched = select.poll()
    watched.register(pipe, select.POLLIN)
    if sys.platform == "linux":
        try:
            watched.register(os.pidfd_open(driver), select.POLLIN)
        except ProcessLookupError:
            return
        if os.getppid() != driver:  # it died before, and the number may be somebody else's by now
            return
    while pipe in dict(watched.poll()) and not os.read(pipe, 1) and sys.platform == "linux":
        watched.unregister(pipe)


def end_processes(mark: str, grace_s: float = GRACE_S) -> int:
    """End every process that has the mark in its environment, and say how many there were.

    They get SIGTERM, and SIGKILL if they are still there after `grace_s`. Signals go through pidfds, opened before
    the environment is read, so that no other process is hit by a number that was used again.
    """
    if sys.platform != "linux":
        return 0
    num_ended = 0
    for _ in range(_ROUNDS):
        processes = _marked(f"{MARK}={mark}".encode())
        if not processes:
            break
        num_ended += len(processes)
        for number in (signal.SIGTERM, signal.SIGKILL):
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(process, number)
            processes = _still_there(processes, grace_s)
        for process in processes:
            os.close(process)
    return num_ended


def _marked(entry: bytes) -> list[int]:
    """Open a pidfd for every process, this one excepted, whose first environment had that entry."""
    found: list[int] = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            process = os.pidfd_open(int(name))
        except OSError:
            continue
        try:
            with open(f"/proc/{name}/environ", "rb") as file:
                is_marked = entry in file.read().split(b"\0")
        except OSError:  # ended meanwhile, or another user's
            is_marked = False
        if is_marked:
            found.append(process)
        else:
            os.close(process)
    return found


def _still_there(processes: list[int], patience_s: float) -> list[int]:
    """Wait for the end of processes, close the pidfds of those that ended, and return the others."""
    poller = select.poll()
    for process in processes:
        poller.register(process, select.POLLIN)
    remaining = set(processes)
    deadline = time.monotonic() + patience_s
    while remaining and (left_s := deadline - time.monotonic()) > 0:
        for process, _ in poller.poll(left_s * 1000):
            poller.unregister(process)
            os.close(process)
            remaining.remove(process)
    return list(remaining)


def _tidy(folder: str, logs: str) -> None:
    """Move the logs to their link's place, unless the link is another cluster's by now; remove the folder."""
    import shutil  # only now: it is larger than all the rest

    target = os.path.realpath(logs)
    if os.path.islink(logs) and target.startswith(os.path.realpath(folder) + os.sep):
        os.unlink(logs)
        if os.path.isdir(target):
            shutil.move(target, logs)
            for path, _, _ in os.walk(logs):  # Ray lets everybody write there, which only the folder kept them from
                os.chmod(path, 0o755)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
