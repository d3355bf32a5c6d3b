"""The peak of a process, measured where Linux tells it."""

import platform
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from rallypoint.observability.memory import MemoryMeter, give_back, resident_bytes
from rallypoint.types import Maximum

CPU = torch.device("cpu")
NUM_BYTES = 256 * 2**20

pytestmark = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")


def test_a_peak_is_measured_although_its_memory_is_given_back():
    meter = MemoryMeter(CPU, resident_bytes(CPU))
    with meter.measured():
        torch.ones(NUM_BYTES // 4)
    peak = meter.take()["memory_gib"]
    assert isinstance(peak, Maximum)
    assert peak.scalar * 2**30 == pytest.approx(NUM_BYTES, rel=0.05)


def test_a_call_is_not_blamed_for_the_peak_of_one_before():
    meter = MemoryMeter(CPU, resident_bytes(CPU))
    with meter.measured():
        torch.ones(NUM_BYTES // 4)
    meter.take()
    with meter.measured():
        torch.ones(NUM_BYTES // 16)
    assert meter.take()["memory_gib"].scalar * 2**30 < NUM_BYTES / 2


def test_calls_without_memory_of_their_own_measure_nothing():
    meter = MemoryMeter(CPU, resident_bytes(CPU) + NUM_BYTES)
    with meter.measured():
        pass
    assert meter.take() == {}


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_what_another_thread_has_freed_is_given_back():
    """A thread has a heap of its own, whose end glibc keeps by itself."""

    def use_and_give_back() -> int:
        give_back(CPU)
        before = resident_bytes(CPU)
        tensors = [torch.ones(2**18) for _ in range(40)]
        tensors.clear()
        give_back(CPU)
        return resident_bytes(CPU) - before

    with ThreadPoolExecutor(1) as threads:
        left = threads.submit(use_and_give_back).result()
    assert left < 4 * 2**20
