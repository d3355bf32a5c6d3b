"""Ray's own processes are stopped and killed under a program; it says which, ends, and with its own status."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are looked up in /proc")

PROGRAM = """
import asyncio, os, signal, sys
from pathlib import Path
import numpy as np
from rallypoint.cluster import Layout, ResourcePool, WorkerGroup, is_held_by_ray, open_runtime
from rallypoint.cluster.rendezvous.ray import RayRooms
from rallypoint.errors import RallyError
from echoing import Echo

async def main(folder, victim, how):
    runtime = open_runtime("ray", log_folder=folder, object_store_gib=0.2, silence_s=3.0, say=print)
    rooms = RayRooms.open("the program", 30.0)
    try:
        group = await WorkerGroup.create(Layout("echo", await runtime.processes(ResourcePool([2], num_cpus=0.1))), Echo)
        assert await group.call(Echo.echo, np.zeros(10**6)) == [10**6] * 2
        pid = next(one.pid for one in runtime._cluster.daemons._processes if one.name == victim)
        print("victim:", pid, flush=True)
        os.kill(pid, getattr(signal, how))
        await asyncio.sleep(1)  # so that it is, and the question comes later
        for _ in range(5):
            await group.call(Echo.echo, np.ones(10**6))
            print("answered", flush=True)
    except RallyError as error:
        print(f"{type(error).__name__}: {error}", flush=True)
    finally:
        await runtime.shutdown()
        rooms.close()
    print("left", flush=True)

asyncio.run(main(Path(sys.argv[1]), *sys.argv[2:]))
if is_held_by_ray():
    os._exit(7)
sys.exit(7)
"""

STARTS = """
import asyncio, os, signal, sys, time
from pathlib import Path
from rallypoint.cluster import Layout, ResourcePool, WorkerGroup, is_held_by_ray, open_runtime
from rallypoint.errors import RallyError
from echoing import Echo

async def main(folder, moment):
    runtime = open_runtime("ray", log_folder=folder, object_store_gib=0.2, say=print)
    pid = next(one.pid for one in runtime._cluster.daemons._processes if one.name == "GCS")
    if moment == "placement":
        os.kill(pid, signal.SIGKILL)
    began = time.monotonic()
    try:
        processes = await runtime.processes(ResourcePool([1], num_cpus=0.1))
        os.kill(pid, signal.SIGKILL)
        began = time.monotonic()
        runtime.open_rendezvous("the program")
    except RallyError as error:
        print(f"{type(error).__name__}: {error}", flush=True)
    print("after", round(time.monotonic() - began), "s", flush=True)
    await runtime.shutdown()
    try:
        open_runtime("ray", log_folder=folder)
    except RallyError as error:
        print(f"again: {error}", flush=True)
    await open_runtime("inline", log_folder=folder).shutdown()
    print("left", flush=True)

asyncio.run(main(Path(sys.argv[1]), sys.argv[2]))
os._exit(7 if is_held_by_ray() else 0)
"""

WORKERS = """
import numpy as np
from rallypoint.cluster import WorkerContext, collect


class Echo:
    def __init__(self, context: WorkerContext) -> None:
        del context

    @collect
    def echo(self, values: np.ndarray) -> int:
        return values.size
"""


def run_program(folder: Path, victim: str, how: signal.Signals) -> tuple[int, str]:
    """Run a program that stops or kills one of its Ray's processes; return its status and what it printed."""
    return run(folder, PROGRAM, victim, how.name)


def run(folder: Path, program: str, *args: str) -> tuple[int, str]:
    """Run a program with arguments; return its status and what it printed, once nothing of its Ray is left."""
    (folder / "program.py").write_text(program)
    (folder / "echoing.py").write_text(WORKERS)
    done = subprocess.run(
        [sys.executable, "program.py", str(folder / "logs"), *args],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder), "TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
        check=False,
    )
    deadline = time.monotonic() + 60  # the reaper ends what is left
    while (left := processes_in(folder)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == {}
    return done.returncode, done.stdout


def processes_in(folder: Path) -> dict[int, str]:
    """Return what was started in a folder, the helpers of a Ray included, which hide their environment."""
    found: dict[int, str] = {}
    for process in Path("/proc").iterdir():
        with contextlib.suppress(ValueError, OSError):
            if (process / "cwd").readlink() == folder and int(process.name) != os.getpid():
                found[int(process.name)] = (process / "cmdline").read_text().replace("\0", " ")
    return found


@pytest.mark.parametrize("how", [signal.SIGSTOP, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)])
def test_a_raylet_that_is_stopped_or_killed_is_named_and_ends_the_program_in_good_order(tmp_path, how):
    status, printed = run_program(tmp_path, "raylet", how)
    pid = printed.partition("victim: ")[2].split()[0]
    what = "is stopped" if how == signal.SIGSTOP else "was killed by signal 9"
    assert f"RayLostError: Ray's raylet (pid {pid}) {what}" in printed
    assert printed.endswith("left\n"), printed
    assert status == 7
    assert (tmp_path / "logs" / "ray" / "raylet.out").is_file(), "Ray's logs are where they are looked for"


@pytest.mark.parametrize("how", [pytest.param(signal.SIGSTOP, marks=pytest.mark.slow), signal.SIGKILL])
def test_without_a_gcs_the_work_goes_on_to_its_end_and_that_is_said(tmp_path, how):
    status, printed = run_program(tmp_path, "GCS", how)
    assert printed.count("answered\n") == 5, printed
    assert "Error" not in printed
    assert printed.endswith("left\n"), printed
    assert status == 7


# A GCS that is killed while the program works is always lost above; tests/unit/cluster/test_ray_thread.py has what is
# said of one that goes while it is asked, or was gone before.
@pytest.mark.slow
@pytest.mark.parametrize("moment", ["placement", "rendezvous"])
def test_a_gcs_that_is_lost_while_a_program_starts_is_named_in_seconds_and_a_second_start_is_told_what_to_do(
    tmp_path, moment
):
    status, printed = run(tmp_path, STARTS, moment)
    end = "(was killed by signal 9|has ended)"
    assert re.search(rf"RayLostError: Ray's GCS \(pid \d+\) {end}; this program", printed), printed
    assert int(printed.partition("after ")[2].split()[0]) < 20
    assert "again: this process is tied to a Ray that was lost, until it ends: start a new one" in printed
    assert printed.endswith("left\n"), "without Ray a second run works"
    assert status == 7
