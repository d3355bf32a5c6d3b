"""What finds and ends the remains of a cluster; nothing here needs Ray."""

import os
import signal
import subprocess
import sys
import time

import pytest

from rallypoint.cluster import reaper

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are looked up in /proc")

SILENT = "import signal; signal.pause()"


def test_a_process_that_wrote_over_its_environment_is_known_by_its_logs_and_a_reader_of_them_is_not(tmp_path):
    folder = tmp_path / "rally-1"
    folder.mkdir()
    log = folder / "agent.log"
    log.touch()
    with log.open("wb") as out, log.open("rb") as text:
        helper = subprocess.Popen([sys.executable, "-c", SILENT], stdout=out)
        reader = subprocess.Popen([sys.executable, "-c", SILENT], stdin=text, stdout=subprocess.DEVNULL)
    try:
        assert reaper.end_processes("no such mark", grace_s=5, folder=str(folder)) == 1
        assert helper.wait(10) == -signal.SIGTERM
        assert reader.poll() is None
    finally:
        for process in (helper, reader):
            process.kill()
            process.wait()


def test_a_process_that_was_given_the_folder_is_found_and_who_reads_its_logs_is_not(tmp_path):
    folder = tmp_path / "rally-1"
    folder.mkdir()
    agent = subprocess.Popen([sys.executable, "-c", SILENT, f"--log-dir={folder}/ray/logs"])
    reader = subprocess.Popen([sys.executable, "-c", SILENT, f"{folder}/ray/logs/raylet.out"])
    try:
        assert reaper.num_left("no such mark", str(folder)) == 1
        assert reaper.end_processes("no such mark", grace_s=5, folder=str(folder)) == 1
        assert agent.wait(10) == -signal.SIGTERM
        assert reader.poll() is None
    finally:
        for process in (agent, reader):
            process.kill()
            process.wait()


LATE = """
import os, subprocess, sys, time
for _ in range(3):  # each is started when the one before is gone, as by a raylet that was killed just then
    time.sleep(0.05)
    code = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.pause()"
    subprocess.Popen([sys.executable, "-c", code], env={**os.environ, sys.argv[1]: sys.argv[2]}).wait()
"""


def test_after_a_sudden_death_what_starts_late_and_ignores_sigterm_is_ended_too(tmp_path):
    mark = str(tmp_path)  # of no other test
    late = subprocess.Popen([sys.executable, "-c", LATE, reaper.MARK, mark])
    try:
        assert reaper.end_processes(mark, grace_s=0.1, until_quiet=True) == 3
        assert late.wait(30) == 0
        assert reaper.num_left(mark, "") == 0
    finally:
        late.kill()
        late.wait()


@pytest.fixture
def left(tmp_path):
    """The private folder of a cluster, and the link to its logs in a run's folder."""
    folder, logs = tmp_path / "rally-1", tmp_path / "run" / "ray"
    inside = folder / "ray" / "session" / "logs"
    inside.mkdir(parents=True)
    logs.parent.mkdir()
    (inside / "raylet.out").write_text("it said something")
    (folder / "token").write_text("secret")
    logs.symlink_to(inside)
    return folder, logs


def test_the_logs_are_moved_and_the_folder_goes(left):
    folder, logs = left
    reaper.tidy(str(folder), str(logs))
    assert (logs / "raylet.out").read_text() == "it said something"
    assert not logs.is_symlink()
    assert not folder.exists()


def test_a_disk_without_room_for_the_logs_does_not_keep_the_folder_and_its_token(left):
    folder, logs = left

    def full(source, target):
        """As `shutil.move` from one disk to another: some of it is there when the room ends."""
        os.mkdir(target)
        with open(os.path.join(target, "part"), "wb") as part:
            part.write(b"it sa")
        raise OSError(28, "No space left on device", source)

    reaper.tidy(str(folder), str(logs), move=full)
    assert not folder.exists()
    assert not logs.exists(), "what is there of the logs is not whole, and takes what room there is"


def page():
    descriptor = reaper.open_page()
    assert descriptor is not None
    return descriptor


def guard_of(pid, busy, clock):
    return reaper.Guard(pid, busy, 10.0, clock=clock)


def test_a_driver_that_does_not_come_back_from_a_question_is_lost_unless_it_is_stopped():
    busy, now = page(), iter(range(0, 100_000, 5))
    driver = subprocess.Popen([sys.executable, "-c", SILENT])
    guard = guard_of(driver.pid, busy, lambda: float(next(now)))

    def looks(number, times):
        os.pwrite(busy, number.to_bytes(8, sys.byteorder), 0)
        return [guard.is_lost() for _ in range(times)]

    try:
        assert not any(looks(0, 20)), "it asks nothing"
        assert not any(any(looks(number, 2)) for number in range(1, 20)), "each question gets its answer"
        driver.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, driver.pid, os.WSTOPPED | os.WNOWAIT)
        assert not any(looks(20, 20)), "Ctrl-Z is no silence of Ray's"
        driver.send_signal(signal.SIGCONT)
        until = time.monotonic() + 30
        while reaper.is_stopped(driver.pid) and time.monotonic() < until:
            time.sleep(0.01)
        assert looks(20, 3) == [False, False, True]
    finally:
        driver.kill()
        driver.wait()
        os.close(busy)


def test_what_is_said_in_a_process_name_leaves_the_file_that_its_errors_go_to_as_it_was(tmp_path):
    errors = tmp_path / "errors.log"
    errors.write_text("what it said before\n")
    with errors.open("a") as file:
        driver = subprocess.Popen([sys.executable, "-c", SILENT], stderr=file)
    try:
        reaper._say_there(driver.pid, "is lost")
    finally:
        driver.kill()
        driver.wait()
    assert errors.read_text() == f"what it said before\nerror: process {driver.pid} is lost\n"
