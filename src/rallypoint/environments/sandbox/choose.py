"""Which sandbox a machine has: each tier is tried by running, in it, a program that tries to get out.

That a tool is installed says little: containers forbid namespaces in several ways, kernels lack Landlock. So a tier
is used only if a program could run in it, and everything that must fail there did.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from rallypoint.environments.sandbox.local import Bubblewrap, Interpreter, Landlock
from rallypoint.environments.sandbox.program import Limits, Sandbox, SandboxError
from rallypoint.environments.sandbox.remote import Remote

_PROBE = """
import contextlib, ctypes, errno, json, os, signal, socket, sys

def network(): socket.socket().connect(("127.0.0.1", 9))
def datagrams(): socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)  # these could be sent to any address
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

for empty in (lambda: os.truncate(KEPT, 0), lambda: os.open(KEPT, os.O_TRUNC), lambda: os.open(KEPT, 3 | os.O_TRUNC)):
    with contextlib.suppress(OSError): empty()

escaped = []
def programs(): os.execv(sys.executable, [sys.executable, "-c", f"print({json.dumps([*escaped, 'programs'])!r})"])
for attempt in (network, datagrams, files, writing, processes, signals, memory, ptrace, environment, programs):
    try:
        attempt()
    except (OSError, MemoryError, AssertionError):
        continue
    escaped.append(attempt.__name__)
print(json.dumps(escaped))
"""


def probe(sandbox: Sandbox) -> str | None:
    """Say why a sandbox cannot be used; None if it runs programs and holds them."""
    with tempfile.NamedTemporaryFile() as kept:
        kept.write(b"kept")
        kept.flush()
        Path(kept.name).chmod(0o666)  # so that only the sandbox keeps a program from it
        program = f"KEPT = {kept.name!r}\n{_PROBE}"
        try:
            ran = sandbox.run(program, limits=Limits(time_s=20.0, memory_mib=256))
        except SandboxError as error:
            return str(error)
        is_kept = Path(kept.name).read_bytes() == b"kept"
    if ran.status != "ok":
        return f"a program could not be run: {ran.status}, {ran.stderr.strip()[-300:]}"
    escaped = [*json.loads(ran.stdout), *([] if is_kept else ["truncation"])]
    return f"it does not hold {', '.join(escaped)}" if escaped else None


def local_tiers(platform: str = sys.platform) -> Iterator[Sandbox]:
    """Yield what may work on this machine, the best first; nothing where the kernel is another than Linux."""
    if platform != "linux":
        return
    interpreters = [one for one in (Interpreter.ours(), Interpreter.system()) if one is not None]
    if program := shutil.which("bwrap"):
        yield from (Bubblewrap(program, one) for one in interpreters)
    users = [65534, None] if os.geteuid() == 0 else [None]
    yield from (Landlock(one, user) for user in users for one in interpreters)


@functools.cache
def open_sandbox(url: str | None = None, key: str | None = None) -> Sandbox:
    """Return a sandbox that was tried and holds; the one of a URL if there is one. Found once a process.

    Args:
        url: of a service that speaks SandboxFusion's protocol.
        key: environment variable that holds its API key.

    Raises:
        SandboxError: none works, with what to install.
    """
    if url is None:
        return first_that_holds(local_tiers())
    if key is not None and not os.environ.get(key):
        raise SandboxError(f"the environment variable {key} is not set; it should hold the API key of {url}")
    remote = Remote(url, os.environ[key] if key else None)
    at_once = dataclasses.replace(remote, pauses_s=())
    ran = at_once.run("print(6 * 7)")  # it holds what it holds: only whether it runs programs can be seen from here
    if ran.stdout.strip() != "42":
        raise SandboxError(f"{url}: a program that prints 42 printed {ran.stdout[:100]!r} ({ran.status})")
    return remote


def first_that_holds(tiers: Iterable[Sandbox], platform: str = sys.platform) -> Sandbox:
    """Return the first of these that holds what is tried in it.

    Raises:
        SandboxError: none does, with what each lacks, and what to install.
    """
    problems: list[str] = []
    for tier in tiers:
        problem = probe(tier)
        if problem is None:
            return tier
        problems.append(f"  - {type(tier).__name__}: {problem}")
    if platform != "linux":
        problems.insert(0, f"  - Bubblewrap, Landlock: they need Linux, and this is {platform}")
    elif not shutil.which("bwrap"):
        problems.insert(0, "  - Bubblewrap: not installed")
    raise SandboxError(
        "model-written code is run in a sandbox only, and none works here. Install bubblewrap (apt install "
        "bubblewrap), use a kernel with Landlock (5.13 or newer), or name a service with SandboxFusion's protocol "
        "(parameters: {url: http://...}).\n" + "\n".join(problems)
    )
