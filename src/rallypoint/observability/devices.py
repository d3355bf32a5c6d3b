"""Devices that models run on: what their vendors print of them.

Owns: one table of accelerators. Must not know: torch, configs, roles.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Device:
    """An accelerator, or the cores of a process."""

    gib: float
    """Memory that torch reports, of the largest version."""
    half_peak: float
    """Dense operations per second in bfloat16."""
    single_peak: float
    """Dense operations per second in float32, without TF32."""
    bandwidth: float
    """Bytes per second that its memory gives at best."""

    def peak(self, num_bytes: int) -> float:
        """Return the operations per second in a type of so many bytes."""
        return self.half_peak if num_bytes == 2 else self.single_peak


def _device(gib: float, half: float, single: float, bandwidth: float) -> Device:
    return Device(gib, half * 1e12, single * 1e12, bandwidth * 1e9)


DEVICES = {
    "T4": _device(14.7, 65, 8.1, 320),
    "V100": _device(31.7, 125, 15.7, 900),
    "A10G": _device(22.0, 70, 35, 600),
    "L4": _device(22.0, 121, 30.3, 300),
    "L40S": _device(44.4, 362, 91.6, 864),
    "RTX 4090": _device(23.5, 165, 82.6, 1008),
    "RTX 3090": _device(23.5, 71, 35.6, 936),
    "A30": _device(23.5, 165, 10.3, 933),
    "A40": _device(44.4, 150, 37.4, 696),
    "A100-40G": _device(39.4, 312, 19.5, 1555),
    "A100": _device(79.1, 312, 19.5, 2039),
    "A100-80G": _device(79.1, 312, 19.5, 2039),
    "H20": _device(95.0, 148, 44, 4000),
    "H100 PCIe": _device(79.1, 756, 51, 2000),
    "H100 NVL": _device(93.0, 835, 60, 3900),
    "H100": _device(79.1, 989, 67, 3350),
    "GH200": _device(141.0, 989, 67, 4900),
    "H200": _device(139.8, 989, 67, 4800),
    "B200": _device(178.0, 2250, 75, 8000),
}
"""Name, as Ray's labels or the driver have it -> device; where one name is part of another, the longer comes first."""


def find_device(name: str) -> Device | None:
    """Return a device by its name in Ray's labels, or by that of the driver.

    >>> find_device("NVIDIA H100 80GB HBM3").half_peak
    989000000000000.0
    >>> find_device("NVIDIA A10")
    """
    words = f" {name.replace('-', ' ')} "
    return DEVICES.get(name) or next((device for known, device in DEVICES.items() if f" {known} " in words), None)
