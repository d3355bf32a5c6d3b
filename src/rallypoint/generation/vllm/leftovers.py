"""What the processes of a server have of this machine's memory, and memory with a name that a killed one leaves.

Owns: how much a group of processes has, and which files of Linux's /dev/shm were its alone. Must not know: for what.
Python's `multiprocessing`,
by which the processes of a server talk, gives memory and semaphores names there and removes them at its end; a process
that is killed has none. Only what processes of the group had in their memory is removed, and only if nobody else has.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

_NAMES = ("psm_", "sem.mp-")
"""How the names of `multiprocessing` begin."""
_FOLDER = Path("/dev/shm")
_PROCESSES = Path("/proc")


def shared_files(group: int) -> dict[Path, int]:
    """Return what processes of a group share by name, with the number that tells a file from another of its name."""
    return {path: number for pid in _pids() if _group_of(pid) == group for path, number in _mapped(pid)}


def remove_shared(files: dict[Path, int], group: int) -> None:
    """Remove files of a group that has ended; those that others use, or have made anew, stay."""
    used = {path for pid in _pids() if files and _group_of(pid) != group for path, _ in _mapped(pid)}
    for path, number in files.items():
        with contextlib.suppress(OSError):
            if path not in used and path.stat().st_ino == number:
                path.unlink()


def take_peak_memory(group: int) -> int:
    """Return the bytes that the processes of a group had of their own at most since this was last asked.

    Each one's own peak, even if these were not at the same time; 0 where the system does not tell.
    """
    return sum(_take_peak(_PROCESSES / str(pid)) for pid in _pids() if _group_of(pid) == group)


def _take_peak(process: Path) -> int:
    with contextlib.suppress(OSError, ValueError):
        lines = (process / "status").read_text(errors="replace").splitlines()
        sizes = {
            name: int(rest.split()[0]) * 1024
            for name, _, rest in (line.partition(":") for line in lines)
            if rest.endswith("kB")
        }
        (process / "clear_refs").write_text("5")  # from now on the peak is what it has now
        return sizes.get("VmHWM", 0) - sizes.get("RssFile", 0) - sizes.get("RssShmem", 0)
    return 0


def _pids() -> Iterator[int]:
    return (int(entry.name) for entry in _PROCESSES.glob("[0-9]*"))


def _group_of(pid: int) -> int | None:
    """Return the group of a process; None for one that has ended meanwhile."""
    with contextlib.suppress(ProcessLookupError):
        return os.getpgid(pid)
    return None


def _mapped(pid: int) -> Iterator[tuple[Path, int]]:
    """Yield what a process has in its memory of the files of `multiprocessing`; of another user's nothing is told."""
    with contextlib.suppress(OSError):
        for line in (_PROCESSES / str(pid) / "maps").read_text(errors="replace").splitlines():
            fields = line.split(maxsplit=5)  # address, rights, offset, device, number and path, if there is one
            if len(fields) < 6:
                continue
            number, name = fields[4:]
            path = Path(name)
            if path.parent == _FOLDER and path.name.startswith(_NAMES) and not name.endswith(" (deleted)"):
                yield path, int(number)
