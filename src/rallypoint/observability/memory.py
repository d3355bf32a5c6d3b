"""How much memory the calls of a role take: of its accelerator, or of its process where there is none.

Roles that share a process take turns, and keep their weights meanwhile: the peak during a call counts what the others
hold, too. On CPUs it counts the private pages of the process, those that the C library's heap keeps for later among
them, beyond what was there before the first role came to life.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from pathlib import Path

import torch

from rallypoint.types import Maximum, Metrics

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class MemoryMeter:
    """Measures the peak during calls."""

    def __init__(self, device: torch.device, baseline: int) -> None:
        """Measure on a device.

        Args:
            device: of the role.
            baseline: what `resident_bytes` was before the process had any role.
        """
        self._device, self._baseline = device, baseline
        self._peak = 0

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        """Measure what happens inside."""
        _reset_peak(self._device)
        try:
            yield
        finally:
            self._peak = max(self._peak, _peak_bytes(self._device) - self._baseline)

    def take(self) -> Metrics:
        """Return `memory_gib` of the calls since it was last taken; nothing where it cannot be measured."""
        peak, self._peak = self._peak, 0
        return Metrics({"memory_gib": Maximum(peak / 2**30)} if peak > 0 else {})


def give_back(device: torch.device) -> None:
    """Return what the C library keeps of freed memory to the system, so that the next role does not pay for it.

    On an accelerator torch's own allocator serves all roles of a process, and keeps nothing from them.
    """
    if device.type == "cpu":
        with contextlib.suppress(OSError, AttributeError):  # another C library than glibc
            ctypes.CDLL(None).malloc_trim(0)


def resident_bytes(device: torch.device) -> int:
    """Return what is taken now: on CPUs private pages of this process, 0 where the system does not tell."""
    if device.type != "cpu":
        return torch.accelerator.memory_allocated(device)
    return _status().get("RssAnon", 0)


def _peak_bytes(device: torch.device) -> int:
    if device.type != "cpu":
        return torch.accelerator.max_memory_allocated(device)
    status = _status()
    # The kernel keeps the peak of all pages; those of files and of shared memory are taken off as they are now.
    return status.get("VmHWM", 0) - status.get("RssFile", 0) - status.get("RssShmem", 0)


def _reset_peak(device: torch.device) -> None:
    """Let the peak begin at what is taken now; where that is not allowed it stays that of the whole process."""
    if device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats(device)
        return
    with contextlib.suppress(OSError):
        _RESET.write_text("5")


def _status() -> dict[str, int]:
    """Return the sizes that Linux tells of this process, in bytes; empty on other systems."""
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return {}
    fields = (line.split(":", 1) for line in lines if line.endswith(" kB"))
    return {name: int(value.split()[0]) * 1024 for name, value in fields}
