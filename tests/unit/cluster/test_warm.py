"""Workers that are forks of a process that has imported modules; nothing here needs Ray."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from rallypoint.cluster import reaper, warm

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks end with their parent by prctl")

WORKER = """
import json, os, sys
found = {"imported": "colorsys" in sys.modules, "arguments": sys.argv[1:], "said": os.environ.get("SAID"),
         "folder": os.getcwd(), "socket": "RALLYPOINT_WARM" in os.environ, "pid": os.getpid(), "parent": os.getppid(),
         "group": os.getpgrp(), "session": os.getsid(0)}
with open(sys.argv[1] + ".part", "w") as file:
    json.dump(found, file)
os.rename(sys.argv[1] + ".part", sys.argv[1])
if "stays" in sys.argv:
    import signal
    signal.pause()
"""


@pytest.fixture
def socket():
    with tempfile.TemporaryDirectory(prefix="warm-", dir="/tmp") as folder:  # paths of sockets are short
        yield f"{folder}/socket"


@pytest.fixture
def worker(tmp_path):
    """Return a function that starts one as Ray would, and returns what it says of itself."""
    (tmp_path / "worker.py").write_text(WORKER)

    def start(path, *more):
        said = tmp_path / f"said-{len(list(tmp_path.iterdir()))}"
        asking = subprocess.Popen(
            [sys.executable, warm.__file__, str(tmp_path / "worker.py"), str(said), *more, "--language=PYTHON"],
            env={**os.environ, "SAID": "by the driver", warm.SOCKET: path},
            cwd=tmp_path,
        )
        while not said.exists():
            assert asking.poll() in (None, 0)
            time.sleep(0.01)
        if "stays" not in more:
            assert asking.wait(60) == 0
        return {**json.loads(said.read_text()), "asked": asking.pid}

    return start


def test_a_worker_is_a_fork_that_has_the_modules_and_all_else_of_who_asked(socket, worker, tmp_path):
    with warm.forks(socket, ["colorsys"], {**os.environ, reaper.MARK: socket}):
        first, second = worker(socket, "one"), worker(socket, "two")
    for found, word in ((first, "one"), (second, "two")):
        assert found["imported"]
        assert found["arguments"][1:] == [word]
        assert not found["socket"], "a Ray that it starts has forks of its own"
        assert (found["said"], found["folder"]) == ("by the driver", str(tmp_path))
        assert found["pid"] != found["asked"]
        assert found["group"] == found["pid"], "Ray kills the group of a worker that ends"
        assert found["session"] != os.getsid(0), "nor does a key that interrupts the driver in its terminal end it"
    assert first["pid"] != second["pid"]
    assert first["parent"] == second["parent"]


def test_without_the_process_a_worker_starts_by_itself(socket, worker):
    with warm.forks(socket, [], os.environ):
        pass
    found = worker(socket, "alone")
    assert (found["imported"], found["pid"]) == (False, found["asked"])
    with warm.forks(socket, ["no.such.module"], os.environ):
        found = worker(socket, "alone")
    assert (found["imported"], found["pid"]) == (False, found["asked"])


DRIVER = """
import os, signal, sys
from rallypoint.cluster import warm
with warm.forks(sys.argv[1], [], os.environ):
    print("ready", flush=True)
    signal.pause()
"""


def test_forks_end_with_a_driver_that_is_killed(socket, worker):
    environment = {**os.environ, reaper.MARK: "of the driver"}
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, socket], stdout=subprocess.PIPE, env=environment)
    try:
        assert driver.stdout is not None
        assert driver.stdout.readline() == b"ready\n"
        found = worker(socket, "stays")
        assert reaper.num_left("of the driver", "") == 3, "driver, the process of the forks, and a fork: by its mark"
        driver.send_signal(signal.SIGKILL)
        driver.wait()
        while any(Path(f"/proc/{found[each]}").exists() for each in ("pid", "parent")):
            time.sleep(0.01)
    finally:
        driver.kill()
        driver.communicate()
