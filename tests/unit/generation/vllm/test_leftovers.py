"""Memory with a name, of processes that are killed."""

import contextlib
import os
import signal
import subprocess
import sys
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import pytest

from rallypoint.generation.vllm.server import remove_shared, shared_files

pytestmark = pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="needs Linux")

SHARES = """
import sys, time
from multiprocessing.shared_memory import SharedMemory
memory = SharedMemory(create=True, size=100)
other = SharedMemory(sys.argv[1])
print(memory.name, flush=True)
time.sleep(600)
"""


@pytest.fixture
def mine():
    """Memory of this process."""
    memory = SharedMemory(create=True, size=100)
    yield memory
    memory.close()
    with contextlib.suppress(FileNotFoundError):
        memory.unlink()


@pytest.fixture
def group(mine):
    """A process of a group of its own, that has memory of its own and this one's; and the name of its own."""
    process = subprocess.Popen(
        [sys.executable, "-c", SHARES, mine.name], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    name = process.stdout.readline().strip()
    yield process, Path("/dev/shm", name)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    Path("/dev/shm", name).unlink(missing_ok=True)


def kill(process):
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def test_what_a_killed_group_had_alone_is_removed_and_what_others_use_stays(group, mine):
    process, own = group
    found = shared_files(process.pid)
    assert found.keys() == {own, Path("/dev/shm", mine.name)}
    kill(process)
    assert own.exists()
    remove_shared(found, process.pid)
    assert not own.exists()
    assert Path("/dev/shm", mine.name).exists()


def test_a_file_that_was_made_anew_under_the_same_name_stays(group):
    process, own = group
    found = shared_files(process.pid)
    kill(process)
    own.rename(own.with_name(f"{own.name}.before"))
    own.write_bytes(b"another one's")
    try:
        remove_shared(found, process.pid)
        assert own.exists()
    finally:
        own.with_name(f"{own.name}.before").unlink()
