"""Devices that models run on: what their vendors print of accelerators, and what is measured of a process's cores.

Owns: one table of accelerators. Must not know: torch, configs, roles.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Sequence
from importlib.resources import files

import yaml

WIDTHS, ROWS = (64, 256, 1024), (8, 64, 384)
"""Sizes of the products that are measured on cores."""
NUMBERS = (2**16, 2**20)
"""Likewise of tensors, in numbers."""


@dataclasses.dataclass(frozen=True, slots=True)
class Device:
    """An accelerator."""

    gib: float
    """Memory that torch reports, of the largest version."""
    half_peak: float
    """Dense operations per second in bfloat16."""
    single_peak: float
    """Dense operations per second in float32, without TF32."""
    bandwidth: float
    """Bytes per second that its memory gives at best."""

    launch_s: float = 3.6e-6
    """Seconds between the beginnings of two small kernels of a captured step, as they were measured on an H200."""
    gathered: float = 1.5e11
    """Bytes per second in which processes of a node get each other's weights; not measured."""

    def moved(self, numbers: float) -> float:
        """Return the bytes per second that elementwise operations read and write; see `Cores.moved`."""
        del numbers
        return self.bandwidth

    def peak(self, num_bytes: int) -> float:
        """Return the operations per second in a type of so many bytes."""
        return self.half_peak if num_bytes == 2 else self.single_peak

    def products(self, num_bytes: int, rows: float, width: float, *, is_update: bool) -> float:
        """Return the peak of products, which on an accelerator is the same for all sizes; see `Cores.products`."""
        del rows, width, is_update
        return self.peak(num_bytes)


@dataclasses.dataclass(frozen=True, slots=True)
class Cores:
    """The cores of a process, while the other processes of a run keep theirs busy; see `rallypoint.cpu.speed`."""

    launch_s: float
    """Seconds of a small operation of torch, from Python."""
    bandwidth: float
    """Bytes per second that are read and written of what lies in no cache."""
    gathered: float
    """Bytes per second that are summed over the processes; for one, as if they were read."""
    traffic: Sequence[float]
    """Bytes per second that elementwise operations read and write, for each of `NUMBERS`."""
    forward: Sequence[float]
    """Operations per second of products, [rows, width] x [width, width], for each of `WIDTHS` and each of `ROWS`."""
    update: Sequence[float]
    """Likewise, together with those of their backward pass."""

    def products(self, num_bytes: int, rows: float, width: float, *, is_update: bool) -> float:
        """Return the operations per second of products of a size, between those that were measured.

        >>> cores = Cores(1e-6, 1e10, 1e9, traffic=[], forward=[1, 8, 8, 1, 8, 8, 1, 8, 8], update=[])
        >>> [round(cores.products(4, rows, 100, is_update=False), 3) for rows in (8, 2**4.5, 64, 10_000)]
        [1.0, 2.828, 8.0, 8.0]

        Args:
            num_bytes: of a number; all were measured with numbers of the run's type.
            rows: of [rows, width] x [width, width].
            width: of the same.
            is_update: whether the products of the backward pass are among them.
        """
        del num_bytes
        rates = self.update if is_update else self.forward
        lines = [_between(ROWS, rates[first : first + len(ROWS)], rows) for first in range(0, len(rates), len(ROWS))]
        return _between(WIDTHS, lines, width)

    def moved(self, numbers: float) -> float:
        """Return the bytes per second that elementwise operations on so many numbers read and write."""
        return _between(NUMBERS, self.traffic, numbers)


def _between(places: Sequence[int], values: Sequence[float], place: float) -> float:
    """Return the value at a place, as straight lines on logarithmic paper have it; the ends go on level."""
    after = min(max(bisect.bisect(places, place), 1), len(places) - 1)
    low, high = math.log(places[after - 1]), math.log(places[after])
    share = min(max((math.log(place) - low) / (high - low), 0.0), 1.0)
    return values[after - 1] ** (1 - share) * values[after] ** share


def _devices() -> dict[str, Device]:
    rows = yaml.safe_load(files("rallypoint.observability").joinpath("devices.yaml").read_text(encoding="utf-8"))
    return {
        name: Device(gib, half * 1e12, single * 1e12, bandwidth * 1e9)
        for name, (gib, half, single, bandwidth) in rows.items()
    }


DEVICES = _devices()
"""Name, as Ray's labels or the driver have it -> device, as in devices.yaml."""


def find_device(name: str) -> Device | None:
    """Return a device by its name in Ray's labels, or by that of the driver.

    >>> find_device("NVIDIA H100 80GB HBM3").half_peak
    989000000000000.0
    >>> find_device("NVIDIA A10")
    """
    words = f" {name.replace('-', ' ')} "
    return DEVICES.get(name) or next((device for known, device in DEVICES.items() if f" {known} " in words), None)
