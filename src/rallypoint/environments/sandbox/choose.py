"""Which sandbox a machine has: each tier is tried by running, in it, a program that tries to get out.

That a tool is installed says little: containers forbid namespaces in several ways, kernels lack Landlock. So a tier
is used only if a program could run in it, and everything that must fail there did.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
from collections.abc import Iterator

from rallypoint.environments.sandbox.local import Bubblewrap, Interpreter, Landlock
from rallypoint.environments.sandbox.program import Limits, Sandbox, SandboxError
from rallypoint.environments.sandbox.remote import Remote

_PROBE = """
import ctypes, errno, json, os, signal, socket, sys

def network(): socket.socket().connect(("127.0.0.1", 9))
def files(): open("/etc/passwd").close()
def writing(): open("/var/tmp/rallypoint-probe", "w").close()
def processes():
    if os.fork() == 0: os._exit(0)
def signals(): os.kill(os.getppid() or 1, 0)
def memory(): bytearray(2**31)
def ptrace():
    ctypes.CDLL(None, use_errno=True).ptrace(9999, os.getpid(), 0, 0)
    assert ctypes.get_errno() != errno.EPERM  # such a request does not exist: it was not refused as such
def environment(): assert os.environ or open("/proc/self/environ").read()

escaped = []
def programs(): os.execv(sys.executable, [sys.executable, "-c", f"print({json.dumps([*escaped, 'programs'])!r})"])
for attempt in (network, files, writing, processes, signals, memory, ptrace, environment, programs):
    try:
        attempt()
    except (OSError, MemoryError, AssertionError):
        continue
    escaped.append(attempt.__name__)
print(json.dumps(escaped))
"""


def probe(sandbox: Sandbox) -> str | None:
    """Say why a sandbox cannot be used; None if it runs programs and holds them."""
    try:
        ran = sandbox.run(_PROBE, limits=Limits(time_s=20.0, memory_mib=256))
    except SandboxError as error:
        return str(error)
    if ran.status != "ok":
        return f"a program could not be run: {ran.status}, {ran.stderr.strip()[-300:]}"
    escaped = json.loads(ran.stdout)
    return f"it does not hold {', '.join(escaped)}" if escaped else None


def local_tiers() -> Iterator[Sandbox]:
    """Yield what may work on this machine, the best first."""
    interpreters = [one for one in (Interpreter.ours(), Interpreter.system()) if one is not None]
    if program := shutil.which("bwrap"):
        yield from (Bubblewrap(program, one) for one in interpreters)
    users = [65534, None] if os.geteuid() == 0 else [None]
    yield from (Landlock(one, user) for user in users for one in interpreters)


@functools.cache
def open_sandbox(url: str | None = None) -> Sandbox:
    """Return a sandbox that was tried and holds; the one of a URL if there is one. Found once a process.

    Raises:
        SandboxError: none works, with what to install.
    """
    if url is not None:
        remote = Remote(url)
        ran = remote.run("print(6 * 7)")  # it holds what it holds: only whether it runs programs can be seen from here
        if ran.stdout.strip() != "42":
            raise SandboxError(f"{url}: a program that prints 42 printed {ran.stdout[:100]!r} ({ran.status})")
        return remote
    problems: list[str] = []
    for tier in local_tiers():
        problem = probe(tier)
        if problem is None:
            return tier
        problems.append(f"  - {type(tier).__name__}: {problem}")
    if not shutil.which("bwrap"):
        problems.insert(0, "  - Bubblewrap: not installed")
    raise SandboxError(
        "model-written code is run in a sandbox only, and none works here. Install bubblewrap (apt install "
        "bubblewrap), use a kernel with Landlock (5.13 or newer), or name a service with SandboxFusion's protocol "
        "(parameters: {url: http://...}).\n" + "\n".join(problems)
    )
