"""A terminal of some size with a program in it: what its screen shows, what is typed, and a change of its size."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import termios
import time
from collections.abc import Callable, Sequence
from typing import Self

import pyte

DEADLINE_S = 60.0


class Terminal:
    """Runs a program in a terminal that is drawn by pyte."""

    def __init__(self, columns: int, rows: int, arguments: Sequence[str], **environment: str) -> None:
        self.screen = pyte.HistoryScreen(columns, rows, history=5000)
        self._stream = pyte.ByteStream(self.screen)
        self.raw = b""
        self.pid, self.file = pty.fork()
        if self.pid == 0:
            _set_size(0, columns, rows)
            os.execvpe(arguments[0], list(arguments), {**os.environ, "TERM": "xterm-256color", **environment})

    def lines(self) -> list[str]:
        """What the screen shows now, without blank ends."""
        return [line.rstrip() for line in self.screen.display]

    def history(self) -> list[str]:
        """What has left the screen at its top."""
        columns = range(self.screen.columns)
        return ["".join(line[x].data for x in columns).rstrip() for line in self.screen.history.top]

    def shows(self, *words: str) -> bool:
        """Whether all of these are on the screen."""
        text = "\n".join(self.lines())
        return all(word in text for word in words)

    def wait(self, until: Callable[[], bool]) -> None:
        """Read what the program writes until something holds."""
        deadline = time.monotonic() + DEADLINE_S
        while not until():
            if not self.read(deadline - time.monotonic()):
                assert until(), "\n".join(self.lines())
                return

    def read(self, timeout_s: float) -> bool:
        """Take what the program has written; False when it has ended, or wrote nothing in so long."""
        if not select.select([self.file], [], [], max(timeout_s, 0))[0]:
            return False
        try:
            data = os.read(self.file, 65536)
        except OSError:  # the program has ended
            return False
        self.raw += data
        self._stream.feed(data)
        return bool(data)

    def type(self, text: str) -> None:
        """Type; a Ctrl-C is `\\x03`."""
        os.write(self.file, text.encode())

    def resize(self, columns: int, rows: int) -> None:
        """Change the size: as terminals do, with lines that have become too long cut and the program told."""
        self.screen.resize(rows, columns)
        _set_size(self.file, columns, rows)

    def end(self) -> int:
        """Read to the end, and return the exit status."""
        while self.read(DEADLINE_S):
            pass
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            if os.waitpid(self.pid, os.WNOHANG) == (0, 0):
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
        except ChildProcessError:
            pass
        os.close(self.file)


def _set_size(descriptor: int, columns: int, rows: int) -> None:
    fcntl.ioctl(descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
