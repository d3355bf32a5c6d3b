"""The inventory of this machine, or of one that is described: cores, memory, accelerators.

Owns: asking for them. Must not know: Ray, plans. A process of its own asks torch for accelerators, so that this one
never holds a context on a GPU that workers need.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from rallypoint.cluster.capacity import memory_bytes, num_cores
from rallypoint.config import RunConfig
from rallypoint.errors import ConfigError
from rallypoint.install import cache_folder
from rallypoint.observability.devices import DEVICES, NUMBERS, ROWS, WIDTHS, Cores
from rallypoint.observability.numbers import counted
from rallypoint.prepare.checkup import ask_driver

_ASK_TORCH = """
import json, sys, torch
module = torch.get_device_module(torch.device(sys.argv[1]))
devices = []
if module.is_available():
    for index in range(module.device_count()):
        found = module.get_device_properties(index)
        devices.append([found.name, found.total_memory])
print(json.dumps([torch.__version__, devices]))
"""
_PATIENCE_S = 120.0
_KEPT_S = 24 * 3600.0
"""How long what cores were measured to do is believed: other programs may have kept them busy."""
_GIB = 2**30
OF_TYPES = {name: device.gib for name, device in DEVICES.items() if " " not in name}
"""Accelerator type as Ray names it -> GiB that torch reports of its largest version."""
_CORES_EACH, _MEMORY_EACH = 16, 128 * 2**30
"""What machines are rented with for each of their devices, or more."""


@dataclasses.dataclass(frozen=True, slots=True)
class Accelerator:
    """A device other than the CPU."""

    name: str
    num_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class Machine:
    """The inventory of this machine."""

    num_cores: int
    num_bytes: int
    """Memory that this process may use."""
    accelerators: tuple[Accelerator, ...] = ()
    """Devices of the configured kind that torch finds; with cluster.device=cpu, GPUs that the driver reports."""
    complaint: str = ""
    """Reason why torch finds none."""
    num_nodes: int = 1
    """Equal computers that it consists of."""
    is_cluster: bool = False
    """Whether these are all nodes that a run may use, also where it joins a cluster."""


def look_around(config: RunConfig) -> Machine:
    """Return what this machine has for a run."""
    device = config.cluster.device
    if device == "cpu":
        return Machine(num_cores(), memory_bytes(), _ask_driver())
    if config.cluster.address is not None:
        return Machine(num_cores(), memory_bytes())
    accelerators, complaint = _ask_torch(device)
    return Machine(num_cores(), memory_bytes(), accelerators, complaint)


def imagine(text: str) -> Machine:
    """Return a machine that is described, as one that is not here: `H100`, `8xH100`, `2x8xH100` for two nodes.

    >>> machine = imagine("2x8xH100")
    >>> machine.num_nodes, len(machine.accelerators), machine.num_cores, machine.accelerators[0].name
    (2, 16, 256, 'H100')

    Raises:
        ConfigError: it has devices of no known type.
    """
    found = re.fullmatch(r"(?:([1-9]\d{0,3})x)?(?:([1-9]\d{0,3})x)?([\w-]+)", text)
    if found is None or found[3] not in OF_TYPES:
        raise ConfigError(
            (f"--on {text}: expected a number and a type, such as 8xH100 or 2x8xH100; types: {', '.join(OF_TYPES)}",)
        )
    num_nodes, kind = int(found[1] or 1) if found[2] else 1, found[3]
    num = num_nodes * int(found[2] or found[1] or 1)
    device = Accelerator(kind, round(OF_TYPES[kind] * _GIB))
    return Machine(num * _CORES_EACH, num * _MEMORY_EACH, (device,) * num, num_nodes=num_nodes, is_cluster=True)


def find_cores(num_processes: int, num_threads: int, dtype: str, say: Callable[[str], None]) -> Cores | None:
    """Return what each of some processes computes in a second, all of them at once; None if that cannot be measured.

    It is measured once a day, and read from the user's cache folder until then.

    Args:
        num_processes: that compute at the same time.
        num_threads: of each.
        dtype: of the weights.
        say: given a line before it is measured, and one that says why it could not be.
    """
    asked, where = (num_processes, num_threads, dtype), (platform.node(), _processor(), num_cores())
    how = (*map(importlib.metadata.version, ("rallypoint", "torch")), WIDTHS, ROWS, NUMBERS)
    file = cache_folder() / f"cores-{hashlib.sha256(repr((asked, where, how)).encode()).hexdigest()[:16]}.json"
    with contextlib.suppress(OSError, ValueError, TypeError):
        if time.time() - file.stat().st_mtime < _KEPT_S:
            return Cores(**json.loads(file.read_text(encoding="utf-8")))
    say(f"measuring what {counted(num_processes, 'process', 'es')} compute here: a few seconds, once a day")
    if (cores := measure_cores(*asked, say)) is not None:
        with contextlib.suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            part = file.with_suffix(f".{os.getpid()}")
            part.write_text(json.dumps(dataclasses.asdict(cores)), encoding="utf-8")
            part.replace(file)
    return cores


def measure_cores(num_processes: int, num_threads: int, dtype: str, say: Callable[[str], None]) -> Cores | None:
    """Measure what `find_cores` returns: in about three seconds, most of which it takes to import torch.

    The first process speaks when all are done; one that ends early leaves it waiting, until there is no more patience.
    """
    with tempfile.TemporaryDirectory() as folder:
        asked = {"num_ranks": num_processes, "num_threads": num_threads, "dtype": dtype, "place": f"{folder}/meeting"}
        asked |= {"widths": WIDTHS, "rows": ROWS, "numbers": NUMBERS}
        processes = [
            subprocess.Popen(
                [sys.executable, "-P", "-m", "rallypoint.cpu.speed", str(rank), json.dumps(asked)],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL if rank else subprocess.PIPE,
                env={**os.environ, "OMP_NUM_THREADS": str(num_threads)},
            )
            for rank in range(num_processes)
        ]
        try:
            measured, complaint = processes[0].communicate(timeout=_PATIENCE_S)
        except subprocess.TimeoutExpired:
            say(f"a step is not timed: the processes that measure cores took longer than {_PATIENCE_S:g} s")
            return None
        finally:
            for process in processes:
                process.kill()
    if processes[0].returncode == 0:
        return Cores(**json.loads(measured))
    why = (complaint.decode(errors="replace").strip().splitlines() or ["without a word"])[-1]
    say(f"a step is not timed: the processes that measure cores failed: {why}")
    return None


def _processor() -> str:
    """Return the name of this machine's processor, as Linux has it, or else as Python does."""
    with contextlib.suppress(OSError):
        found = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
        if found:
            return found[1]
    return platform.processor()


@functools.cache
def _ask_torch(device: str) -> tuple[tuple[Accelerator, ...], str]:
    """Return the devices of a kind, or the reason why there is none."""
    command = [sys.executable, "-P", "-c", _ASK_TORCH, device]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_S, check=True)
        said = done.stdout.strip().splitlines()[-1:]
        version, devices = json.loads(said[0] if said else "")
    except subprocess.TimeoutExpired:
        return (), f"asking for it took longer than {_PATIENCE_S:g} s: the driver may hang"
    except subprocess.CalledProcessError as error:
        return (), (error.stderr.strip().splitlines() or [f"status {error.returncode}"])[-1]
    except (ValueError, TypeError):
        return (), "torch did not answer"
    if devices:
        return tuple(Accelerator(name, num_bytes) for name, num_bytes in devices), ""
    if driven := _ask_driver():
        return (), f"torch {version} cannot use the {driven[0].name} that is here: install a build of torch for it"
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    return (), f"torch {version}" + (f", CUDA_VISIBLE_DEVICES={hidden!r}" if hidden is not None else "")


@functools.cache
def _ask_driver() -> tuple[Accelerator, ...]:
    """Return the GPUs that NVIDIA's driver reports, unless they are hidden; without torch."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return ()
    try:
        driven = ask_driver()
    except (OSError, ValueError, subprocess.SubprocessError):
        return ()
    return () if driven is None else tuple(Accelerator(name, mebibytes * 2**20) for name, mebibytes in driven.gpus)
