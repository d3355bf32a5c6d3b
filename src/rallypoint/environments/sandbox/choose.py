"""Which sandbox a machine has: each tier is tried by running, in it, a program that tries to get out.

That a tool is installed says little: containers forbid namespaces in several ways, kernels lack Landlock. So a tier
is used only if a program could run in it, and everything that must fail there did. One behind a URL is used if it runs
programs.
"""

from __future__ import annotations

import dataclasses
import functools
import http.client
import json
import os
import shutil
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from rallypoint.environments.exchange import MOST_MIB, ask
from rallypoint.environments.sandbox.local import Bubblewrap, Interpreter, Landlock
from rallypoint.environments.sandbox.program import Limits, Ran, Sandbox, SandboxError

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


_MAY_PASS = {429, 500, 502, 503, 504}
"""Statuses of a service that is busy or being restarted."""


@dataclasses.dataclass(frozen=True, slots=True)
class Remote:
    """A service that runs programs; it has its own limits of files, and says itself which other limits it keeps."""

    url: str
    api_key: str | None = dataclasses.field(default=None, repr=False)
    pauses_s: tuple[float, ...] = (0.5, 2.0)
    """Seconds before each further attempt, where the service is busy or gone."""
    sleep: Callable[[float], None] = time.sleep

    @property
    def name(self) -> str:
        """See `Sandbox.name`."""
        return f"remote, {self.url}"

    def run(self, code: str, *, stdin: str = "", limits: Limits = Limits()) -> Ran:  # noqa: B008 - frozen
        """See `Sandbox.run`."""
        asked = {"code": code, "stdin": stdin, "language": "python", "run_timeout": limits.time_s}
        asked["memory_limit_MB"] = limits.memory_mib
        headers = {"Content-Type": "application/json"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        request = urllib.request.Request(f"{self.url.rstrip('/')}/run_code", json.dumps(asked).encode(), headers)
        for pause_s in (*self.pauses_s, None):
            try:
                most_mib = MOST_MIB + (limits.output_kib >> 7)  # both outputs, and four bytes a character
                return _ran(ask(request, limits.start_s + limits.time_s, most_mib), limits)
            except (OSError, http.client.HTTPException, ValueError, TypeError, AttributeError) as error:
                if pause_s is None or not _may_pass(error):
                    raise SandboxError(f"{self.url}: {error}") from None
            self.sleep(pause_s)
        raise AssertionError("the last attempt returns or raises")


def _may_pass(error: Exception) -> bool:
    """Whether another attempt may end otherwise, and soon."""
    if isinstance(error, urllib.error.HTTPError):
        return error.code in _MAY_PASS
    cause = error.reason if isinstance(error, urllib.error.URLError) else error
    return isinstance(cause, OSError | http.client.HTTPException) and not isinstance(cause, TimeoutError)


def _ran(answer: Any, limits: Limits) -> Ran:
    result = answer.get("run_result")
    if answer.get("status") == "SandboxError" or not result:
        raise ValueError(f"the service failed: {answer.get('message') or answer}"[:300])
    stdout, stderr = ((result.get(name) or "")[: limits.output_kib << 10] for name in ("stdout", "stderr"))
    took_s = float(result.get("execution_time") or 0.0)
    if result.get("status") == "TimeLimitExceeded":
        return Ran("timeout", stdout, stderr, None, took_s)
    status = result.get("return_code")
    return Ran("ok" if status == 0 else "failed", stdout, stderr, status, took_s)
