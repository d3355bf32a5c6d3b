"""What can become of a call, with answers that the test gives by hand."""

import asyncio
import pickle
import threading

import pytest

from rallypoint.errors import CallCancelledError, PeerFailedError, WorkerDiedError, WorkerError, WorkerHungError


def failed(rank, *, is_consequence=False):
    return WorkerError("actor", rank, "work", f"cause {rank}", "Traceback", is_consequence=is_consequence)


def test_the_result_is_joined_in_rank_order_whoever_answers_first(stage):
    call = stage.call(stage.processes(1, 2, 3))
    for rank in (2, 0, 1):
        call.pending[rank].handle.set_result(rank)
    assert call.result() == [0, 1, 2]
    assert asyncio.run(_awaited(call)) == [0, 1, 2], "it can be waited for again, and otherwise"
    assert stage.watch.calls == []


async def _awaited(call):
    return await call


def test_results_that_cannot_be_joined_name_the_call(stage):
    def join(results):
        raise TypeError("not these")

    call = stage.call(stage.processes(1), join=join)
    call.pending[0].handle.set_result(0)
    with pytest.raises(TypeError, match=r"actor.work: not these"):
        call.result()


def test_the_first_rank_that_raises_ends_the_waiting_and_the_others_are_cancelled_and_counted(stage):
    call = stage.call(stage.processes(1, 2, 3))
    call.pending[1].handle.set_exception(failed(1))
    with pytest.raises(WorkerError, match=r"actor rank 1 failed in work \(calls of 2 other ranks cancelled\): cause 1"):
        call.result()
    assert [one.num_cancels > 0 for one in call.pending] == [True, False, True]
    assert stage.watch.calls == []
    call.pending[0].handle.set_exception(CallCancelledError("actor.work"))
    call.pending[2].handle.set_exception(failed(2))
    with pytest.raises(WorkerError, match="rank 1 failed"):
        call.result()


def test_an_awaited_call_fails_in_the_same_way(stage):
    call = stage.call(stage.processes(1, 2))
    call.pending[0].handle.set_exception(failed(0))
    with pytest.raises(WorkerError, match="rank 0 failed"):
        asyncio.run(_awaited(call))
    assert call.pending[1].num_cancels == 1


@pytest.mark.parametrize("consequence", [failed(0, is_consequence=True), CallCancelledError("actor.work")])
def test_a_consequence_does_not_hide_its_cause(stage, consequence):
    call = stage.call(stage.processes(1, 2))
    call.pending[0].handle.set_exception(consequence)
    threading.Timer(0.05, call.pending[1].handle.set_exception, [failed(1)]).start()
    with pytest.raises(WorkerError, match="rank 1 failed"):
        call.result()


@pytest.mark.parametrize("consequence", [failed(0, is_consequence=True), CallCancelledError("actor.work")])
def test_where_there_is_nothing_but_consequences_the_first_is_told(stage, consequence):
    call = stage.call(stage.processes(1, 2))
    call.pending[0].handle.set_exception(consequence)
    call.pending[1].handle.set_result(None)
    with pytest.raises(type(consequence)):
        call.result()
    assert stage.watch.calls == []


def test_a_wait_that_times_out_leaves_the_call_alone(stage):
    call = stage.call(stage.processes(1))
    for timeout_s in (0, 0.01):
        with pytest.raises(TimeoutError, match=rf"actor.work has no result after {timeout_s:g} s; it goes on"):
            call.result(timeout_s=timeout_s)
    assert call.pending[0].num_cancels == 0
    assert stage.watch.calls == [call], "somebody may wait for it again"
    call.pending[0].handle.set_result(1)
    assert call.result(timeout_s=0) == [1]


def test_a_timeout_of_the_worker_is_no_timeout_of_ours(stage):
    class WorkerTimeoutError(WorkerError, TimeoutError):
        """A worker's own."""

    call = stage.call(stage.processes(1))
    call.pending[0].handle.set_exception(WorkerTimeoutError("actor", 0, "work", "slow", "Traceback"))
    with pytest.raises(WorkerTimeoutError):
        call.result(timeout_s=10)


def test_who_is_cancelled_while_waiting_cancels_the_ranks(stage):
    call = stage.call(stage.processes(1, 2))
    call.pending[0].handle.set_result(0)

    async def scenario():
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(_awaited(call), timeout=0.01)

    asyncio.run(scenario())
    assert [one.num_cancels for one in call.pending] == [0, 1]


def test_several_wait_for_one_call_and_all_learn_its_end(stage):
    call = stage.call(stage.processes(1))

    async def scenario():
        waiting = [asyncio.create_task(_awaited(call)) for _ in range(2)]
        waiting.append(asyncio.create_task(asyncio.to_thread(call.result)))
        await asyncio.sleep(0)
        call.pending[0].handle.set_result(5)
        return await asyncio.gather(*waiting)

    assert asyncio.run(scenario()) == [[5]] * 3


def test_a_call_that_nobody_waits_for_is_not_looked_after(stage):
    call = stage.call(stage.processes(1))
    assert stage.watch.calls == []
    reference = call.reference
    assert reference.parts == (call.pending[0].handle,)
    assert stage.watch.calls == []


def test_a_reference_knows_all_who_must_work_for_it(stage):
    first, second = stage.processes(1, 2)
    chain = stage.call([second], sources=stage.call([first]).reference.makers)
    assert chain.reference.makers == (second, first)


@pytest.mark.parametrize(
    "error",
    [
        WorkerError("actor", 1, "train", "cause", "Traceback", step=3, pid=7, node="n", is_consequence=True),
        WorkerDiedError("actor", 1, "train", "gone", step=3, pid=7, node="n"),
        WorkerHungError("actor", 1, "train", "silent", step=3, pid=7, node="n"),
        CallCancelledError("actor.train"),
        PeerFailedError("rank 1"),
    ],
)
def test_errors_survive_pickling(error):
    if isinstance(error, WorkerError | WorkerDiedError):
        error.num_cancelled = 2
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again) == vars(error)
    assert isinstance(error, RuntimeError)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (WorkerError("a", 1, "c", "why", "Tb"), "a rank 1 failed in c: why\n\nTb"),
        (
            WorkerDiedError("a", 1, "c", "why", pid=7, node="n", step=2),
            "a rank 1 (pid 7, node n) died during c at step 2: why",
        ),
        (WorkerHungError("a", 1, "c", "why", pid=7), "a rank 1 (pid 7) hung in c: why"),
    ],
)
def test_errors_say_who_where_and_when(error, text):
    assert str(error) == text
    error.num_cancelled = 1
    assert "(calls of 1 other rank cancelled)" in str(error)
