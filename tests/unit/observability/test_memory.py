"""The peak of a process, measured where Linux tells it."""

from pathlib import Path

import pytest
import torch

from rallypoint.observability.memory import MemoryMeter, resident_bytes
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


def test_a_turn_that_goes_on_is_not_blamed_again_for_a_peak_that_was_told():
    """As that of ranks which sample ahead: it lasts for many steps."""
    meter = MemoryMeter(CPU, resident_bytes(CPU))
    with meter.measured():
        torch.ones(NUM_BYTES // 4)
        assert meter.take()["memory_gib"].scalar * 2**30 > NUM_BYTES / 2
        torch.ones(NUM_BYTES // 16)
        assert meter.take()["memory_gib"].scalar * 2**30 < NUM_BYTES / 2


@pytest.mark.parametrize("inside", [True, False], ids=["in its turn", "beside it"])
def test_a_turn_keeps_its_peak_when_another_begins(inside):
    """As ranks that are threads of one process, or weights that are loaded while a rank samples."""
    meter = MemoryMeter(CPU, resident_bytes(CPU))
    other = meter if inside else MemoryMeter(CPU, resident_bytes(CPU))
    with meter.measured():
        torch.ones(NUM_BYTES // 4)
        with other.measured():
            pass
    assert meter.take()["memory_gib"].scalar * 2**30 == pytest.approx(NUM_BYTES, rel=0.05)


def test_calls_without_memory_of_their_own_measure_nothing():
    meter = MemoryMeter(CPU, resident_bytes(CPU) + NUM_BYTES)
    with meter.measured():
        pass
    assert meter.take() == {}
