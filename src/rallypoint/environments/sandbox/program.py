"""A program, what it may use, and what became of it: the words that every tier speaks."""

from __future__ import annotations

import dataclasses
from typing import Literal, Protocol

from rallypoint.errors import SandboxError as SandboxError

Status = Literal["ok", "failed", "timeout"]


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """What one program may use. It is one process of few threads without a network, whatever these are."""

    time_s: float = 5.0
    """Seconds of CPU time, of all its threads together: the same on a busy machine."""
    wall_s: float | None = None
    """Seconds from its start to its end, for one that waits instead of computing; None: 10, and four times `time_s`."""
    start_s: float = 30.0
    """Seconds in which the sandbox must have started it, on a busy machine; else the sandbox has failed, not it."""
    memory_mib: int = 512
    """Address space."""
    output_kib: int = 256
    """The most that it may write to standard output, to standard error, and to any file."""
    files_mib: int = 16
    """All of its files together, where it may write any."""

    @property
    def latest_s(self) -> float:
        """Seconds after its start at which it is ended, whatever it has taken."""
        return 10.0 + 4.0 * self.time_s if self.wall_s is None else self.wall_s


@dataclasses.dataclass(frozen=True, slots=True)
class Ran:
    """What became of a program."""

    status: Status
    """`ok`: it ended with status 0. `failed`: with another, or by a signal. `timeout`: it was ended."""
    stdout: str
    stderr: str
    exit_status: int | None
    """None after a timeout; below 0 by a signal."""
    cpu_s: float = 0.0
    """Seconds of CPU time that it took; of a remote program, what the service says of its time."""


class Sandbox(Protocol):
    """Runs programs that may do anything."""

    @property
    def name(self) -> str:
        """What it is and holds, in a few words, for the first lines of a run."""
        ...

    def run(self, code: str, *, stdin: str = "", limits: Limits = ...) -> Ran:
        """Run a Python program to its end; nothing of it stays.

        Raises:
            SandboxError: the sandbox itself failed, and nothing is known of the program.
        """
        ...
