"""What a machine is like for runs, a line each: versions, devices, disk, memory, limits, sandbox, engines.

Owns: what is looked at, and what is too little. Must not know: a config; `machine.py` compares one with the machine.
Nothing here raises, and no look takes longer than `PATIENCE_S`: all run at once, and one that has no answer by then, or
fails, is a finding itself. torch is not imported: its version and CUDA's stand in its files.

>>> check_all([("sky", lambda: Finding("ok", "sky", "blue")), ("well", lambda: 1 / 0)])
[Finding(level='ok', what='sky', said='blue', advice=''), \
Finding(level='note', what='well', said='cannot be looked at: ZeroDivisionError: division by zero', advice='')]
"""

from __future__ import annotations

import collections
import dataclasses
import importlib.util
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Literal, TypeAlias

from rallypoint.cluster.capacity import memory_bytes, num_cores
from rallypoint.config.sections.places import ClusterConfig
from rallypoint.environments.sandbox.choose import first_that_holds, local_tiers
from rallypoint.environments.sandbox.program import SandboxError
from rallypoint.errors import first_line, how_to_install
from rallypoint.install import BUILDS, installed_engines

Standing: TypeAlias = Literal["ok", "note", "fault"]
"""A fault keeps runs from working; a note may matter to some."""

PATIENCE_S = 4.0
"""Seconds for all looks together."""
_GIB = 2**30
_LEAST = {"torch": (2, 11), "transformers": (5, 0), "ray": (2, 60)}
"""First versions that work; the same as in pyproject.toml."""
_DRIVERS = {11: 450, 12: 525, 13: 580}
"""Major version of CUDA -> first driver that runs programs built for it."""
_OTHER_EXTRAS = {"ray", "dev", "docs"}
"""Extras that have a line of their own, and those of developers."""
_PROBE_BYTES = 8 * 2**20


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """One line."""

    level: Standing
    what: str
    said: str
    advice: str = ""
    """What to do; empty if nothing is to be done."""


Look: TypeAlias = tuple[str, Callable[[], Finding]]


def looks(folder: Path) -> list[Look]:
    """Return what is looked at, in the order of the lines.

    Args:
        folder: in which runs are to be made.
    """
    return [
        ("python", _python),
        *((name, lambda name=name: package(name)) for name in _LEAST),
        ("extras", _extras),
        ("devices", lambda: devices(ask_driver(), torch_cuda())),
        ("cores", lambda: cores(num_cores(), Path("/sys/fs/cgroup/cpu.max"))),
        ("memory", lambda: memory(memory_bytes(), Path("/proc/meminfo"))),
        ("shared memory", lambda: shared_memory(shutil.disk_usage("/dev/shm").free)),
        ("disk", lambda: disk(folder)),
        ("limits", lambda: limits(resource.getrlimit(resource.RLIMIT_NOFILE)[0])),
        ("ports", _ports),
        ("clock", lambda: clock(time.time, time.monotonic)),
        ("sandbox", _sandbox),
        ("engines", _engines),
    ]


def check_all(chosen: Sequence[Look], patience_s: float = PATIENCE_S) -> list[Finding]:
    """Look at all at once; a look that fails, or has no answer in time, becomes a note."""
    found, threads = dict[str, Finding](), list[threading.Thread]()

    def look(what: str, ask: Callable[[], Finding]) -> None:
        try:
            found[what] = ask()
        except Exception as error:  # noqa: BLE001 - machines fail in every way, and that is what is asked for
            found[what] = Finding("note", what, f"cannot be looked at: {type(error).__name__}: {first_line(error)}")

    until = time.monotonic() + patience_s
    for one in chosen:
        threads.append(threading.Thread(target=look, args=one, daemon=True))
        threads[-1].start()
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    late = f"no answer within {patience_s:g} s: the machine is busy, or it hangs"
    return [found.get(what) or Finding("note", what, late) for what, _ in chosen]


def _python() -> Finding:
    said = f"{platform.python_version()}, {sys.executable}, {platform.platform(terse=True)}"
    return Finding("ok", "python", said)


def package(name: str) -> Finding:
    """Say whether a package is there, and new enough."""
    wanted = ".".join(map(str, _LEAST[name]))
    found = _version_of(name)
    if found is None and name == "ray":
        advice = f"runs need cluster.runtime=inline without it; {how_to_install('ray')}"
        return Finding("note", name, "not installed", advice)
    if found is None:
        return Finding("fault", name, "not installed", f"pip install '{name}>={wanted}'")
    numbers = tuple(int(part) for part in re.findall(r"\d+", found)[:2])
    if numbers < _LEAST[name]:
        return Finding("fault", name, f"{found} is too old", f"pip install --upgrade '{name}>={wanted}'")
    return Finding("ok", name, found)


def _version_of(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _extras() -> Finding:
    needed = collections.defaultdict[str, list[str]](list)
    required = "\n".join(metadata.requires("rallypoint") or ())
    for name, extra in re.findall(r"^([\w.-]+).*extra == ['\"]([\w-]+)", required, re.M):
        if extra not in _OTHER_EXTRAS:
            needed[extra].append(name)
    there = [extra for extra, names in needed.items() if all(map(_version_of, names))]
    missing = [extra for extra in needed if extra not in there]
    said = f"{', '.join(there) or 'none'}" + (f"; not installed: {', '.join(missing)}" if missing else "")
    return Finding("ok", "extras", said)


@dataclasses.dataclass(frozen=True, slots=True)
class Driven:
    """The GPUs of a machine, as NVIDIA's driver tells."""

    gpus: tuple[tuple[str, int], ...]
    """Name and MiB of memory of each."""
    driver: str


def ask_driver() -> Driven | None:
    """Return what the driver tells; None if there is no GPU.

    Raises:
        OSError: there are GPUs, but the driver's program fails.
    """
    if not any(Path("/dev").glob("nvidia[0-9]*")):
        return None
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits"]
    told = subprocess.run(query, capture_output=True, text=True, timeout=PATIENCE_S, check=True).stdout
    rows = [[cell.strip() for cell in line.split(",")] for line in told.splitlines() if line.strip()]
    return Driven(tuple((name, int(mebibytes)) for name, mebibytes, _ in rows), rows[0][2])


def torch_cuda() -> str | None:
    """Return the version of CUDA that torch is built for; None if it is built without."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    found = re.search(r"^cuda[^=\n]*= *'([\d.]+)'", Path(spec.origin).with_name("version.py").read_text(), re.M)
    return found[1] if found else None


def devices(driven: Driven | None, cuda: str | None) -> Finding:
    """Say which GPUs there are, and whether driver and torch fit them.

    >>> devices(Driven((("H100", 81559),), "470.82.01"), "12.8").said
    'H100, 81559 MiB; driver 470.82.01; torch for CUDA 12.8'
    """
    if driven is None:
        return Finding("ok", "devices", "no GPU of NVIDIA: runs compute on the CPU (cluster.device=cpu)")
    gpus = "; ".join(f"{name}, {mebibytes} MiB" for name, mebibytes in driven.gpus)
    said = f"{gpus}; driver {driven.driver}; torch for {f'CUDA {cuda}' if cuda else 'the CPU'}"
    if cuda is None:
        return Finding("fault", "devices", said, "install a build of torch with CUDA: pip install torch")
    least = _DRIVERS.get(int(cuda.partition(".")[0]), 0)
    if int(driven.driver.partition(".")[0]) < least:
        advice = f"CUDA {cuda} needs driver {least} or newer: upgrade it, or install torch for an older CUDA"
        return Finding("fault", "devices", said, advice)
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden in ("", "-1"):
        return Finding("note", "devices", f"{said}; CUDA_VISIBLE_DEVICES={hidden!r} hides all", "unset it to use them")
    return Finding("ok", "devices", said)


def cores(found: int, quota_file: Path) -> Finding:
    """Compare the cores that this process sees with what its container may use."""
    text = quota_file.read_text().split() if quota_file.is_file() else ["max"]
    allowed = found if text[0] == "max" else int(text[0]) / int(text[1])
    if allowed < found:
        advice = "runs would start too many threads: set cluster.pools and cluster.num_cpus_per_process for fewer cores"
        return Finding("note", "cores", f"{found}, of which the container may use {allowed:g}", advice)
    return Finding("ok", "cores", str(found))


def memory(allowed: int, meminfo: Path) -> Finding:
    """Say how much memory this process may use, and how much of it is free."""
    found = re.search(r"^MemAvailable: *(\d+) kB", meminfo.read_text(), re.M) if meminfo.is_file() else None
    free = min(allowed, int(found[1]) * 1024) if found else allowed
    said = f"{gib(free)} of {gib(allowed)} are free"
    if free < 2 * _GIB:
        return Finding("fault", "memory", said, "a run needs about 2 GiB for its processes: end others, or take more")
    return Finding("ok", "memory", said)


def shared_memory(free: int) -> Finding:
    """Compare /dev/shm with what Ray's object store asks for."""
    wanted = ClusterConfig().object_store_gib * _GIB
    if free < wanted:
        advice = "Ray would use the disk instead: docker run --shm-size=2g, or lower cluster.object_store_gib"
        said = f"/dev/shm has {gib(free)} free, the object store takes {gib(wanted)}"
        return Finding("note", "shared memory", said, advice)
    return Finding("ok", "shared memory", f"/dev/shm has {gib(free)} free; the object store takes {gib(wanted)}")


def disk(folder: Path) -> Finding:
    """Say how much room a folder has, and how fast some MiB reach the disk."""
    there = next(one for one in (folder.absolute(), *folder.absolute().parents) if one.is_dir())
    free = shutil.disk_usage(there).free
    try:
        with tempfile.TemporaryFile(dir=there) as file:
            began = time.perf_counter()
            file.write(os.urandom(_PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
            speed = _PROBE_BYTES / 2**20 / (time.perf_counter() - began)
    except OSError as error:
        return Finding("fault", "disk", f"{there} cannot be written: {error.strerror}", "set trainer.runs_dir")
    said = f"{gib(free)} free in {there}, written at {speed:.0f} MiB/s"
    if free < 2 * _GIB:
        return Finding("fault", "disk", said, "make room, or set trainer.runs_dir: a run keeps 1 GiB free")
    if speed < 50:
        return Finding("note", "disk", said, "slow for checkpoints: set trainer.runs_dir to a local disk")
    return Finding("ok", "disk", said)


def limits(open_files: int) -> Finding:
    """Say how many files a process may open; Ray and many ranks need thousands."""
    said = f"{open_files} open files" if open_files != resource.RLIM_INFINITY else "any number of open files"
    if open_files != resource.RLIM_INFINITY and open_files < 1024:
        return Finding("note", "limits", said, "ulimit -n 65536: Ray opens hundreds of files a process")
    return Finding("ok", "limits", said)


def _ports() -> Finding:
    with socket.socket() as own:
        own.bind(("127.0.0.1", 0))
    taken = [port for port in (6379, 8265) if _answers(port)]
    if taken:
        said = f"a Ray cluster, or something else, answers at {', '.join(map(str, taken))}"
        return Finding("note", "ports", said, "runs start a cluster of their own; cluster.address=auto joins that one")
    return Finding("ok", "ports", "loopback works; no Ray cluster runs here")


def _answers(port: int) -> bool:
    with socket.socket() as asking:
        asking.settimeout(0.5)
        return asking.connect_ex(("127.0.0.1", port)) == 0


def clock(wall: Callable[[], float], steady: Callable[[], float], pause_s: float = 0.1) -> Finding:
    """Compare the clock that can be set with the one that only goes forward."""
    began, since = wall(), steady()
    time.sleep(pause_s)
    drift = (wall() - began) - (steady() - since)
    said = time.strftime("%Y-%m-%d %H:%M:%S %Z")
    if abs(drift) > 0.02:
        return Finding("note", "clock", f"{said}; it was set {drift:+.3f} s within {pause_s:g} s", "is it being set?")
    if wall() < 1.7e9:
        return Finding("fault", "clock", said, "certificates and keys fail in the past: set the clock (chrony, ntpd)")
    return Finding("ok", "clock", said)


def _sandbox() -> Finding:
    try:
        return Finding("ok", "sandbox", f"{first_that_holds(local_tiers()).name}, which was tried")
    except SandboxError as error:
        advice = "only rewards and tools that run model-written code need one: apt install bubblewrap"
        return Finding("note", "sandbox", "; ".join(line.strip("- ") for line in str(error).splitlines()[1:]), advice)


def _engines() -> Finding:
    found = {one.name: one for one in installed_engines()}
    there = [f"{name} {one.version} for {one.device}" for name, one in found.items()]
    missing = [name for name in BUILDS if name not in found]
    others = f"; not installed: {', '.join(missing)} (rally engine install NAME)" if missing else ""
    return Finding("ok", "engines", f"{', '.join(['native', *there])}{others}")


def gib(num_bytes: float) -> str:
    """Return bytes as people read them."""
    return f"{num_bytes / _GIB:.1f} GiB"
