"""What is asked of Ray may be lost; who asked is not."""

import asyncio
import threading

import pytest

from rallypoint.cluster.ray_daemons import Fault
from rallypoint.cluster.ray_thread import RayThread
from rallypoint.errors import RayLostError

STOPPED = Fault("Ray's raylet (pid 7) is stopped", is_gone=False, is_raylet=True)
KILLED = Fault("Ray's raylet (pid 7) was killed by signal 9", is_gone=True, is_raylet=True)
WITHOUT_GCS = Fault("Ray's GCS (pid 8) was killed by signal 9", is_gone=True, is_raylet=False)


class Clock:
    """Seconds that go by, one or as many as a test says, whenever somebody looks."""

    def __init__(self):
        self.now, self.pace_s, self.begins = 0.0, 1.0, None

    def __call__(self):
        assert self.begins is None or self.begins.wait(60)
        self.now += self.pace_s
        return self.now


class Scene:
    """A thread of which a test plays Ray's processes and the clock."""

    def __init__(self):
        self.fault, self.clock, self.said, self.noted = None, Clock(), [], []
        self.answers, self.goes_on = threading.Event(), threading.Event()
        self.ray_thread = RayThread(
            limit_s=30,
            fault=lambda: self.fault,
            note_busy=self.noted.append,
            say=self.said.append,
            clock=self.clock,
            look_s=0.001,
        )

    def wait(self):
        """A question that Ray answers when the test says so."""
        self.goes_on.set()
        assert self.answers.wait(60)
        return "an answer"


@pytest.fixture
def scene():
    scene = Scene()
    yield scene
    scene.answers.set()
    scene.ray_thread.close()


def test_an_answer_or_an_error_of_ray_comes_to_who_asked(scene):
    assert scene.ray_thread.ask("nothing", lambda: 3) == 3
    with pytest.raises(TypeError, match="no such thing"):
        scene.ray_thread.ask("an error", lambda: (_ for _ in ()).throw(TypeError("no such thing")))
    with pytest.raises(TimeoutError, match="of Ray's own"):
        scene.ray_thread.ask("an error", lambda: (_ for _ in ()).throw(TimeoutError("of Ray's own")))
    assert scene.noted == [1, 0, 2, 0, 3, 0], "the reaper sees when something is asked"


def test_who_waits_for_a_stopped_process_is_told_of_it_and_let_go_at_the_limit(scene):
    scene.fault = STOPPED
    with pytest.raises(RayLostError, match=r"raylet \(pid 7\) is stopped; this program has waited 30 s for the store"):
        scene.ray_thread.ask("the store", scene.wait)
    assert scene.said == [
        f"waiting for the store for {waited} s of 30; Ray's raylet (pid 7) is stopped" for waited in (10, 20)
    ]
    asked_again = []
    with pytest.raises(RayLostError, match="has waited 30 s for the store"):
        scene.ray_thread.ask("more", lambda: asked_again.append(1))
    assert asked_again == [], "what is lost is asked nothing more"


def test_who_waits_for_a_process_that_is_gone_is_let_go_at_once(scene):
    scene.fault = KILLED
    with pytest.raises(RayLostError, match="was killed by signal 9; this program needs it for the store"):
        scene.ray_thread.ask("the store", scene.wait)


def test_who_waits_is_let_go_when_somebody_else_finds_that_ray_is_lost(scene):
    lose = threading.Thread(target=lambda: (scene.goes_on.wait(60), scene.ray_thread.lose("Ray was lost elsewhere")))
    lose.start()
    scene.clock.pace_s = 0.0
    with pytest.raises(RayLostError, match="Ray was lost elsewhere"):
        scene.ray_thread.ask("the store", scene.wait)
    lose.join()


def test_where_nothing_is_wrong_that_can_be_seen_the_wait_is_ten_times_as_long(scene):
    with pytest.raises(RayLostError, match="Ray gives no sign of life; this program has waited 300 s for the store"):
        scene.ray_thread.ask("the store", scene.wait)


def test_time_in_which_this_process_stood_still_does_not_count(scene):
    scene.fault, scene.clock.pace_s = STOPPED, 1000.0
    with pytest.raises(RayLostError, match="waited 30 s"):
        scene.ray_thread.ask("the store", scene.wait)
    assert scene.clock.now >= 10 * 1000, "an hour between two looks is three seconds of patience"


def test_without_a_gcs_what_needs_it_is_refused_at_once_and_named_and_the_rest_is_answered(scene):
    scene.fault = WITHOUT_GCS
    asked = []
    with pytest.raises(RayLostError, match=r"GCS \(pid 8\) was killed by signal 9; this program needs it for a place"):
        scene.ray_thread.ask("a place", lambda: asked.append(1))
    assert asked == [], "it would not come back"
    assert scene.ray_thread.ask("the store", lambda: 3, needs_gcs=False) == 3
    assert scene.ray_thread.lost is None


def test_a_gcs_that_goes_while_it_is_asked_is_named_at_once(scene):
    def asks():
        scene.fault = WITHOUT_GCS
        return scene.wait()

    with pytest.raises(RayLostError, match=r"GCS .* was killed by signal 9; this program has waited \d+ s for a place"):
        scene.ray_thread.ask("a place", asks)


def test_ctrl_c_during_a_wait_for_a_stopped_raylet_is_answered_at_once_and_ends_the_wait_in_seconds(scene):
    def asks():
        scene.fault = STOPPED
        scene.ray_thread.hurry()  # as the handler of the signal does
        return scene.wait()

    scene.clock.begins = scene.goes_on  # nobody looks before the signal
    with pytest.raises(RayLostError, match="is stopped; this program has waited 3 s for the store"):
        scene.ray_thread.ask("the store", asks)
    assert scene.said == ["interrupted: waiting for the store for 1 s of 3; Ray's raylet (pid 7) is stopped"]


def test_ctrl_c_ends_calls_under_way_on_a_stopped_raylet_in_seconds(scene):
    scene.fault = STOPPED
    assert [scene.ray_thread.look() for _ in range(10)] == [None] * 10
    scene.ray_thread.hurry()
    assert "is stopped, for 11 s" in str(scene.ray_thread.look())


def test_ctrl_c_leaves_a_ray_that_is_well_its_time(scene):
    scene.ray_thread.hurry()
    with pytest.raises(RayLostError, match="has waited 300 s for the store"):
        scene.ray_thread.ask("the store", scene.wait)
    assert scene.said[0] == "interrupted: waiting for the store for 1 s of 300"


def test_before_training_begins_ctrl_c_cancels_the_task_that_asks_which_hears_of_it(scene):
    async def starts():
        task = asyncio.current_task()

        def asks():
            scene.fault = STOPPED
            task.cancel()  # as asyncio does at the first Ctrl-C
            return scene.wait()

        scene.ray_thread.ask("the store", asks)

    with pytest.raises(RayLostError, match="has waited 3 s for the store"):
        asyncio.run(starts())


def test_an_error_that_came_of_a_lost_process_names_the_process(scene):
    def fails():
        scene.fault = KILLED
        raise OSError("broken pipe")

    with pytest.raises(RayLostError, match="was killed by signal 9; this program waited for the store") as caught:
        scene.ray_thread.ask("the store", fails)
    assert isinstance(caught.value.__cause__, OSError)


def test_without_a_gcs_workers_work_on_and_that_is_said_once(scene):
    scene.fault = WITHOUT_GCS
    assert [scene.ray_thread.look() for _ in range(200)] == [None] * 200
    assert len(scene.said) == 1
    assert "GCS (pid 8) was killed by signal 9; steps go on, but nothing new can be placed" in scene.said[0]


def test_calls_under_way_end_with_a_raylet_that_is_gone_or_stays_stopped(scene):
    scene.fault = STOPPED
    assert [scene.ray_thread.look() for _ in range(29)] == [None] * 29
    scene.fault = None
    assert scene.ray_thread.look() is None, "it was continued"
    scene.fault = STOPPED
    outcomes = [scene.ray_thread.look() for _ in range(31)]
    assert outcomes[:29] == [None] * 29
    assert "is stopped, for 30 s" in str(outcomes[-1])


def test_a_raylet_that_is_gone_ends_calls_at_once(scene):
    scene.fault = KILLED
    assert "killed by signal 9" in str(scene.ray_thread.look())


def test_after_its_close_the_thread_has_ended_and_nothing_is_asked():
    before, thread = threading.enumerate(), RayThread(limit_s=60.0)
    assert thread.ask("an answer", lambda: threading.current_thread().name) == "ray"
    last = thread.put(lambda: "the last answer")
    thread.close()
    assert last.result(0) == "the last answer"
    assert threading.enumerate() == before
    with pytest.raises(RayLostError, match="has left Ray"):
        thread.ask("another", lambda: 1)
