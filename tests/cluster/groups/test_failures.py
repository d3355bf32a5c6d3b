"""What goes wrong in workers: it is named, the others are stopped, and nothing waits for ever."""

import asyncio
import ctypes
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Self

import pytest

from rallypoint.cluster import (
    DispatchRule,
    Layout,
    RankArguments,
    ResourcePool,
    WorkerContext,
    WorkerGroup,
    at_step,
    broadcast,
    collect,
    dispatched,
    first_rank,
    scatter,
)
from rallypoint.errors import CallCancelledError, PeerFailedError, WorkerDiedError, WorkerError, WorkerHungError

SILENCE_S = 3.0
POOL = ResourcePool([3], name="main", num_cpus=0.1)

on_ray = pytest.mark.parametrize("runtime", ["ray"], indirect=True)


class OddError(Exception):
    """Cannot be pickled, nor built from what pickle would keep."""

    def __init__(self, *, reason: str) -> None:
        super().__init__(reason)
        self.lock = threading.Lock()


def recurse(depth: int) -> int:
    return recurse(depth + 1) + 1


class Worker:
    """Fails in many ways."""

    def __init__(self, context: WorkerContext, exits: bool = False) -> None:
        self.context, self.log = context, []
        if exits and context.rank == 1:
            sys.exit(4)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if "stubborn" in self.log:
            raise OSError("cannot be closed")

    @collect
    def note(self, text: str = "") -> list[str]:
        self.log += [text] * bool(text)
        return self.log

    @collect
    def pid(self) -> int:
        return os.getpid()

    @dispatched(
        DispatchRule("last", lambda mesh, args, kwargs: [None] * (mesh.size - 1) + [RankArguments(args, kwargs)], list)
    )
    def last_sleeps(self, seconds: float) -> None:
        time.sleep(seconds)

    @collect
    def sleep(self, seconds: float) -> int:
        time.sleep(seconds)
        return self.context.rank

    @broadcast
    def fail_on_first(self) -> None:
        """The first rank fails once the second one is in a loop that never ends; the others are busy elsewhere."""
        self.log.append("began")
        if self.context.rank == 0:
            time.sleep(0.2)
            raise ValueError("this is the cause")
        while True:
            time.sleep(0.001)

    @broadcast
    def fail_after_peer(self) -> None:
        if self.context.rank == 1:
            time.sleep(0.2)
            raise ValueError("this is the cause")
        raise PeerFailedError("another rank found a problem")

    @first_rank
    def fail(self, how: str) -> None:
        if how == "odd":
            raise OddError(reason="an odd one")
        if how == "interrupt":
            raise KeyboardInterrupt
        if how == "recursion":
            recurse(0)
        if how == "huge":
            raise ValueError("x" * 50_000_000)

    @first_rank
    def lock(self) -> threading.Lock:
        return threading.Lock()

    @scatter
    def take(self, item: object) -> None:
        self.log.append("took")

    @broadcast
    def exit(self, code: int) -> None:
        if self.context.rank == 1:
            sys.exit(code)

    @broadcast
    def vanish(self) -> None:
        if self.context.rank == 1:
            os._exit(5)
        time.sleep(60)

    @broadcast
    def freeze(self) -> None:
        """Rank 0 stops, rank 1 holds the interpreter, rank 2 waits for them."""
        if self.context.rank == 0:
            os.kill(os.getpid(), signal.SIGSTOP)
        elif self.context.rank == 1:
            ctypes.PyDLL(None).usleep(60_000_000)
        else:
            self.wait_for_peers()

    def wait_for_peers(self) -> None:
        time.sleep(60)

    @broadcast
    def stall(self) -> None:
        """Rank 1 makes no progress; the others are done."""
        while self.context.rank == 1:
            time.sleep(0.01)

    @broadcast
    def work_on(self, seconds: float) -> str:
        for _ in range(int(seconds / 0.1)):
            time.sleep(0.1)
            self.context.tick()
        return "done"


@pytest.fixture
def fresh(request, runtime, run):
    """A group in two processes of its own, or as many as a test asks for, which it may break."""

    async def make():
        processes = await runtime.processes(ResourcePool([getattr(request, "param", 2)], num_cpus=0.1))
        return await WorkerGroup.create(Layout("mortal", processes), Worker)

    group = run(make())
    yield group
    run(group.shutdown(patience_s=2))


@pytest.fixture(scope="module")
def group(runtime, run):
    async def make():
        return await WorkerGroup.create(Layout("actor", await runtime.processes(POOL)), Worker)

    return run(make())


def test_the_first_rank_that_fails_is_shown_and_the_others_are_stopped(group, run):
    before = run(group.call(Worker.pid))
    busy = group.call(Worker.last_sleeps, 1.0)
    with at_step(7), pytest.raises(WorkerError) as caught:
        run(group.call(Worker.fail_on_first))
    error = caught.value
    assert (error.role, error.rank, error.call, error.step, error.num_cancelled) == ("actor", 0, "fail_on_first", 7, 2)
    assert error.pid == before[0]
    assert error.node
    assert "at step 7 (calls of 2 other ranks cancelled): ValueError: this is the cause" in str(error)
    assert 'raise ValueError("this is the cause")' in error.remote_traceback
    assert run(busy) == [None]
    logs = group.call(Worker.note).result(timeout_s=60)
    assert logs == [["began"], ["began"], []], "one was stopped in its loop, and one never began"
    assert run(group.call(Worker.pid)) == before, "nobody died of it"


def test_a_consequence_never_hides_its_cause(group, run):
    with pytest.raises(WorkerError, match=r"actor rank 1 .* ValueError: this is the cause"):
        run(group.call(Worker.fail_after_peer))
    assert len(run(group.call(Worker.pid))) == 3


@pytest.mark.parametrize(
    ("how", "cause"),
    [
        ("odd", "OddError: an odd one"),
        ("interrupt", "KeyboardInterrupt"),
        ("recursion", "RecursionError: maximum recursion depth exceeded"),
        ("huge", "ValueError: xxx"),
    ],
)
def test_whatever_is_raised_arrives_in_words(group, run, how, cause):
    with pytest.raises(WorkerError) as caught:
        run(group.call(Worker.fail, how))
    assert cause in caught.value.cause
    assert "in fail" in caught.value.remote_traceback
    assert len(str(caught.value)) < 50_000
    assert group.call(Worker.pid).result(timeout_s=60), "the group lives on"


@on_ray
def test_a_result_that_cannot_be_sent_is_an_error_of_its_rank(group, run):
    with pytest.raises(
        WorkerError, match=r"actor rank 0 \(pid \d+, node .*lock: TypeError: cannot pickle '_thread.lock'"
    ):
        run(group.call(Worker.lock))


@on_ray
def test_an_argument_that_cannot_be_sent_is_refused_and_no_rank_begins(group, run):
    run(group.call(Worker.sleep, 0))
    occupied = group.call(Worker.sleep, 0.5)
    with pytest.raises(TypeError, match=r"actor.take: an argument for rank 1 cannot be sent: TypeError: cannot pickle"):
        group.call(Worker.take, [1, threading.Lock(), 3])
    with pytest.raises(
        TypeError, match=r"actor.note: an argument for rank 0 .* a reference must be an argument of its"
    ):
        group.call(Worker.note, [occupied.reference])  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"actor.sleep is a call and not its result: wait for it, or pass its `ref"):
        group.call(Worker.note, occupied)  # pyright: ignore[reportArgumentType]
    run(occupied)
    assert not any("took" in log for log in run(group.call(Worker.note)))


def test_who_stops_waiting_stops_the_ranks(group, run):
    call = group.call(Worker.fail_on_first)
    with pytest.raises(asyncio.CancelledError):
        run(_cancelled(call))
    with pytest.raises(CallCancelledError, match=r"actor.fail_on_first"):
        call.result(timeout_s=60)
    assert group.call(Worker.pid).result(timeout_s=60)


async def _cancelled(call):
    async def wait():
        await call

    waiting = asyncio.create_task(wait())
    await asyncio.sleep(0.05)
    waiting.cancel()
    await waiting


def test_a_worker_that_asks_for_its_end_gets_it_and_is_said_to_have_died(fresh, run):
    with pytest.raises(WorkerDiedError, match=r"mortal rank 1 \(pid \d+, node .*\) died during exit"):
        run(fresh.call(Worker.exit, 3))
    with pytest.raises(WorkerDiedError, match=r"mortal rank 1 .* died during"):
        run(fresh.call(Worker.note))
    run(fresh.shutdown())
    with pytest.raises((WorkerDiedError, WorkerError), match=r"mortal rank \d .*(it had been ended|shut down)"):
        run(fresh.call(Worker.note))


def test_a_constructor_that_ends_its_process_leaves_the_pool_usable(runtime, run):
    pool = ResourcePool([2], name="retry", num_cpus=0.1)

    async def make(exits):
        return await WorkerGroup.create(Layout("retry", await runtime.processes(pool)), Worker, exits=exits)

    with pytest.raises(WorkerDiedError, match=r"retry rank 1 .* died during __init__"):
        run(make(exits=True))
    again = run(make(exits=False))
    assert run(again.call(Worker.sleep, 0)) == [0, 1]
    run(again.shutdown())


@on_ray
def test_a_process_that_vanishes_is_noticed_at_once(fresh, run):
    with pytest.raises(
        WorkerDiedError, match=r"died during vanish \(calls of 1 other rank cancelled\): The actor died"
    ):
        fresh.call(Worker.vanish).result(timeout_s=30)


def test_closing_a_worker_may_fail_and_says_so_after_all_are_let_go(runtime, run):
    async def make():
        processes = await runtime.processes(ResourcePool([1], num_cpus=0.1))
        return await WorkerGroup.create(Layout("stubborn", processes), Worker)

    group = run(make())
    run(group.call(Worker.note, "stubborn"))
    with pytest.raises(WorkerError, match=r"stubborn rank 0 .* failed in __exit__: OSError: cannot be closed"):
        run(group.shutdown(patience_s=2))
    assert all(not process.roles for process in group.processes)
    run(group.shutdown(patience_s=2))


def is_gone(pid):
    """Whether a process has ended, or is about to be collected by its parent."""
    until = time.monotonic() + 30
    while time.monotonic() < until:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state in "ZX":
            return True
        time.sleep(0.05)
    return False


@on_ray
@pytest.mark.parametrize("fresh", [3], indirect=True)
@pytest.mark.skipif(sys.platform != "linux", reason="the processes are looked up in /proc")
def test_processes_that_are_stopped_or_hold_the_interpreter_are_found_and_ended(fresh, run):
    pids = run(fresh.call(Worker.pid))
    with at_step(3), pytest.raises(WorkerHungError) as caught:
        run(fresh.call(Worker.freeze))
    error = caught.value
    assert error.rank in (0, 1), "the one that was silent first"
    assert (error.role, error.call, error.step, error.pid) == ("mortal", "freeze", 3, pids[error.rank])
    assert f"gave no sign of life for {SILENCE_S:g} s; so did pid {pids[1 - error.rank]} on " in error.detail
    assert is_gone(pids[0])
    assert is_gone(pids[1])
    assert not is_gone_now(pids[2]), "the one that waited for them is healthy"
    text = Path(error.detail.rpartition(" are in ")[2]).read_text()
    assert all(f"=== pid {pid} on " in text for pid in pids)
    assert "wait_for_peers" in text
    assert text.count("freeze") >= 2, "what the one that holds the interpreter does is there too"


def is_gone_now(pid):
    return not Path(f"/proc/{pid}").exists()


def within(deadline_s, call):
    """Give a call a deadline, as the layout of its group may."""
    call.deadline_s = deadline_s
    return call


def test_a_call_without_progress_ends_at_its_deadline(fresh, run):
    with pytest.raises(WorkerHungError) as caught:
        run(within(1.0, fresh.call(Worker.stall)))
    error = caught.value
    assert (error.rank, error.call, error.num_cancelled) == (1, "stall", 0)
    assert "made no progress for 1 s, the deadline of mortal.stall" in error.detail
    text = Path(error.detail.rpartition(" are in ")[2]).read_text()
    assert "stall" in text
    with pytest.raises(WorkerHungError, match=r"mortal rank 1 .*hung in stall"):
        run(fresh.call(Worker.note))


def test_a_call_that_ticks_may_take_longer_than_its_deadline(group, run):
    assert run(within(1.0, group.call(Worker.work_on, 2.5))) == "done"


@on_ray
def test_a_slow_call_in_a_process_that_answers_is_never_ended(group, run):
    assert run(group.call(Worker.sleep, 1.2 * SILENCE_S)) == [0, 1, 2]
