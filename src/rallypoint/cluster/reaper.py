"""A tiny process that ends and tidies what a Ray cluster leaves behind when its driver is gone.

Owns the end of a cluster that rallypoint started, whether the driver shut it down or was killed with -9. It runs as a
script (`python -I -S reaper.py ...`) on the driver's machine, in a session of its own, and sleeps until the driver
says that it is done, or dies. It must know neither Ray nor rallypoint, and imports little: it lives as long as a run.

A process belongs to the cluster if the cluster's mark stands in the environment it was started with. The driver sets
the mark only while it starts Ray, so Ray's processes, its workers and whatever these start inherit it, and nobody
else has it: not the driver, not another cluster, not a terminal in which somebody reads the logs. Some of Ray's
processes give themselves a title, which is written over that environment, and print into a pipe; those are known by the
logs of the cluster that they have open to write.

While the driver lives, this process also watches whether it returns from calls into Ray (`Guard`).

Only Linux can say whom to end (`/proc`, pidfds); elsewhere only folders are tidied, and Ray's own clean-up must do.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Callable

MARK = "RALLYPOINT_CLUSTER"
"""The environment variable that says to which cluster a process belongs."""

GRACE_S = 2.0
"""Seconds that processes may take to end after SIGTERM, and again after SIGKILL."""

LOOK_S = 5.0
"""Seconds between two looks of the driver's guard."""

_ROUNDS = 3
"""A process started by another one just before that died is found in the next round."""

_GRACE_AFTER_DEATH_S, _PAUSE_S, _MOST_S = 0.5, 0.3, 8.0
"""After a driver's death: seconds that processes may take to end, between two looks for more, and for all of it. Ray's
agents do not end with their parent, and wait a minute for a GCS that is gone."""


def main(driver: int, mark: str, folder: str, logs: str, busy: str = "", limit_s: str = "") -> None:
    """Wait for the driver's end, end what it left, and put the logs where users look for them.

    Args:
        driver: process id of the driver, which is the parent of this process.
        mark: value of `MARK` in the environment of the cluster's processes.
        folder: the cluster's private folder, which is removed.
        logs: a link to Ray's logs inside that folder, which is replaced by the logs themselves.
        busy: descriptor of a page with the number of the question that the driver has asked Ray; 0 when there is
            none. Empty: there is no such page.
        limit_s: how long the driver may wait for one answer.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # they are meant for the driver; this process has work to do after it
    guard = Guard(driver, int(busy), float(limit_s)) if busy else None
    while (end := _end_of(driver, guard)) == "hangs":
        _say_there(driver, "does not come back from Ray, whose processes are ended now; its interpreter is held")
        # What they kept it waiting for fails with them, or ends the driver from Ray's C++.
        end_processes(mark, folder=folder, driver=driver)
        guard = None
    is_dead = end == "died"
    grace_s = _GRACE_AFTER_DEATH_S if is_dead else GRACE_S
    patience_s = 0.0 if is_dead else GRACE_S  # Ray's agents end a moment after its raylet
    num_ended = end_processes(mark, grace_s, folder=folder, driver=driver, until_quiet=is_dead, patience_s=patience_s)
    tidy(folder, logs)
    if num_ended and os.path.isdir(logs):
        with contextlib.suppress(OSError), open(os.path.join(logs, "reaper.log"), "a", encoding="utf-8") as file:
            file.write(f"driver {driver} left {num_ended} processes behind, which were ended\n")


class Guard:
    """Notices a driver that does not return from a call into Ray, even if its interpreter no longer runs code."""

    def __init__(self, driver: int, busy: int, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin with what the page says now."""
        self._driver, self._busy, self._limit_s = driver, busy, limit_s
        self._clock = clock
        self._number, self._waited_s, self._looked_at = 0, 0.0, clock()

    def is_lost(self) -> bool:
        """Return whether a question went unanswered for too long by a driver that runs; call it once per beat."""
        now = self._clock()
        passed_s, self._looked_at = min(now - self._looked_at, 3 * LOOK_S), now
        number = int.from_bytes(os.pread(self._busy, PAGE_BYTES, 0), sys.byteorder)
        if number != self._number or is_stopped(self._driver):
            self._number, self._waited_s = number, 0.0
        elif number:
            self._waited_s += passed_s
        return self._waited_s > self._limit_s


PAGE_BYTES = 8
"""Size of the page that holds the number of the driver's question."""


def open_page() -> int | None:
    """Open memory for a number that can be read while the driver's interpreter is held; None if the system has none."""
    if not hasattr(os, "memfd_create"):
        return None
    page = os.memfd_create("busy")
    os.truncate(page, PAGE_BYTES)
    return page


def _say_there(process: int, what: str) -> None:
    """Add a line to where a process writes its errors, which may be a file that has all it said before."""
    with contextlib.suppress(OSError), open(f"/proc/{process}/fd/2", "a", encoding="utf-8") as errors:
        errors.write(f"error: process {process} {what}\n")


def stat_of(pid: int) -> tuple[str, str, int] | None:
    """Return a process's program, the letter of its state, and its parent; None if it is gone, or without /proc."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            before, _, after = file.read().rpartition(")")
    except OSError:
        return None
    state, parent, *_ = after.split()
    return before.partition("(")[2], state, int(parent)


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped, by a signal or a debugger."""
    found = stat_of(pid)
    return found is not None and found[1] in "Tt"


def _end_of(driver: int, guard: Guard | None) -> str:
    """Sleep until the driver says, by a byte on standard input, that it has shut Ray down, or until it dies.

    Returns "told" or "died", or "hangs" if it has done neither, but its guard says that it is lost.

    Where there are pidfds, a closed pipe is not enough: a driver that ends without a message has Ray's own clean-up
    still to come, and a process that it forked may hold the pipe open after the driver's death.
    """
    pipe = sys.stdin.fileno()
    watched = select.poll()
    watched.register(pipe, select.POLLIN)
    if sys.platform == "linux":
        try:
            watched.register(os.pidfd_open(driver), select.POLLIN)
        except ProcessLookupError:
            return "died"
        if os.getppid() != driver:  # it died before, and the number may be somebody else's by now
            return "died"
    while True:
        events = dict(watched.poll(LOOK_S * 1000 if guard else None))
        if not events:
            if guard is not None and guard.is_lost():
                return "hangs"
        elif pipe not in events or sys.platform != "linux":
            return "died" if pipe not in events else "told"
        elif os.read(pipe, 1):
            return "told"
        else:
            watched.unregister(pipe)


def end_processes(
    mark: str,
    grace_s: float = GRACE_S,
    *,
    folder: str = "",
    driver: int = 0,
    until_quiet: bool = False,
    patience_s: float = 0.0,
) -> int:
    """End every process that has the mark in its environment or writes logs of the folder; say how many there were.

    They get SIGTERM, and SIGKILL if they are still there after `grace_s`. Signals go through pidfds, opened before
    the environment is read, so that no other process is hit by a number that was used again. `until_quiet` looks on
    until nothing was found three times in a row: what dies suddenly leaves processes that are only just starting. Who
    ends within `patience_s` is left alone.
    """
    if sys.platform != "linux":
        return 0
    num_ended, num_rounds, num_quiet, until = 0, 0, 0, time.monotonic() + _MOST_S
    while num_quiet < _ROUNDS and (time.monotonic() < until if until_quiet else num_rounds < _ROUNDS):
        processes = _still_there(_of_cluster(f"{MARK}={mark}".encode(), folder, driver), patience_s)
        num_rounds, num_quiet = num_rounds + 1, 0 if processes else num_quiet + 1
        if not processes:
            if not until_quiet:
                break
            time.sleep(_PAUSE_S)
        num_ended += len(processes)
        for number in (signal.SIGTERM, signal.SIGKILL):
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(process, number)
            processes = _still_there(processes, grace_s)
        for process in processes:
            os.close(process)
    return num_ended


def num_left(mark: str, folder: str) -> int:
    """Return how many processes of a cluster there are."""
    found = _of_cluster(f"{MARK}={mark}".encode(), folder, 0)
    for process in found:
        os.close(process)
    return len(found)


def _of_cluster(entry: bytes, folder: str, driver: int) -> list[int]:
    """Open a pidfd for every process, this one excepted, that is marked or writes logs of the folder."""
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
                is_found = entry in file.read().split(b"\0") or _writes_logs(folder, name, driver)
            is_found = is_found or _is_given(folder, name)
        except OSError:  # ended meanwhile, or another user's
            is_found = False
        if is_found:
            found.append(process)
        else:
            os.close(process)
    return found


def _writes_logs(folder: str, process: str, driver: int) -> bool:
    """Whether a process has a file of the folder open to write, as all have that Ray starts.

    The driver has some, too, which end with its number; so has whatever it forked.
    """
    if not folder:
        return False
    inside, of_driver = os.path.realpath(folder) + os.sep, f"_{driver}.log"
    for number in os.listdir(f"/proc/{process}/fd"):
        with contextlib.suppress(OSError):  # closed
            path = os.readlink(f"/proc/{process}/fd/{number}")
            if path.startswith(inside) and not path.endswith(of_driver) and _is_to_write(process, number):
                return True
    return False


def _is_given(folder: str, process: str) -> bool:
    """Whether an option in a process's command line is in the folder, as of Ray's; a reader of its logs has none."""
    with open(f"/proc/{process}/cmdline", "rb") as file:
        return bool(folder) and f"={os.path.realpath(folder)}{os.sep}".encode() in file.read()


def _is_to_write(process: str, number: str) -> bool:
    with open(f"/proc/{process}/fdinfo/{number}", encoding="ascii") as file:
        return any(line.startswith("flags:") and int(line.split()[1], 8) & os.O_ACCMODE != os.O_RDONLY for line in file)


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


def tidy(folder: str, logs: str, move: Callable[[str, str], object] | None = None) -> None:
    """Move the logs to their link's place, unless the link is another cluster's by now; remove the folder.

    The folder goes with its token whatever becomes of the logs: those that the disk has no room for go with it.
    """
    import shutil  # only now: it is larger than all the rest

    target = os.path.realpath(logs)
    try:
        if os.path.islink(logs) and target.startswith(os.path.realpath(folder) + os.sep):
            os.unlink(logs)
            if os.path.isdir(target):
                (move or shutil.move)(target, logs)
                for path, _, _ in os.walk(logs):  # Ray lets everybody write there, which only the folder kept them from
                    os.chmod(path, 0o755)
    except OSError:  # nobody is left who could be told
        if os.path.isdir(target):  # it was copied, to another disk, and not whole
            shutil.rmtree(logs, ignore_errors=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
