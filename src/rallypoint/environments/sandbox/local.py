"""The two tiers of this machine: bubblewrap, and Landlock with seccomp. In both `inside.py` forks for each program.

Owns: how many servers there are, and when they end. A program is one process: seccomp lets it start threads only, so
that its end is the end of all that it did.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import weakref
from collections.abc import Sequence
from pathlib import Path

from rallypoint.environments.sandbox.calls import call_filter, thread_watch
from rallypoint.environments.sandbox.program import Limits, Ran, SandboxError

_NOBODY = 65534
_TEXT = Path(__file__).with_name("inside.py").read_text()
_SYSTEM = ("/usr/lib", "/usr/lib64", "/lib", "/lib64", "/usr/share/zoneinfo")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")
_PATIENCE_S = 60.0
"""Seconds after a program's deadline in which its server must have ended it, on a busy machine."""
_LAST_WORDS_S = 5.0
"""Seconds that a server has to end by itself."""


@dataclasses.dataclass(frozen=True, slots=True)
class Interpreter:
    """A Python that a sandbox can run."""

    path: str
    readable: tuple[str, ...]
    """What it needs to read, besides the system's libraries."""

    @classmethod
    def ours(cls) -> Interpreter:
        """Return the one that runs this."""
        path = os.path.realpath(sys.executable)
        return cls(path, (path, os.path.realpath(sysconfig.get_path("stdlib")), f"{sys.base_prefix}/lib"))

    @classmethod
    def system(cls) -> Interpreter | None:
        """Return the system's Python, which other users can run even if ours is in a home directory; or None."""
        found = shutil.which("python3", path="/usr/bin")
        return None if found is None else cls(os.path.realpath(found), (os.path.realpath(found),))


@dataclasses.dataclass(frozen=True, slots=True)
class Bubblewrap:
    """A file system, processes and a network of its own, by namespaces (bubblewrap)."""

    program: str
    """Path of `bwrap`."""
    interpreter: Interpreter

    @property
    def name(self) -> str:
        """See `Sandbox.name`."""
        return "bubblewrap with seccomp: no network, one process, no files but its own"

    def run(self, code: str, *, stdin: str = "", limits: Limits = Limits()) -> Ran:  # noqa: B008 - frozen
        """See `Sandbox.run`."""
        command = [self.program, "--unshare-all", "--unshare-user", "--clearenv"]
        command += ["--uid", str(_NOBODY), "--gid", str(_NOBODY), "--cap-add", "CAP_SYS_ADMIN"]  # to mount each /tmp
        for path in dict.fromkeys((*_SYSTEM, *self.interpreter.readable)):
            command += ["--ro-bind-try", path, path]
        for device in _DEVICES:
            command += ["--dev-bind", device, device]
        command += ["--symlink", "/tmp/stdin", "/dev/stdin"]  # there is no /proc that it could lead to
        command += ["--dir", "/tmp", "--remount-ro", "/", self.interpreter.path]
        return _servers(tuple(command), (), None).run(code, stdin, limits)


@dataclasses.dataclass(frozen=True, slots=True)
class Landlock:
    """Rights that the kernel takes from a process: Landlock for files, seccomp for calls, limits, another user."""

    interpreter: Interpreter
    user: int | None
    """User whose rights it has; None for this one."""

    @property
    def name(self) -> str:
        """See `Sandbox.name`."""
        user = f"user {self.user}" if self.user is not None else "this user, as it cannot become another"
        return f"Landlock with seccomp ({user}): no network, one process, no file can be written"

    def run(self, code: str, *, stdin: str = "", limits: Limits = Limits()) -> Ran:  # noqa: B008 - frozen
        """See `Sandbox.run`."""
        readable = (*_SYSTEM, *self.interpreter.readable, *_DEVICES)
        return _servers((self.interpreter.path,), readable, self.user).run(code, stdin, limits)


class _Servers:
    """The servers of a tier, each for one program at a time: as many as programs have run at once."""

    def __init__(self, command: Sequence[str], readable: Sequence[str], user: int | None) -> None:
        self._start = functools.partial(_Server, command, readable, user)
        self._idle, self._owner = list[_Server](), os.getpid()

    def run(self, code: str, stdin: str, limits: Limits) -> Ran:
        """See `Sandbox.run`."""
        if self._owner != os.getpid():  # a fork: they are its parent's
            self._idle, self._owner = [], os.getpid()
        server = self._take()
        ran = server.run(code, stdin, limits)
        self._idle.append(server)  # and not after an error
        return ran

    def _take(self) -> _Server:
        with contextlib.suppress(IndexError):
            while True:
                if (server := self._idle.pop()).is_alive:
                    return server
        return self._start()


_servers = functools.cache(_Servers)


class _Server:
    """The process in which `inside.py` serves; it ends when the channel to it is closed."""

    def __init__(self, command: Sequence[str], readable: Sequence[str], user: int | None) -> None:
        filters = call_filter().hex(), thread_watch().hex()
        self._errors = _memory("")
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        arguments = [str(theirs.fileno()), "no" if readable else "yes", *filters, *readable]
        try:
            self._process = subprocess.Popen(
                [*command, "-I", "-S", "-c", _TEXT, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                pass_fds=[theirs.fileno()],
                env={},
                cwd="/",
                user=user,
                group=user,
                extra_groups=None if user is None else [],
                start_new_session=True,
            )
        except OSError as error:
            self._channel.close()
            os.close(self._errors)
            raise SandboxError(f"{command[0]} could not be started: {error}") from None
        finally:
            theirs.close()
        weakref.finalize(self, _close, self._channel, self._process, self._errors)

    @property
    def is_alive(self) -> bool:
        """Whether it still waits for programs."""
        return self._process.poll() is None

    def run(self, code: str, stdin: str, limits: Limits) -> Ran:
        """See `Sandbox.run`.

        What a program writes goes to files in memory whose size the kernel limits, so nobody has to read it meanwhile.
        """
        job = dataclasses.asdict(limits) | {"code": code}
        files = [_memory(json.dumps(job)), _memory(stdin), _memory(""), _memory("")]
        try:
            times_s = [limits.start_s, limits.time_s, limits.latest_s]
            socket.send_fds(self._channel, [json.dumps(times_s).encode()], files)
            self._channel.settimeout(limits.start_s + limits.latest_s + _PATIENCE_S)
            said = self._channel.recv(256)
            stdout, stderr = (_read(file, limits.output_kib << 10) for file in files[2:])
        except OSError as error:
            raise SandboxError(f"its server does not answer: {error}. {self._complaint}") from None
        finally:
            for file in files:
                os.close(file)
        if not said:
            raise SandboxError(self._complaint or "its server has ended")
        status, cpu_s, has_begun = json.loads(said)
        if not has_begun:
            late = f"a program could not be started in {limits.start_s:g} s: the machine is too busy"
            raise SandboxError(
                (stderr.strip().splitlines() or ["a program could not be started"])[-1] if status else late
            )
        return Ran("timeout" if status is None else "failed" if status else "ok", stdout, stderr, status, cpu_s)

    @property
    def _complaint(self) -> str:
        return _read(self._errors, 2000).strip()


def _close(channel: socket.socket, process: subprocess.Popen[bytes], errors: int) -> None:
    channel.close()
    os.close(errors)
    try:
        process.wait(_LAST_WORDS_S)
    except subprocess.TimeoutExpired:  # a fork of this process still has the channel
        process.kill()
        process.wait()


def _memory(text: str) -> int:
    """Return a descriptor of a file in memory that holds a text."""
    try:
        opened = os.memfd_create("rallypoint")
    except AttributeError:
        raise SandboxError("this Python has no files in memory (os.memfd_create): they need Linux") from None
    content = memoryview(text.encode(errors="surrogatepass"))
    while content:
        content = content[os.write(opened, content) :]
    os.lseek(opened, 0, os.SEEK_SET)
    return opened


def _read(file: int, num_bytes: int) -> str:
    return os.pread(file, num_bytes, 0).decode(errors="replace")
