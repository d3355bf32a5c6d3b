"""The two tiers of this machine: bubblewrap, and Landlock with seccomp. In both `inside.py` runs before the program.

Owns: how a sandboxed process is started, waited for and ended. A program is one process: seccomp lets it start threads
only, so that its end is the end of all that it did.
"""

from __future__ import annotations

import dataclasses
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from rallypoint.environments.sandbox.program import Limits, Ran, SandboxError

_NOBODY = 65534
_TEXT = Path(__file__).with_name("inside.py").read_text()
_SYSTEM = ("/usr/lib", "/usr/lib64", "/lib", "/lib64", "/usr/share/zoneinfo")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")
_REFUSED = "sandbox: "
"""How the message of `inside.py` begins where the kernel refused a step."""


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
        """Return the system's, which another user can run where ours lies in somebody's home; None without one."""
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
        command = [self.program, "--unshare-all", "--unshare-user", "--die-with-parent", "--clearenv"]
        command += ["--uid", str(_NOBODY), "--gid", str(_NOBODY)]
        for path in dict.fromkeys((*_SYSTEM, *self.interpreter.readable)):
            command += ["--ro-bind-try", path, path]
        for device in _DEVICES:
            command += ["--dev-bind", device, device]
        command += ["--size", str(limits.files_mib << 20), "--tmpfs", "/tmp", "--remount-ro", "/", "--chdir", "/tmp"]
        return _run([*command, self.interpreter.path], code, stdin, limits, readable=(), user=None)


@dataclasses.dataclass(frozen=True, slots=True)
class Landlock:
    """Rights that the kernel takes from a process: Landlock for files, seccomp for calls, limits, another user."""

    interpreter: Interpreter
    user: int | None
    """Whose rights it has; None for this user's."""

    @property
    def name(self) -> str:
        """See `Sandbox.name`."""
        user = f"user {self.user}" if self.user is not None else "this user, as it cannot become another"
        return f"Landlock with seccomp ({user}): no network, one process, no file can be written"

    def run(self, code: str, *, stdin: str = "", limits: Limits = Limits()) -> Ran:  # noqa: B008 - frozen
        """See `Sandbox.run`."""
        readable = (*_SYSTEM, *self.interpreter.readable, *_DEVICES)
        return _run([self.interpreter.path], code, stdin, limits, readable=readable, user=self.user)


def _run(
    command: Sequence[str], code: str, stdin: str, limits: Limits, *, readable: Sequence[str], user: int | None
) -> Ran:
    """Start a process, wait for it, and end it at its deadline. Nothing that it leaves open keeps us waiting.

    What it writes goes to files in memory whose size the kernel limits, so nobody has to read it meanwhile.
    """
    # As its parent it sees bubblewrap's own first process, and another than this one.
    parent = os.getpid() if readable else 0
    job = dataclasses.asdict(limits) | {"code": code, "readable": list(readable), "parent": parent}
    files = [_memory(json.dumps(job)), _memory(stdin), _memory(""), _memory("")]
    try:
        told, given, out, err = files
        process = subprocess.Popen(
            [*command, "-I", "-S", "-c", _TEXT, str(told)],
            stdin=given,
            stdout=out,
            stderr=err,
            pass_fds=[told],
            env={},
            cwd="/",
            user=user,
            group=user,
            extra_groups=None if user is None else [],
        )
        status = _wait(process, limits.time_s)
        stdout, stderr = (_read(file, limits.output_kib << 10) for file in (out, err))
    except OSError as error:
        raise SandboxError(f"{command[0]} could not be started: {error}") from None
    finally:
        for file in files:
            os.close(file)
    if stderr.startswith(_REFUSED) or (status and stderr.startswith("bwrap: ")):
        raise SandboxError(stderr.strip().splitlines()[0])
    return Ran("timeout" if status is None else "failed" if status else "ok", stdout, stderr, status)


def _wait(process: subprocess.Popen[bytes], time_s: float) -> int | None:
    """Return the status of a process, or None if it had to be ended."""
    waiting = os.pidfd_open(process.pid)
    try:
        has_ended = bool(select.select([waiting], [], [], time_s)[0])
        if not has_ended:
            process.send_signal(signal.SIGKILL)
        process.wait()
    finally:
        os.close(waiting)
    return process.returncode if has_ended else None


def _memory(text: str) -> int:
    """Return a descriptor of a file in memory that holds a text."""
    opened = os.memfd_create("rallypoint")
    content = memoryview(text.encode(errors="surrogatepass"))
    while content:
        content = content[os.write(opened, content) :]
    os.lseek(opened, 0, os.SEEK_SET)
    return opened


def _read(file: int, num_bytes: int) -> str:
    return os.pread(file, num_bytes, 0).decode(errors="replace")
