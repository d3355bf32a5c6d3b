"""What processes are doing, seen with py-spy and without, whatever keeps them from telling."""

import contextlib
import signal
import subprocess
import sys

import pytest

from rallypoint.cluster.process import ProcessInfo
from rallypoint.cluster.stacks import find_py_spy, stacks_of

CHILD = """
import ctypes, sys, time
from rallypoint.cluster.stacks import open_stacks

def sleeps():
    print(descriptor, flush=True)
    time.sleep(60)

def holds_the_interpreter():
    print(descriptor, flush=True)
    while True:
        ctypes.PyDLL(None).usleep(60_000_000)  # until a signal arrives

descriptor = open_stacks()
globals()[sys.argv[1]]()
"""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into other processes by way of /proc")


@pytest.fixture(scope="module")
def children():
    """Processes by what they do."""
    with contextlib.ExitStack() as running:
        found = {}
        for name in ("sleeps", "holds_the_interpreter"):
            command = [sys.executable, "-c", CHILD, name]
            child = running.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            running.callback(child.kill)
            assert child.stdout is not None
            found[name] = ProcessInfo("here", "A", child.pid, stacks_fd=int(child.stdout.readline()))
        yield found


def test_a_process_tells_itself_what_it_does_even_if_its_interpreter_is_held(children):
    for _ in range(2):
        text = stacks_of(list(children.values()), find=lambda: None)
        first, second = text.split("=== pid ")[1:]
        assert first.startswith(f"{children['sleeps'].pid} on here\n")
        assert first.count("in sleeps") == 1, "what it told before is not told again"
        assert second.count("in holds_the_interpreter") == 1
        assert "py-spy is not installed" in text


@pytest.mark.skipif(find_py_spy() is None, reason="pip install py-spy")
def test_py_spy_sees_a_process_that_is_stopped_and_otherwise_that_is_said(children):
    stopped = children["sleeps"]
    subprocess.run(["kill", f"-{signal.SIGSTOP.value}", str(stopped.pid)], check=True)
    try:
        seen = stacks_of([stopped])
        if "py-spy failed" in seen:
            pytest.skip("this system does not let py-spy look into processes")
        assert "sleeps" in seen
        assert "the process is stopped" in stacks_of([stopped], find=lambda: None)
    finally:
        subprocess.run(["kill", f"-{signal.SIGCONT.value}", str(stopped.pid)], check=True)


def test_a_tool_that_fails_and_a_process_that_is_gone_are_said(children):
    text = stacks_of([children["sleeps"]], find=lambda: "false")
    assert "py-spy failed" in text
    assert "in sleeps" in text, "then the process is asked itself"
    gone = ProcessInfo("here", "A", 2**22 + 1, stacks_fd=3)
    assert "cannot be asked for its stacks" in stacks_of([gone], find=lambda: None)
    assert "cannot write its own stacks" in stacks_of([ProcessInfo("here", "A", 1)], find=lambda: None)
    assert stacks_of([]) == ""
