"""A process that scores, or runs an agent, as the driver sees it: started, asked, ended at a deadline.

Owns: the process, its connection and its end. `worker.py` is the program in it.

A process begins anew from an interpreter of its own (no fork of the driver): it holds none of its descriptors, so
neither the run's lock nor a socket. It is the leader of a session, so that Ctrl-C in the terminal does not reach it,
and it is ended with all that it has started.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pickle
import re
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Generic

from rallypoint.environments.outcome import is_ours
from rallypoint.environments.reward import Wants
from rallypoint.environments.worker import DUMP_SIGNAL, CallT, Effort, OutcomeT, WorkerTask
from rallypoint.errors import RewardError

_LOAD_TIMEOUT_S = 120.0
"""Seconds that importing a user's file may take; large libraries take tens of them on a cold disk."""
GRACE_S = 0.5
"""Seconds by which a process is ended later than its deadline, at which an async function is cancelled."""
_STALL_S = 10
"""Seconds that an answer may stand still when a part of it has come, and that one who hangs may take to say where."""
_MOST_BYTES = 2**28
"""Bytes of the largest answer."""
_LOOK_S = 0.1
"""Seconds between two looks whether a process that says nothing is there at all."""


class Child(Generic[CallT, OutcomeT]):
    """One process, and the driver's end of its connection. Only one thread at a time uses it; any may `kill` it."""

    def __init__(self, work: WorkerTask[CallT, OutcomeT], log: Path | None) -> None:
        """Start it; `load` comes next."""
        self._work, self._num_calls = work, 0
        self.wants = Wants()
        """What the function is called with; known once it was loaded."""
        self._dump = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `end`
        ours, theirs = socket.socketpair()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", _STALL_S, 0))
        with theirs, contextlib.nullcontext(2) if log is None else log.open("ab") as output:
            self._process = subprocess.Popen(
                _command(theirs.fileno(), self._dump.fileno()),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(theirs.fileno(), self._dump.fileno()),
                start_new_session=True,
            )
        self._channel = Connection(ours.detach())

    def load(self) -> None:
        """Wait until it has imported the file.

        Raises:
            RewardError: it could not, and has ended.
        """
        spec = self._work.spec
        try:
            self._channel.send_bytes(pickle.dumps(self._work))
            answer = self._receive(_LOAD_TIMEOUT_S)
        except (EOFError, OSError):
            died = self._death()
            raise RewardError(f"{spec} was not imported: its process {died}\n{self.end()}".rstrip()) from None
        if answer is None:
            where = self._where()
            self.end()
            raise RewardError(f"{spec} was not imported within {_LOAD_TIMEOUT_S:g} s\n{where}".rstrip())
        loaded = json.loads(answer)
        if "problem" in loaded:
            self.end()
            raise RewardError(loaded["problem"])
        self.wants = Wants(loaded["scope"], tuple(loaded["more"]))

    @property
    def is_alive(self) -> bool:
        """Whether there is a process."""
        return self._process.returncode is None

    @property
    def may_be_asked(self) -> bool:
        """Whether it can be asked again, and was not asked as often as it may be."""
        return self.is_alive and (self._work.max_calls is None or self._num_calls < self._work.max_calls)

    def ask(self, calls: Sequence[CallT]) -> tuple[list[OutcomeT], Effort | None]:
        """Return what became of calls that the function is given at once, and what that took.

        After a crash or a timeout it has ended, and what it took is None.
        """
        self._num_calls += 1
        try:
            self._channel.send_bytes(pickle.dumps(calls))
            answer = self._receive(self._work.timeout_s + GRACE_S)
        except (EOFError, OSError):
            return self._ended(self._death(), calls)
        if answer is None:
            where = self._where()
            self.end()
            return [self._work.timed_out(where)] * len(calls), None
        try:
            told = json.loads(answer)
            answered = zip(calls, told["outcomes"], strict=True)
            return [self._work.read(each) for _, each in answered], Effort(**told["effort"])
        except (ValueError, TypeError, KeyError, AttributeError):  # it may write to its connection, or change `json`
            return self._ended("gave no answer", calls)

    def _ended(self, how: str, calls: Sequence[CallT]) -> tuple[list[OutcomeT], None]:
        return [self._work.ended(f"the process of {self._work.WHOSE} {how}", self.end())] * len(calls), None

    def end(self) -> str:
        """End the process and what it has started; return where it was when it died of a fatal signal."""
        self._kill_group()
        self._process.wait()
        told = self._told()
        self._channel.close()
        self._dump.close()
        return told

    def kill(self) -> None:
        """End the process and what it has started, unless it has ended already."""
        if self.is_alive:
            self._kill_group()

    def _receive(self, timeout_s: float) -> bytes | None:
        """Return what it says, None if it says nothing in time.

        Raises:
            EOFError: the process has ended.
            OSError: what comes is no answer, or stops in the middle.
        """
        deadline = time.monotonic() + timeout_s
        while not self._channel.poll(max(0.0, min(_LOOK_S, deadline - time.monotonic()))):
            # What the function has forked may hold the connection open.
            if self._process.poll() is not None and not self._channel.poll():
                raise EOFError
            if time.monotonic() >= deadline:
                return None
        return self._channel.recv_bytes(_MOST_BYTES)

    def _death(self) -> str:
        """Say how a process ended that has closed its connection."""
        try:
            status = self._process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            return "closed its connection to the driver"
        if status >= 0:
            return f"ended with status {status}, as by os._exit"
        hint = ", perhaps because memory ran out" if -status == signal.SIGKILL else ""
        return f"was ended by signal {-status}, {signal.strsignal(-status)}{hint}"

    def _where(self) -> str:
        """Have a process that hangs say where it is."""
        give_up, told = time.monotonic() + _STALL_S, ""
        stopped = os.P_PID, self._process.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT
        self._process.send_signal(DUMP_SIGNAL)
        while time.monotonic() < give_up and os.waitid(*stopped) is None:
            time.sleep(_LOOK_S / 10)
            told, before = self._told(), told
            if told and told == before:
                break
        return told

    def _told(self) -> str:
        dump = os.pread(self._dump.fileno(), 2**16, 0).decode(errors="replace")
        return read_dump(dump)

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)


_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')


def read_dump(dump: str) -> str:
    r"""Return what faulthandler has written as a traceback of the user's frames, with their lines.

    >>> print(read_dump('Fatal Python error: Aborted\n\nCurrent thread 0x7f\n  File "a.py", line 2 in f\n'))
    Traceback (most recent call last):
      File "a.py", line 2, in f
    Fatal Python error: Aborted
    """
    frames = [traceback.FrameSummary(file, int(line), name) for file, line, name in _FRAME.findall(dump)][::-1]
    users = list(itertools.dropwhile(lambda frame: is_ours(frame.filename), frames))
    if not users:
        return ""
    lines = traceback.format_list(users)
    fatal = [line for line in dump.splitlines() if line.startswith("Fatal Python error")]
    return "\n".join(["Traceback (most recent call last):", "".join(lines).rstrip(), *fatal[:1]])


def _command(connection: int, dump: int) -> list[str]:
    """Return what starts `worker.main` with the driver's own search path, wherever that came from."""
    program = (
        f"import sys; sys.path[:] = {sys.path!r}; from rallypoint.environments.worker import main; "
        f"main({connection}, {dump}, {os.getpid()})"
    )
    return [sys.executable, "-u", "-P", "-c", program]
