"""Who is found to hang, by an injected clock and processes that the test plays."""

import threading
from concurrent.futures import Future

import pytest

from rallypoint.cluster.process import Invocation
from rallypoint.cluster.watch import HangDetector, Watchdog
from rallypoint.errors import RallyError, RayLostError, WorkerHungError


class Clock:
    """Seconds that go by when the test says so."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


class Ward:
    """A detector over some processes, looked at once a second."""

    def __init__(self, stage, folder, processes, silence_s=10.0):
        self.processes, self.clock, self.saved, self.told = processes, Clock(), [], []
        self.lost, self.deaths = None, []
        self.detector = HangDetector(
            processes=lambda: [process for process in self.processes if process.killed is None],
            silence_s=silence_s,
            save_stacks=self.save,
            folder=folder,
            ground=lambda: self.lost,
            say=self.told.append,
            died=lambda process, error: self.deaths.append((process.info.pid, error)),
            clock=self.clock,
        )
        for process in processes:
            process.watch = self.detector

    def save(self, processes, file):
        self.saved.append(list(processes))
        return f"stacks in {file.name}"

    def pass_s(self, seconds, *, moving=()):
        """Let time go by, in beats; processes that move make progress in each."""
        for _ in range(seconds):
            self.clock.now += 1
            for process in moving:
                process.progress += 1
            self.detector.look()

    def wait_for(self, call):
        call._begin()
        return call


@pytest.fixture
def ward(stage, tmp_path):
    def make(*pids, **settings):
        return Ward(stage, tmp_path / "logs", stage.processes(*pids), **settings)

    return make


def executes(process, call):
    process.executing = next(one.invocation for one in call.pending if one.process is process)


def killed(processes):
    return [process.info.pid for process in processes if process.killed is not None]


def test_nobody_is_asked_while_nobody_waits(ward, stage):
    it = ward(1, 2)
    it.pass_s(5)
    call = it.wait_for(stage.call(it.processes))
    it.pass_s(5)
    assert [process.num_asked for process in it.processes] == [5, 5], "one question at a time"
    for one in call.pending:
        one.handle.set_result(None)
    it.pass_s(5)
    assert [process.num_asked for process in it.processes] == [5, 5]


def test_a_host_without_a_pulse_is_ended_after_its_time_with_everybodys_stacks(ward, stage):
    it = ward(1, 2, 3)
    call = it.wait_for(stage.call(it.processes))
    it.pass_s(3)
    it.processes[1].stopped = True
    it.pass_s(11)
    assert killed(it.processes) == []
    it.pass_s(1)
    assert killed(it.processes) == [2]
    assert it.saved == [it.processes], "the stacks of all, once"
    with pytest.raises(WorkerHungError) as caught:
        call.result()
    error = caught.value
    assert (error.role, error.rank, error.call, error.pid, error.node, error.step) == (
        "actor",
        1,
        "work",
        2,
        "node-a",
        3,
    )
    assert error.num_cancelled == 2
    assert "gave no sign of life for 10 s; stacks in stacks-" in error.detail
    assert (it.detector._folder).is_dir()


def test_an_answer_that_comes_late_but_comes_is_a_sign_of_life(ward, stage):
    it = ward(1)
    it.wait_for(stage.call(it.processes))
    it.processes[0].stopped = True
    it.pass_s(9)
    asked = it.detector._health[it.processes[0]].asked
    it.processes[0].stopped = False
    asked.set_result(it.processes[0].pulse().result())
    it.pass_s(20)
    assert killed(it.processes) == []


def test_all_that_are_silent_are_named(ward, stage):
    it = ward(1, 2, 3)
    call = it.wait_for(stage.call(it.processes))
    for process in it.processes[:2]:
        process.stopped = True
    it.pass_s(12)
    assert killed(it.processes) == [1, 2]
    with pytest.raises(WorkerHungError, match=r"hung in work at step 3 .*so did pid 2 on node-a; stacks in"):
        call.result()


def test_of_several_the_first_rank_is_named_however_late_its_end_is_heard_of(ward, stage):
    it = ward(1, 2, 3)
    call = it.wait_for(stage.call(it.processes))
    for process in it.processes[:2]:
        process.stopped = True
    it.processes[0].dies_after_s = 0.2
    it.pass_s(12)
    with pytest.raises(WorkerHungError) as caught:
        call.result()
    assert (caught.value.rank, caught.value.pid) == (0, 1)


def test_calls_on_healthy_hosts_go_on_beside_one_that_hangs(ward, stage):
    it = ward(1, 2)
    hung, healthy = it.wait_for(stage.call(it.processes[:1])), it.wait_for(stage.call(it.processes[1:]))
    it.processes[0].stopped = True
    it.pass_s(12)
    with pytest.raises(WorkerHungError):
        hung.result()
    it.pass_s(30)
    assert killed(it.processes) == [1]
    healthy.pending[0].handle.set_result(1)
    assert healthy.result() == [1]


def test_a_silent_host_that_owes_nothing_is_ended_too_and_says_what_it_was(ward, stage):
    """Others may wait for it inside of their calls, in a collective operation."""
    it = ward(1, 2)
    it.wait_for(stage.call(it.processes[:1]))
    it.processes[1].stopped = True
    it.pass_s(12)
    assert killed(it.processes) == [2]
    assert str(it.processes[1].killed).startswith(
        "actor rank 2 (pid 2, node node-a) hung in waiting for calls: gave no sign"
    )


def test_a_host_that_died_is_not_silent(ward, stage):
    it = ward(1)
    it.wait_for(stage.call(it.processes))

    def unanswered():
        answer = Future()
        answer.set_exception(RuntimeError("the process is gone"))
        return answer

    it.pass_s(1)
    it.processes[0].pulse = unanswered
    it.pass_s(30)
    assert killed(it.processes) == []


def test_a_call_without_progress_is_ended_at_its_deadline(ward, stage):
    it = ward(1, 2)
    call = it.wait_for(stage.call(it.processes, deadline_s=20))
    executes(it.processes[0], call)
    call.pending[1].handle.set_result(None)
    it.pass_s(20)
    assert killed(it.processes) == []
    it.pass_s(2)
    assert killed(it.processes) == [1]
    with pytest.raises(WorkerHungError, match=r"rank 0 .*made no progress for 20 s, the deadline of actor.work; "):
        call.result()


def test_progress_of_any_rank_keeps_a_call_alive(ward, stage):
    it = ward(1, 2)
    call = it.wait_for(stage.call(it.processes, deadline_s=5))
    for process in it.processes:
        executes(process, call)
    it.pass_s(100, moving=it.processes[1:])
    assert killed(it.processes) == []
    it.pass_s(7)
    assert killed(it.processes) == [1, 2]


def test_without_a_deadline_a_slow_call_is_never_ended(ward, stage):
    it = ward(1)
    call = it.wait_for(stage.call(it.processes))
    executes(it.processes[0], call)
    it.pass_s(10_000)
    assert killed(it.processes) == []


def test_the_one_who_is_busy_is_to_blame_and_not_the_one_who_waits_for_its_turn(ward, stage):
    it = ward(1, 2)
    call = it.wait_for(stage.call(it.processes, deadline_s=5))
    executes(it.processes[1], call)
    it.pass_s(7)
    assert killed(it.processes) == [2]


def test_who_waits_for_another_groups_result_is_not_to_blame(ward, stage):
    """The producer is not waited for itself, only the consumer is."""
    it = ward(1, 2)
    producing = stage.call(it.processes[:1])
    executes(it.processes[0], producing)
    consuming = it.wait_for(stage.call(it.processes[1:], deadline_s=5, sources=producing.reference.makers))
    it.pass_s(20, moving=it.processes[:1])
    assert killed(it.processes) == [], "the producer gets on"
    it.pass_s(7)
    assert killed(it.processes) == [1]
    assert not consuming.pending[0].handle.done(), "its runtime tells the consumer"
    assert it.processes[0].killed.call == "work"


def test_a_busy_stranger_is_left_alone(ward, stage):
    it = ward(1, 2)
    executes(it.processes[1], it.wait_for(stage.call(it.processes[1:])))
    it.wait_for(stage.call(it.processes[:1], deadline_s=5))
    it.pass_s(7)
    assert killed(it.processes) == [1]


def test_the_call_that_is_executed_is_named_and_not_one_that_is_queued(ward, stage):
    it = ward(1)
    first, second = it.wait_for(stage.call(it.processes)), it.wait_for(stage.call(it.processes))
    executes(it.processes[0], second)  # as an old pulse may say
    it.pass_s(1)
    it.processes[0].executing = Invocation(1, "actor", 0, "first", True)
    it.pass_s(2)
    it.processes[0].stopped = True
    it.pass_s(12)
    for call in (first, second):
        with pytest.raises(WorkerHungError, match="hung in first"):
            call.result()


def test_time_in_which_the_driver_stood_still_is_held_against_nobody(ward, stage):
    it = ward(1, 2)
    it.processes[1].stopped = True
    call = it.wait_for(stage.call(it.processes, deadline_s=60))
    executes(it.processes[0], call)
    it.pass_s(2)
    it.clock.now += 3600
    it.pass_s(5)
    assert killed(it.processes) == []
    it.pass_s(5)
    assert killed(it.processes) == [2], "what is silent after it is found all the same"


def test_a_wait_after_a_long_rest_begins_anew(ward, stage):
    it = ward(1)
    call = it.wait_for(stage.call(it.processes))
    it.pass_s(1)
    call.pending[0].handle.set_result(None)
    it.pass_s(1)
    it.clock.now += 3600
    executes(it.processes[0], it.wait_for(stage.call(it.processes, deadline_s=10)))
    it.pass_s(10)
    assert killed(it.processes) == []
    it.pass_s(4)
    assert killed(it.processes) == [1]


@pytest.mark.parametrize("error", [OSError("disk full"), RallyError("no")])
def test_stacks_that_cannot_be_saved_hinder_nothing(ward, stage, error):
    it = ward(1)
    call = it.wait_for(stage.call(it.processes))

    def save(processes, file):
        raise error

    it.detector._save_stacks = save
    it.processes[0].stopped = True
    it.pass_s(12)
    with pytest.raises(WorkerHungError, match=f"their stacks could not be saved: {error}"):
        call.result()


def test_the_watchdog_looks_in_beats_while_somebody_waits_and_ends_when_told(stage, tmp_path):
    looked = threading.Event()

    class Seen(HangDetector):
        beat_s = 0.01

        def look(self):
            looked.set()

    detector = Seen(processes=list, silence_s=0.03, save_stacks=lambda processes, file: "", folder=tmp_path)
    watchdog = Watchdog(detector)
    assert not looked.wait(0.05), "nobody waits"
    call = stage.call(stage.processes(1))
    watchdog.add(call)
    assert looked.wait(10)
    watchdog.remove(call)
    assert detector.is_idle
    watchdog.stop()
    watchdog.stop()


def test_all_calls_end_with_what_all_hosts_stand_on(ward, stage):
    it = ward(1, 2)
    calls = [it.wait_for(stage.call([process])) for process in it.processes]
    it.pass_s(3)
    it.lost = RayLostError("the raylet is gone")
    it.pass_s(1)
    for call in calls:
        with pytest.raises(RayLostError, match="the raylet is gone"):
            call.result()
    assert killed(it.processes) == [], "they are not to blame"
    assert it.detector.is_idle


def test_a_call_ends_with_its_host_even_if_the_runtime_never_hears_of_its_end(ward, stage):
    it = ward(1)
    call = it.wait_for(stage.call(it.processes))
    it.processes[0].stopped, it.processes[0].dies_after_s = True, 10_000.0
    it.detector.beat_s = 0.4  # how long it waits for the runtime
    it.pass_s(12)
    with pytest.raises(WorkerHungError, match="gave no sign of life for 10 s"):
        call.result()


def test_what_workers_say_is_told_with_the_next_pulse(ward, stage):
    it = ward(1)
    it.wait_for(stage.call(it.processes))
    it.processes[0].notes = ["waiting for a server"]
    it.pass_s(3)
    assert it.told == ["waiting for a server"]


def test_a_process_that_died_while_nobody_waits_for_it_is_told_of_and_one_that_is_waited_for_fails_by_its_call(
    ward, stage
):
    it = ward(1, 2, 3)
    it.wait_for(stage.call(it.processes[:2]))
    it.pass_s(2)
    assert it.deaths == []
    for process in it.processes[1:]:
        process.gone = RuntimeError(f"{process.info.pid} is dead")
    it.pass_s(2)
    assert {pid for pid, _ in it.deaths} == {3}
    assert str(it.deaths[0][1]) == "3 is dead"
    assert killed(it.processes) == []
