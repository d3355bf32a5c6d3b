"""Memory that is returned to the system, and buffers that take none before they are written to."""

import platform
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from rallypoint.cpu.pages import give_back, reserve
from rallypoint.observability.memory import resident_bytes

CPU = torch.device("cpu")

pytestmark = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")


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


@pytest.mark.parametrize("num_gib", [0.1, 1.0])
def test_a_reserved_buffer_takes_memory_only_where_it_is_written_to(num_gib):
    before = resident_bytes(CPU)
    buffer = reserve(1024, int(num_gib * 2**20), like=torch.zeros(1, dtype=torch.uint8))
    assert resident_bytes(CPU) - before < 2**20
    buffer[0] = 1
    assert 0 < resident_bytes(CPU) - before < 6 * 2**20
