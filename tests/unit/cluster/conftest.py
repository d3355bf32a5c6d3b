"""Processes and answers that a test plays by hand."""

from concurrent.futures import Future
from threading import Timer

import pytest

from rallypoint.cluster.call import Call
from rallypoint.cluster.process import Invocation, ProcessInfo, Pulse


class FakePending:
    """What one rank will answer, once the test says so."""

    def __init__(self, process, rank, number):
        self.process, self.handle = process, Future()
        self.invocation = Invocation(number, process.role, rank, "work", True, step=3)
        self.num_cancels = 0

    def future(self):
        return self.handle

    def error(self, raised):
        return raised

    def cancel(self):
        self.num_cancels += 1


class FakeProcess:
    """A process that answers its pulse with what the test has set, or not at all when it is `stopped`."""

    def __init__(self, watch, pid, role="actor"):
        self.info, self.watch = ProcessInfo("node-a", "A", pid), watch
        self.role, self.roles = role, {role: pid % 10}
        self.progress, self.executing, self.stopped = 0, None, False
        self.notes = []
        self.killed, self.num_asked, self.owes = None, 0, []
        self.dies_after_s = 0.0
        self.gone = None

    def pulse(self):
        self.num_asked += 1
        answer = Future()
        if self.gone is not None:
            answer.set_exception(self.gone)
        elif not self.stopped:
            answer.set_result(Pulse(self.progress, self.executing, tuple(self.notes)))
            self.notes = []
        return answer

    def kill(self, why):
        self.killed = why
        if self.dies_after_s:
            timer = Timer(self.dies_after_s, self.die, [why])
            timer.daemon = True
            timer.start()
        else:
            self.die(why)

    def die(self, why):
        for one in self.owes:
            if not one.handle.done():
                one.handle.set_exception(why)

    def __repr__(self):
        return f"process {self.info.pid}"


class Notes:
    """A watch that only notes what it is to look after."""

    def __init__(self):
        self.calls = []

    def add(self, call):
        self.calls.append(call)

    def remove(self, call):
        if call in self.calls:
            self.calls.remove(call)


class Stage:
    """Makes processes and calls."""

    def __init__(self):
        self.watch, self.number = Notes(), 0

    def processes(self, *pids, role="actor"):
        return [FakeProcess(self.watch, pid, role) for pid in pids]

    def call(self, processes, *, join=list, deadline_s=None, sources=()):
        """One call on these processes, all of which answer."""
        self.number += 1
        pending = [FakePending(process, rank, self.number) for rank, process in enumerate(processes)]
        for process, one in zip(processes, pending, strict=True):
            process.owes.append(one)
        return Call(pending, range(len(pending)), join, deadline_s, sources)


@pytest.fixture
def stage():
    return Stage()
