"""Who may end a run, which saves its state first: Ctrl-C and other signals, a thread, a user's callback."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping
from types import FrameType
from typing import NoReturn, TypeAlias, TypeVar

ResultT = TypeVar("ResultT")
_Handler: TypeAlias = Callable[[int, FrameType | None], object]

NOTICE = "SIGTERM"
"""The signal of a scheduler, after which it kills."""
_SIGNALS = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: NOTICE, signal.SIGHUP: "SIGHUP"}
"""Signals that ask a run to end, in a user's words: from a person, a scheduler, a closed terminal."""
_SHOW_CURSOR = "\x1b[?25h"


class Observer:
    """Hears of each step, and may end the run; `rally.train` overrides `after_step`.

    `ask` may be called from any thread and at any time, also before the run has begun or after it has ended.
    """

    owns_process = True
    """Whether a second signal may end the process without unwinding, as the command's; in a program it raises."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ways: list[Callable[[], object]] = []
        self._num_asked = 0

    def after_step(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Receive a step with all its metrics; return whether to save the run and end it."""
        del step, metrics
        return False

    def ask(self) -> None:
        """Let the run save its state and end; a second time, end it at its next wait, without saving."""
        with self._lock:
            self._num_asked += 1
            if self._ways:
                self._ways[min(self._num_asked, 2) - 1]()

    @contextlib.contextmanager
    def ending(self, gently: Callable[[], None]) -> Iterator[None]:
        """Let `ask` reach the task and the event loop that this block is part of."""
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None, "a run is a task of its loop"
        with self._lock:
            self._ways = [lambda: loop.call_soon_threadsafe(gently), lambda: loop.call_soon_threadsafe(task.cancel)]
            if self._num_asked:
                gently()
        try:
            yield
        finally:
            with self._lock:
                self._ways = []


@contextlib.contextmanager
def interruptible(
    first: Callable[[str], None],
    second: Callable[[], str],
    at_once: Callable[[], None] = lambda: None,
    observer: Observer | None = None,
) -> Iterator[asyncio.Event]:
    """Yield an event that the first such signal sets; the second ends the run at once, whatever it is doing.

    In a process of ours the second one ends the process. In a user's program it raises: KeyboardInterrupt for Ctrl-C,
    SystemExit for the others.

    They are caught by the process and not by the event loop, so that the second one works while something blocks the
    loop. Python looks at signals between its own instructions: only a call that never comes back from C is not left.

    Args:
        first: called in the event loop with the signal's name when the first has come.
        second: returns the line to end with when another one comes: what is lost.
        at_once: called in the handler of the first signal, while the event loop may be blocked; only sets a flag.
        observer: asks for the same where another thread handles signals, and says whose the process is.
    """
    event, loop = asyncio.Event(), asyncio.get_running_loop()
    terminals = [descriptor for descriptor in (0, 1, 2) if os.isatty(descriptor)]
    asked = False

    def begin(name: str) -> None:
        event.set()
        first(name)

    def handle(number: int, _frame: FrameType | None) -> None:
        nonlocal asked
        if number == signal.SIGHUP:
            _let_go(terminals)
        if asked:
            line = second()
            if observer is None or observer.owns_process:
                _end(number, line, is_terminal=bool(terminals))
            raise KeyboardInterrupt(line) if number == signal.SIGINT else SystemExit(128 + number)
        asked = True
        at_once()
        loop.call_soon_threadsafe(begin, _SIGNALS[signal.Signals(number)])

    if threading.current_thread() is not threading.main_thread():
        with observer.ending(lambda: begin("interrupt")) if observer else contextlib.nullcontext():
            yield event  # the main thread handles signals
        return
    with _caught(handle):
        yield event


@contextlib.contextmanager
def acknowledging(say: Callable[[str], None], otherwise: _Handler | None = None) -> Iterator[None]:
    """Say at once that a signal was heard while a run starts or ends, and leave it to who handles Ctrl-C already.

    That is asyncio, which ends the run at the next `await`; while Ray starts there is none for seconds.

    Args:
        say: called with a line.
        otherwise: handles signals where nobody handles Ctrl-C: shells ignore it for what they start with `&`.
    """
    found = signal.getsignal(signal.SIGINT)
    heard = found if callable(found) else otherwise
    line = "interrupted: what was started is ended; once more ends it at once"
    if threading.current_thread() is not threading.main_thread() or heard is None:
        try:
            yield
        except asyncio.CancelledError:  # by a notebook, whose run has a thread
            say(line)
            raise
        return
    saying: list[threading.Thread] = []
    terminals = [descriptor for descriptor in (0, 1, 2) if os.isatty(descriptor)]

    def handle(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            _let_go(terminals)
        if not saying:  # in a thread, because this one may hold what saying takes
            saying.append(threading.Thread(target=say, args=(line,), daemon=True))
            saying[0].start()
        heard(signal.SIGINT, frame)

    with _caught(handle):
        try:
            yield
        finally:
            for thread in saying:
                thread.join()


async def acknowledged(work: Coroutine[None, None, ResultT], say: Callable[[str], None]) -> ResultT:
    """Do some work, see `acknowledging`; the first signal cancels it.

    Raises:
        KeyboardInterrupt: there was a signal.
    """
    task, loop, is_asked = asyncio.current_task(), asyncio.get_running_loop(), False
    assert task is not None

    def end(_number: int, _frame: FrameType | None) -> None:
        nonlocal is_asked
        if is_asked:
            raise KeyboardInterrupt
        is_asked = True
        loop.call_soon_threadsafe(task.cancel)

    with acknowledging(say, end):
        try:
            return await work
        except asyncio.CancelledError:
            if is_asked:
                raise KeyboardInterrupt from None
            raise


@contextlib.contextmanager
def _caught(handle: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Have the signals that ask a run to end handled."""
    # nohup ignores SIGHUP on its user's behalf.
    caught = [n for n in _SIGNALS if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]
    before = {number: signal.signal(number, handle) for number in caught}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _let_go(terminals: list[int]) -> None:
    """Discard output for a terminal that is gone: an error there must not keep a run from saving."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in terminals:
        os.dup2(nowhere, descriptor)
    os.close(nowhere)


def _end(number: int, line: str, *, is_terminal: bool) -> NoReturn:
    """End without unwinding, which may take long or hang; helper processes notice the end and clean up."""
    text = f"{_SHOW_CURSOR if is_terminal else ''}\n{line}\n".encode(errors="replace")
    with contextlib.suppress(OSError):
        os.write(sys.__stderr__.fileno() if sys.__stderr__ is not None else 2, text)
    os._exit(128 + number)
