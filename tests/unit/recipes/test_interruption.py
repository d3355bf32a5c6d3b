"""Signals that ask a run for its end, in processes of their own."""

import signal
import subprocess
import sys
import threading

import pytest

from rallypoint.recipes.interruption import acknowledging

PROGRAM = """
import asyncio, signal, sys, threading, time
from rallypoint.recipes.interruption import Observer, interruptible

def say(line):
    print(line, flush=True)

class InAProgram(Observer):
    owns_process = False

async def main():
    observer = InAProgram() if "program" in sys.argv else Observer()
    with interruptible(say, lambda: "all is lost", observer=observer) as interrupted:
        say("ready")
        if "blocks" in sys.argv:
            time.sleep(600)
        await interrupted.wait()
        while "computes" in sys.argv:
            pass
        if "waits" in sys.argv:
            await asyncio.sleep(600)
    say(str(signal.getsignal(signal.SIGTERM) == signal.SIG_DFL))

if "nohup" in sys.argv:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
if "thread" in sys.argv:
    async def once():
        with interruptible(say, str) as interrupted:
            say(str(interrupted.is_set()))
    threading.Thread(target=lambda: asyncio.run(once())).start()
else:
    try:
        asyncio.run(main())
    except BaseException as error:
        say(f"{type(error).__name__}({error})")
        say(str(signal.getsignal(signal.SIGTERM) == signal.SIG_DFL))
"""


def start(*arguments: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    if "thread" not in arguments:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize(
    ("number", "name"), [(signal.SIGINT, "Ctrl-C"), (signal.SIGTERM, "SIGTERM"), (signal.SIGHUP, "SIGHUP")]
)
def test_the_first_signal_is_told_and_handlers_are_given_back(number: signal.Signals, name: str):
    process = start()
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (0, f"{name}\nTrue\n", "")


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_the_second_signal_ends_at_once_with_one_line(second: signal.Signals):
    process = start("waits")
    process.send_signal(signal.SIGINT)
    assert process.stdout is not None
    assert process.stdout.readline() == "Ctrl-C\n"
    process.send_signal(second)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (128 + second, "\nall is lost\n")


def test_the_second_signal_ends_what_blocks_the_loop_too():
    process = start("blocks")
    while process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(timeout=0.2)
        except subprocess.TimeoutExpired:
            continue
    out, err = process.communicate()
    assert (process.returncode, out, err) == (130, "", "\nall is lost\n")


@pytest.mark.parametrize(
    ("second", "raised"),
    [(signal.SIGINT, "KeyboardInterrupt(all is lost)"), (signal.SIGTERM, f"SystemExit({128 + signal.SIGTERM})")],
)
@pytest.mark.parametrize("busy", ["waits", "computes"])
def test_in_a_users_program_the_second_signal_raises(second: signal.Signals, raised: str, busy: str):
    process = start("program", busy)
    process.send_signal(signal.SIGINT)
    assert process.stdout is not None
    assert process.stdout.readline() == "Ctrl-C\n"
    process.send_signal(second)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (0, f"{raised}\nTrue\n", "")


def test_a_hang_up_that_nohup_ignores_stays_ignored():
    process = start("nohup")
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, "SIGTERM\nTrue\n")


def test_a_run_in_a_thread_leaves_signals_to_who_started_it():
    out, err = start("thread").communicate(timeout=60)
    assert (out, err) == ("False\n", "")


def test_ctrl_c_while_a_run_starts_is_said_at_once_and_left_to_who_handles_it():
    said, heard = [], []
    before = signal.signal(signal.SIGINT, lambda *signal: heard.append(signal[0]))
    ours = signal.getsignal(signal.SIGINT)
    try:
        with acknowledging(said.append):
            signal.raise_signal(signal.SIGINT)  # as in a call to Ray, in which no event loop turns
            signal.raise_signal(signal.SIGINT)
        assert said == ["interrupted: what was started is ended; once more ends it at once"]
        assert heard == [signal.SIGINT] * 2
        assert signal.getsignal(signal.SIGINT) is ours
    finally:
        signal.signal(signal.SIGINT, before)


STARTING = """
import asyncio, signal
from rallypoint.recipes.interruption import acknowledged

async def starts():
    print("ready", flush=True)
    await asyncio.sleep(600)

try:
    asyncio.run(acknowledged(starts(), lambda line: print(line, flush=True)))
except KeyboardInterrupt:
    print(signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, flush=True)
    raise SystemExit(130)
"""


@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_a_run_starts_or_ends_cancels_it_and_it_ends_in_order(
    number: signal.Signals, in_background: bool
):
    heard = signal.SIG_IGN if in_background else signal.default_int_handler  # as shells do with &
    process = subprocess.Popen(
        [sys.executable, "-c", STARTING],
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, heard),
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    out, _ = process.communicate(timeout=60)
    assert out == "interrupted: what was started is ended; once more ends it at once\nTrue\n"
    assert process.returncode == 130


def test_ctrl_c_while_a_run_starts_is_said_also_while_the_main_thread_holds_what_saying_takes():
    lock, said = threading.Lock(), []

    def say(line):
        with lock:
            said.append(line)

    before = signal.signal(signal.SIGINT, lambda *signal: None)
    try:
        with acknowledging(say), lock:
            signal.raise_signal(signal.SIGINT)
        assert len(said) == 1
    finally:
        signal.signal(signal.SIGINT, before)
