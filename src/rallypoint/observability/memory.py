"""Memory that the calls of a role take: on its accelerator, or in its process if there is none.

Roles that share a process take turns, and keep their weights meanwhile: the peak during a call counts what the others
hold, too. On CPUs it counts the private pages of the process, those that the C library's heap keeps for later among
them, and what it shares with others of its own, beyond what was there before the first role was started.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import torch

from rallypoint.types import Maximum, Metrics

_SHARED: dict[int, int] = {}
"""Ids of the owners of memory that this process shares with others -> bytes."""
_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_OPEN: list[MemoryMeter] = []
"""Meters that measure now. The system keeps one peak for all of them, so that each notes it before it is restarted."""
_LOCK = threading.Lock()
"""Held while `_OPEN` or the peak of a meter changes."""


class MemoryMeter:
    """Measures the peak during calls."""

    def __init__(self, device: torch.device, baseline: int) -> None:
        """Measure on a device.

        Args:
            device: of the role.
            baseline: what `resident_bytes` was before the process had any role.
        """
        self._device, self._baseline, self._peak = device, baseline, 0

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        """Measure what happens inside; calls may be nested, or overlap in several threads."""
        with _LOCK:
            _restart_peak(self._device)
            _OPEN.append(self)
        try:
            yield
        finally:
            with _LOCK:
                self._note()
                _OPEN.remove(self)

    def _note(self) -> None:
        self._peak = max(self._peak, _peak_bytes(self._device) - self._baseline)

    def take(self, beside_bytes: int = 0) -> Metrics:
        """Return `memory_gib` of the calls since it was last taken; nothing where it cannot be measured.

        Args:
            beside_bytes: the most that other processes had meanwhile for the same role.
        """
        with _LOCK:
            if self in _OPEN:  # a turn that goes on: it begins anew
                _restart_peak(self._device)
            peak, self._peak = self._peak + beside_bytes, 0
        return Metrics({"memory_gib": Maximum(peak / 2**30)} if peak > 0 else {})


def resident_bytes(device: torch.device) -> int:
    """Return what is taken now: on CPUs private pages of this process, 0 where the system does not tell."""
    if device.type != "cpu":
        return torch.accelerator.memory_allocated(device)
    return _status().get("RssAnon", 0) + _shared_bytes()


def count_shared(owner: object, num_bytes: int) -> None:
    """Count memory that this process made for others to open as its own, as long as its owner lives."""
    _SHARED[id(owner)] = num_bytes
    weakref.finalize(owner, _SHARED.pop, id(owner), None)


def _shared_bytes() -> int:
    return sum(tuple(_SHARED.values()))  # at once, as other threads may add some


def _peak_bytes(device: torch.device) -> int:
    if device.type != "cpu":
        return torch.accelerator.max_memory_allocated(device)
    status = _status()
    # The kernel keeps the peak of all pages; current pages of files and shared memory are subtracted.
    private = status.get("VmHWM", 0) - status.get("RssFile", 0) - status.get("RssShmem", 0)
    return private + _shared_bytes()


def _restart_peak(device: torch.device) -> None:
    """Restart the peak at the current value; where that is not allowed it stays the peak of the process."""
    for meter in _OPEN:
        if meter._device == device:
            meter._note()
    if device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats(device)
        return
    with contextlib.suppress(OSError):
        _RESET.write_text("5")


def _status() -> dict[str, int]:
    """Return the sizes that Linux reports for this process, in bytes; empty on other systems."""
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return {}
    fields = (line.split(":", 1) for line in lines if line.endswith(" kB"))
    return {name: int(value.split()[0]) * 1024 for name, value in fields}
