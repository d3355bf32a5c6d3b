"""The lower part of a terminal, redrawn in place: what was written above stays, and nothing tears the frame.

The frame stands above the cursor, which waits at the beginning of the line below, where an echoed `^C` disturbs
nothing. Three things could move the frame. Typed keys are not echoed while the program is in the foreground (a return
would scroll). Output of the program is written above the frame. A terminal that was resized, or used by another
program, is cleared and redrawn, because the position of its lines is unknown.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
import termios
import threading
import time
from collections.abc import Callable, Mapping
from types import FrameType
from typing import IO, Any, TextIO

from rich.console import Console, RenderableType

TICK_S, EVERY_S = 0.25, 1.0
"""Seconds between two looks at the terminal's size, and between two updates of the clock."""
_UP, _TO_COLUMN_1, _CLEAR_LINE, _CLEAR_BELOW, _HOME = "\x1b[{}A", "\r", "\x1b[K", "\x1b[J", "\x1b[H"
_HIDE, _SHOW = "\x1b[?25l", "\x1b[?25h"


class Screen:
    """Draws what a function returns for a width and a height, from `start` to `stop`."""

    def __init__(self, console: Console, draw: Callable[[int, int], RenderableType]) -> None:
        self._console, self._draw = console, draw
        self._file = console.file  # a console without a file looks up sys.stdout, which is replaced below
        self._lock = threading.RLock()
        self._size = (0, 0)
        self._frame: list[str] = []
        self._echo: tuple[int, Any] | None = None
        self._streams: tuple[TextIO, TextIO] | None = None
        self._on_resumed: Callable[[int, FrameType | None], object] | int | None = None
        self._is_moved = False
        self._ended = threading.Event()
        self._ticker: threading.Thread | None = None

    @property
    def is_started(self) -> bool:
        """Whether the screen has the terminal."""
        return self._ticker is not None

    def start(self) -> None:
        """Take the terminal and draw the first frame."""
        self._silence()
        self._streams = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = _Above(self, sys.stdout), _Above(self, sys.stderr)
        if threading.current_thread() is threading.main_thread():
            self._on_resumed = signal.signal(signal.SIGCONT, self._resumed)
        self._write(_HIDE)
        self._ended.clear()
        self._ticker = threading.Thread(target=self._tick, name="screen", daemon=True)
        self.refresh()
        self._ticker.start()

    def stop(self, *, erase: bool = False) -> None:
        """Give the terminal back, below the last frame or in its place; a second call does nothing."""
        ticker, self._ticker = self._ticker, None
        if ticker is None:
            return
        self._ended.set()
        ticker.join()
        with self._lock:
            if erase:
                self._write(self._to_top() + _CLEAR_BELOW)
            else:
                self._paint()
            self._frame = []
        if self._streams is not None:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()  # the line that a library left unfinished
            sys.stdout, sys.stderr = self._streams
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGCONT, self._on_resumed or signal.SIG_DFL)
        self.give_back()

    def give_back(self) -> None:
        """Make the terminal usable at once, from wherever: also from a handler of signals, before the process ends."""
        self._write(_SHOW)
        if self._echo is not None:
            _set_echo(*self._echo)
            self._echo = None

    def refresh(self) -> None:
        """Draw now."""
        with self._lock:
            self._paint()

    def print_above(self, text: str) -> None:
        """Write whole lines above the frame."""
        with self._lock:
            self._write(self._to_top() + _CLEAR_BELOW + text + "".join(self._frame))

    def _tick(self) -> None:
        """Keep the clock going, and notice a new size soon."""
        drawn = time.monotonic()
        while not self._ended.wait(TICK_S):
            if self._is_moved or self._size != self._console.size or time.monotonic() - drawn >= EVERY_S:
                drawn = time.monotonic()
                self.refresh()

    def _paint(self) -> None:
        if self._file.isatty() and not is_ours(self._file):
            self._is_moved = True  # another program has the terminal now
            return
        width, height = self._console.size
        begin = self._to_top()
        if self._is_moved or (self._frame and self._size != (width, height)):
            begin, self._is_moved = _HOME + _CLEAR_BELOW, False
        self._size = (width, height)
        paper = Console(
            file=io.StringIO(),
            force_terminal=True,
            color_system=self._console.color_system,  # type: ignore[arg-type]
            width=width,
            height=height,
            legacy_windows=False,
        )
        with paper.capture() as page:
            paper.print(self._draw(width, height), end="")
        lines = page.get().rstrip("\n").split("\n")[: max(height - 1, 1)]
        self._frame = [f"{line}{_CLEAR_LINE}\r\n" for line in lines]
        self._write(begin + "".join(self._frame) + _CLEAR_BELOW)

    def _to_top(self) -> str:
        return _TO_COLUMN_1 + (_UP.format(len(self._frame)) if self._frame else "")

    def _write(self, text: str) -> None:
        # A terminal that is gone, or that will not take more, must not end a run.
        with contextlib.suppress(OSError, ValueError, RuntimeError):  # the last: a handler of signals met a write
            self._file.write(text)
            self._file.flush()

    def _silence(self) -> None:
        """Switch the echo of what is typed off, if this is the program that is typed to."""
        with contextlib.suppress(OSError, ValueError, termios.error):
            if is_ours(sys.stdin):
                self._echo = sys.stdin.fileno(), _without_echo(sys.stdin.fileno())

    def _resumed(self, number: int, frame: FrameType | None) -> None:
        """Note that the program was stopped meanwhile, and another one wrote to the terminal."""
        self._is_moved = True
        if callable(self._on_resumed):
            self._on_resumed(number, frame)


class _Above(io.TextIOBase):
    """Stands in for stdout and stderr: what libraries print goes above the frame, line by line."""

    def __init__(self, screen: Screen, stream: TextIO) -> None:
        super().__init__()
        self._screen, self._stream, self._rest = screen, stream, ""

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """As that of the stream it stands for."""
        return self._stream.encoding

    def write(self, text: str) -> int:
        """Write the lines that are whole; the rest waits for its end."""
        *lines, self._rest = (self._rest + text).split("\n")
        if lines:
            self._screen.print_above("".join(f"{line}\r\n" for line in lines))
        return len(text)

    def flush(self) -> None:
        """Write a rest when the screen is given back; until then it waits for its line to end."""
        if self._rest and not self._screen.is_started:
            self._stream.write(self._rest + "\n")
            self._rest = ""

    def fileno(self) -> int:
        """Return the terminal's own, for programs that are started."""
        return self._stream.fileno()

    def isatty(self) -> bool:
        """As the stream it stands for."""
        return self._stream.isatty()


def is_ours(file: IO[str]) -> bool:
    """Whether a file is a terminal with this program in the foreground."""
    try:
        if not os.isatty(file.fileno()):
            return False
    except (OSError, ValueError):
        return False
    try:
        # 0 is a program that this container cannot see.
        return os.tcgetpgrp(file.fileno()) in (0, os.getpgrp())
    except OSError:
        return True  # no terminal of this session: nobody else is in front


def _without_echo(descriptor: int) -> Any:
    """Switch echo off, and return the settings to go back to."""
    before = termios.tcgetattr(descriptor)
    now = termios.tcgetattr(descriptor)
    now[3] &= ~termios.ECHO
    termios.tcsetattr(descriptor, termios.TCSANOW, now)
    return before


def _set_echo(descriptor: int, settings: Any) -> None:
    # From the background this would stop the program instead; the shell has its own settings then.
    with contextlib.suppress(OSError, termios.error):
        if os.tcgetpgrp(descriptor) in (0, os.getpgrp()):
            termios.tcsetattr(descriptor, termios.TCSANOW, settings)


def can_redraw(console: Console, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether a person looks at a terminal whose lines can be overwritten.

    A variable that asks for colours makes no terminal of a pipe. A job in the background has a terminal, but another
    program draws on it. A notebook gives its `!` commands a terminal that prints what is redrawn line after line, codes
    included; each Jupyter kernel sets one of these variables for the commands that it runs.
    """
    in_notebook = environment.get("MPLBACKEND", "").startswith("module://matplotlib_inline") or any(
        name in environment for name in ("JPY_PARENT_PID", "COLAB_RELEASE_TAG")
    )
    is_able = console.is_terminal and not console.is_dumb_terminal and console.encoding.startswith("utf")
    return is_able and is_ours(console.file) and not in_notebook
