"""One process of a pool: what it answers, what becomes of exceptions, and what an interruption stops."""

import contextlib
import os
import pickle
import re
import subprocess
import sys
import threading
import time

import pytest

from rallypoint.cluster import Mesh
from rallypoint.cluster.process import Invocation, Pulse, WorkerProcess
from rallypoint.errors import CallCancelledError, PeerFailedError, RewardError, WorkerError

MESH = Mesh({"dp": 2})


class OddError(Exception):
    """Cannot be built from its `args`, pickled, or printed."""

    def __init__(self, *, reason):
        super().__init__()
        self.lock, self.reason = threading.Lock(), reason

    def __str__(self):
        raise RuntimeError("no text for you")


class Worker:
    """Does what it is told."""

    def __init__(self, context, fail=False):
        if fail:
            raise ValueError("not made")
        self.context, self.started, self.closed = context, threading.Event(), 0
        context.shared[f"{context.role}/name"] = context.role

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self.closed += 1

    def do(self, work, *args):
        return work(*args)

    def ticks(self, times):
        for _ in range(times):
            self.context.tick()

    def spin(self):
        self.started.set()
        while True:
            time.sleep(0.001)


@pytest.fixture
def process():
    return WorkerProcess(num_cpus=1, device="cpu")


class Driver:
    """Calls with rising numbers, as a group does."""

    def __init__(self, process, role="actor"):
        self.process, self.role, self.number = process, role, 0
        process.create(self.invocation("__init__"), Worker, MESH, (), {})

    def invocation(self, method, answers=True):
        self.number += 1
        return Invocation(self.number, self.role, 1, method, answers, step=7)

    def do(self, work, *args):
        return self.process.call(self.invocation("do"), (work, *args), {})


def failure(driver, work, *args):
    with pytest.raises(WorkerError) as caught:
        driver.do(work, *args)
    return pickle.loads(pickle.dumps(caught.value))


def test_a_result_that_nobody_wants_stays_where_it_is(process):
    driver = Driver(process)
    assert process.call(driver.invocation("do"), (lambda: 3,), {}) == 3
    assert process.call(driver.invocation("do", answers=False), (lambda: 3,), {}) is None


def test_an_invocation_travels_as_bytes():
    it = Invocation(5, "actor", 1, "train", True, None)
    assert Invocation.unpacked(it.packed()) == it


def test_an_error_names_everything_and_shows_the_frames_of_the_worker_only(process):
    def raises():
        raise KeyError("missing")

    error = failure(Driver(process), raises)
    assert (error.role, error.rank, error.call, error.step, error.pid) == ("actor", 1, "do", 7, os.getpid())
    assert error.cause == "KeyError: 'missing'"
    assert re.match(
        rf"actor rank 1 \(pid {os.getpid()}, node .+\) failed in do at step 7: KeyError: 'missing'\n\nTraceback",
        str(error),
    )
    assert "in raises" in error.remote_traceback
    assert "cluster/process.py" not in error.remote_traceback


def test_errors_of_ours_speak_for_themselves_and_a_consequence_is_marked(process):
    driver = Driver(process)

    def raises(error):
        raise error

    assert failure(driver, raises, RewardError("the file is gone")).cause == "the file is gone"
    assert not failure(driver, raises, RewardError("")).is_consequence
    assert failure(driver, raises, PeerFailedError("rank 0")).is_consequence


def test_an_exception_that_cannot_be_pickled_built_or_printed_still_arrives(process):
    def raises():
        raise OddError(reason="odd")

    error = failure(Driver(process), raises)
    assert "OddError" in error.cause
    assert "in raises" in error.remote_traceback


def test_notes_and_causes_arrive_too(process):
    def raises():
        try:
            int("first")
        except ValueError as first:
            second = TypeError("second")
            second.add_note("row 3")
            raise second from first

    error = failure(Driver(process), raises)
    assert error.cause == "TypeError: second\nrow 3"
    assert "ValueError: invalid literal" in error.remote_traceback


def test_a_recursion_without_end_is_an_error_of_readable_size(process):
    def one(depth):
        return other(depth + 1)

    def other(depth):
        return one(depth + 1)

    error = failure(Driver(process), one, 0)
    assert error.cause.startswith("RecursionError: maximum recursion depth exceeded")
    assert len(error.remote_traceback) < 25_000


def test_of_an_endless_message_the_middle_is_left_out(process):
    def raises():
        raise ValueError("begin " + "x" * 10_000_000 + " end")

    error = failure(Driver(process), raises)
    assert error.cause.startswith("ValueError: begin xxx")
    assert error.cause.endswith("xxx end")
    assert re.search(r"\n\.\.\. \d+ characters left out \.\.\.\n", error.cause)
    assert len(str(error)) < 50_000


@pytest.mark.parametrize("kind", [KeyboardInterrupt, GeneratorExit, BaseException])
def test_other_things_that_are_raised_are_errors_as_well(process, kind):
    def raises():
        raise kind("now")

    assert failure(Driver(process), raises).cause == f"{kind.__name__}: now"


def test_asking_for_the_end_of_the_process_is_left_to_who_runs_it(process):
    driver = Driver(process)
    with pytest.raises(SystemExit):
        driver.do(sys.exit, 3)
    assert process.pulse().call is None


def test_a_constructor_that_fails_leaves_no_worker(process):
    driver = Driver(process)
    with pytest.raises(WorkerError, match=r"critic rank 0 .* failed in __init__: ValueError: not made"):
        process.create(Invocation(100, "critic", 0, "__init__", False), Worker, MESH, (), {"fail": True})
    with pytest.raises(WorkerError, match="there is no critic here any more"):
        process.call(Invocation(101, "critic", 0, "do", True), (print,), {})
    assert driver.do(lambda: 1) == 1


def test_roles_named_alike_in_part_keep_apart(process):
    actor, rollout = Driver(process, "actor"), Driver(process, "actor_rollout")
    workers = {}
    for driver in (actor, rollout):
        driver.number += 1000 * (driver is rollout)
        workers[driver.role] = process._workers[driver.role]
    shared = workers["actor"].context.shared
    assert shared == {"actor/name": "actor", "actor_rollout/name": "actor_rollout"}
    process.retire(actor.invocation("__exit__"))
    assert shared == {"actor_rollout/name": "actor_rollout"}
    assert (workers["actor"].closed, workers["actor_rollout"].closed) == (1, 0)
    assert rollout.do(lambda: "there") == "there"
    assert "no actor here any more: its group was shut down" in failure(actor, print).cause
    process.retire(actor.invocation("__exit__"))
    assert workers["actor"].closed == 1, "once"


def test_pulse_tells_what_is_executed_and_whether_it_gets_on(process):
    driver = Driver(process)
    seen = []
    before = process.pulse().progress
    driver.do(lambda: seen.append(process.pulse()))
    driver.process.call(driver.invocation("ticks"), (5,), {})
    assert seen == [Pulse(before + 1, Invocation(2, "actor", 1, "do", True, 7))]
    assert process.pulse() == Pulse(before + 2 + 7, None)


def test_what_a_worker_says_is_told_once_with_its_name_and_of_too_much_the_newest(process):
    driver = Driver(process)
    worker = process._workers[driver.role]
    worker.context.say("waiting for a server")
    assert process.pulse().notes == ("actor rank 1: waiting for a server",)
    assert process.pulse().notes == ()
    for number in range(1000):
        worker.context.say(str(number))
    notes = process.pulse().notes
    assert len(notes) < 1000
    assert notes[-1] == "actor rank 1: 999"


def interrupted(process, driver, after_s=0.0, then=lambda: None):
    """Interrupt a call that spins, some time after it began, and do something then; return what it raised."""
    worker, raised = process._workers[driver.role], []
    it = driver.invocation("spin")

    def run():
        try:
            process.call(it, (), {})
        except CallCancelledError as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    worker.started.wait(60)
    time.sleep(after_s)
    process.interrupt(it.number)
    then()
    thread.join(60)
    return raised


def test_a_loop_in_python_stops_soon_after_it_was_interrupted(process):
    driver = Driver(process)
    (error,) = interrupted(process, driver)
    assert str(error) == "actor.spin"
    assert process.pulse().call is None
    assert driver.do(lambda: "next") == "next"


def test_a_worker_that_catches_every_exception_does_not_swallow_a_cancellation(process):
    driver = Driver(process)
    worker = process._workers[driver.role]

    def spin_on():
        try:
            type(worker).spin(worker)
        except Exception:  # noqa: BLE001 - as careless workers do
            return "went on with another way, as after an error of torch's"

    worker.spin = spin_on
    (error,) = interrupted(process, driver)
    assert str(error) == "actor.spin"
    assert driver.do(lambda: "next") == "next"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_cancellation_that_python_drops_in_a_destructor_comes_again(process):
    driver = Driver(process)
    worker, dropped = process._workers[driver.role], []

    class Slow:
        def __del__(self):
            try:
                type(worker).spin(worker)
            finally:
                dropped.append(1)

    def spin():
        Slow()
        while True:
            time.sleep(0.001)

    worker.spin = spin
    (error,) = interrupted(process, driver)
    assert (str(error), dropped) == ("actor.spin", [1])
    assert driver.do(lambda: "next") == "next"


@pytest.mark.parametrize("way", ["finally", "with", "a handler of another error"])
def test_what_a_cancelled_call_does_to_end_is_not_cancelled_again(process, way):
    driver = Driver(process)
    worker, ended = process._workers[driver.role], []

    def end():
        for _ in range(300):  # several times as long as a cancelled call is left alone
            time.sleep(0.001)
        ended.append(1)

    class Closing:
        def __enter__(self):
            return self

        def __exit__(self, *exc_info):
            end()

    def spin():
        if way == "with":
            with Closing():
                type(worker).spin(worker)
        try:
            type(worker).spin(worker)
        finally:
            if way == "finally":
                end()
            try:
                int("no number")
            except ValueError:
                end()

    worker.spin = spin
    (error,) = interrupted(process, driver)
    assert str(error) == "actor.spin"
    assert ended
    assert driver.do(lambda: "next") == "next"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_call_that_starts_threads_stops_and_the_threads_are_not_hit(process):
    """As a rank that reads a model's files does while another rank finds that they are broken."""
    driver = Driver(process)
    worker, begun, ran = process._workers[driver.role], [], []

    def start_threads():
        while True:
            begun.append(threading.Thread(target=lambda: ran.append(1)))
            worker.started.set()
            begun[-1].start()

    worker.spin = start_threads
    for turn in range(40):
        (error,) = interrupted(process, driver, after_s=turn % 8 * 0.0004)
        assert str(error) == "actor.spin"
        worker.started.clear()
    started = [thread for thread in begun if thread.ident is not None]
    for thread in started:
        thread.join(10)
    assert len(ran) == len(started)


class SlowToStart(threading.Thread):
    """Its start lasts until it may go on."""

    def __init__(self):
        super().__init__(daemon=True)
        self.may_go_on = threading.Event()

    def _bootstrap_inner(self):
        self.may_go_on.wait(60)
        super()._bootstrap_inner()


def test_a_thread_whose_start_lasts_delays_a_cancellation_and_keeps_nobody_waiting(process):
    driver, slow = Driver(process), SlowToStart()
    worker = process._workers[driver.role]

    def spin():
        worker.started.set()
        while True:
            pass

    worker.spin = spin
    starting = threading.Thread(target=slow.start)
    starting.start()
    (error,) = interrupted(process, driver, then=slow.may_go_on.set)
    assert str(error) == "actor.spin"
    starting.join(10)
    assert not starting.is_alive()


def test_a_call_that_was_cancelled_before_it_began_never_does(process):
    driver = Driver(process)
    done = []
    it = driver.invocation("do")
    process.interrupt(it.number)
    with pytest.raises(CallCancelledError):
        process.call(it, (done.append, 1), {})
    assert done == []
    driver.do(done.append, 2)
    assert done == [2]


def test_an_interruption_never_hits_the_next_call(process):
    """Interrupt many calls just when they end: each is either whole or cancelled, and what follows is untouched."""
    driver = Driver(process)
    numbers, stop = [], threading.Event()

    def interrupt():
        while not stop.is_set():
            if numbers:
                process.interrupt(numbers[-1])

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        for _ in range(300):
            it = driver.invocation("do")
            numbers.append(it.number)
            with contextlib.suppress(CallCancelledError):
                assert process.call(it, (lambda: 1,), {}) == 1
            numbers.append(0)
            assert driver.do(lambda: sum(range(100))) == 4950
    finally:
        stop.set()
        thread.join(10)


TRACED_AFTERWARDS = """
import contextlib, sys, threading
from rallypoint.cluster import Mesh
from rallypoint.cluster.process import Invocation, WorkerProcess
from rallypoint.errors import CallCancelledError

class Worker:
    def __init__(self, context): pass
    def nothing(self): pass
    def interrupted_at_its_end(self):
        while process._insisting is None: pass

process = WorkerProcess(1, "cpu")
process.create(Invocation(0, "actor", 0, "__init__", False), Worker, Mesh({"dp": 1}), (), {})
for number in range(1, 30):
    process.call(Invocation(number, "actor", 0, "nothing", True), (), {})
    it = Invocation(1000 + number, "actor", 0, "interrupted_at_its_end", True)
    def interrupt():
        while process._running is not it: pass
        process.interrupt(it.number)
    interrupting = threading.Thread(target=interrupt)
    interrupting.start()
    with contextlib.suppress(CallCancelledError):
        process.call(it, (), {})
    interrupting.join()

def traced():
    return sum(range(3))

sys.settrace(lambda *event: None)
traced()
sys.settrace(None)
print("traced")
"""


def test_what_traces_after_calls_whole_or_cancelled_comes_to_an_end():
    """In a process of its own, for what fails here cannot be ended in another way."""
    ended = subprocess.run(
        [sys.executable, "-c", TRACED_AFTERWARDS], capture_output=True, text=True, timeout=180, check=False
    )
    assert ended.stdout == "traced\n", ended.stderr
