"""The two tiers of this machine: bubblewrap, and Landlock with seccomp. In both `inside.py` forks for each program.

Owns: how many servers there are, and when they end; and which system calls a program may make, the filter that the
kernel applies to each (seccomp). It names what is allowed: a list of what is refused would miss the next way out, as
kernels gain system calls, and Landlock learned of some (`truncate`) years after the others. A program is one process:
seccomp lets it start threads only, so that its end is the end of all that it did.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import platform
import shutil
import socket
import struct
import subprocess
import sys
import sysconfig
import weakref
from collections.abc import Sequence
from pathlib import Path

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
    """The servers of a tier, each for one program at a time; there are as many as programs have run at once."""

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


_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Column of the tables, and the kernel's number of the architecture."""

_ALLOWED = [
    entry.strip()
    for line in Path(__file__).with_name("system_calls.txt").read_text().splitlines()
    if not line.startswith("#")
    for entry in line.split(",")
    if entry.strip()
]
_ALL_BITS = 0xFFFFFFFF
_READ_OR_WRITE = (0, 1, 2, 0x201, 0x202)
_THREAD = 0x3D0F00
_CONDITIONS = {
    # `name x86_64 aarch64`: of each argument its place, the bits that are looked at, and the values that they may have.
    # Access mode 3 opens a file for neither reading nor writing, and O_TRUNC empties what is opened for reading:
    # Landlock of kernels before 6.2 asks no right for either.
    "open 2 -": ((1, 0x203, _READ_OR_WRITE),),
    "openat 257 56": ((2, 0x203, _READ_OR_WRITE),),
    # Of streams, which asyncio wakes up by. A pair of datagrams can be sent from to any address.
    "socketpair 53 199": ((0, _ALL_BITS, (1,)), (1, 0xF, (1,))),
    # Copies, flags and locks of descriptors; not who is signalled (F_SETOWN), nor leases.
    "fcntl 72 25": ((1, _ALL_BITS, (0, 1, 2, 3, 4, 5, 6, 7, 1030, 1031, 1032)),),
    # Whether it is a terminal and how wide, bytes that wait, and flags of descriptors.
    "ioctl 16 29": ((1, _ALL_BITS, (0x5401, 0x802C542A, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)),),
    "prctl 157 167": ((0, _ALL_BITS, (15, 16)),),  # the name of a thread
    "prlimit64 302 261": ((0, _ALL_BITS, (0,)),),  # of this process
    "clone 56 220": ((0, _ALL_BITS & ~0x400000, (_THREAD,)),),  # the flags of every C library's threads
}
"""System calls that are allowed for some arguments."""
_FIRST_NEW = 424
"""Newer calls are answered as by a kernel without them (ENOSYS), so C libraries take older ones: clone3, openat2."""
_ALLOW, _WATCH, _EPERM, _ENOSYS, _KILL = 0x7FFF0000, 0x7FC00000, 0x00050001, 0x00050026, 0x80000000
_LOAD, _AND, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x06


def call_filter() -> bytes:
    """Return the filter that allows what a program needs, and refuses everything else.

    Raises:
        SandboxError: the numbers of this machine's system calls are not known.
    """
    column, program = _opening()
    for name, conditions in _CONDITIONS.items():
        if (number := _number(name, column)) is not None:
            checked = b"".join(_one_of(place, bits, values) for place, bits, values in conditions)
            program += _only(number, checked + _instruction(_RETURN, _ALLOW))
    for name in _ALLOWED:
        if (number := _number(name, column)) is not None:
            program += _only(number, _instruction(_RETURN, _ALLOW))
    program += _instruction(_AT_LEAST, _FIRST_NEW, 0, 1) + _instruction(_RETURN, _ENOSYS)
    return program + _instruction(_RETURN, _EPERM)


def thread_watch() -> bytes:
    """Return a filter that asks another process before a thread is started; `call_filter` comes on top.

    Raises:
        SandboxError: as above.
    """
    column, program = _opening()
    clone = next(name for name in _CONDITIONS if name.startswith("clone "))
    number = _number(clone, column)
    assert number is not None
    flags = _instruction(_LOAD, 16) + _only(_THREAD, _instruction(_RETURN, _WATCH)) + _instruction(_RETURN, _ALLOW)
    return program + _only(number, flags) + _instruction(_RETURN, _ALLOW)


def _number(entry: str, column: int) -> int | None:
    number = entry.split()[1 + column]
    return None if number == "-" else int(number)


def _opening() -> tuple[int, bytes]:
    """Return the column of this machine, and a filter that ends a process which makes calls of another architecture."""
    if platform.machine() not in _MACHINES:
        raise SandboxError(f"system calls of {platform.machine()} are not known, only of {' and '.join(_MACHINES)}")
    column, machine = _MACHINES[platform.machine()]
    program = _instruction(_LOAD, 4) + _instruction(_EQUAL, machine, 1, 0) + _instruction(_RETURN, _KILL)
    program += _instruction(_LOAD, 0) + _instruction(_AT_LEAST, 0x40000000, 0, 1) + _instruction(_RETURN, _KILL)
    return column, program


def _only(number: int, then: bytes) -> bytes:
    """Return what runs instructions for a call of this number only."""
    return _instruction(_EQUAL, number, 0, len(then) // 8) + then


def _one_of(place: int, bits: int, values: tuple[int, ...]) -> bytes:
    """Return what refuses a call unless these bits of an argument are one of the values."""
    program = _instruction(_LOAD, 16 + 8 * place) + _instruction(_AND, bits)
    for left, value in zip(range(len(values), 0, -1), values, strict=True):
        program += _instruction(_EQUAL, value, left, 0)
    return program + _instruction(_RETURN, _EPERM)


def _instruction(code: int, k: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """Return an instruction of the kernel's packet filter."""
    return struct.pack("=HBBI", code, if_true, if_false, k)
