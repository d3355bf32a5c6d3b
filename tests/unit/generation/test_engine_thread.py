"""An engine in a thread of its own, asked by many threads at once, whichever engine it is."""

import copy
import dataclasses
import queue
import threading
import weakref

import pytest
import torch
from sampling_cases import outputs_of

from rallypoint.errors import GenerationError, WeightsMismatchError
from rallypoint.generation import EngineThread, HFEngine, NativeEngine, Request, stream

LENGTHS = [3, 9, 1, 17]


def test_requests_of_many_threads_get_their_own_outputs(engine, params):
    requests = [
        Request(tokens=(3, 4 + place % 3), params=params, sample_index=place, streamed=True) for place in range(12)
    ]
    expected = [[token for output in stream(engine, request) for token in output.tokens] for request in requests]
    found = [[] for _ in requests]
    thread = EngineThread(engine)

    def ask(place):
        for output in outputs_of(thread, requests[place]):
            found[place].extend(output.tokens)

    askers = [threading.Thread(target=ask, args=[place]) for place in range(len(requests))]
    for asker in askers:
        asker.start()
    for asker in askers:
        asker.join()
    thread.close()
    assert found == expected


def test_a_thread_makes_changes_between_steps_and_hands_their_errors_back(engine, params):
    thread = EngineThread(engine)
    request = Request(tokens=(3, 4), params=params)
    expected = [token for output in outputs_of(thread, request) for token in output.tokens]
    thread.call(lambda engine: engine.sleep())
    outputs = []
    finished = threading.Event()

    def deliver(output):
        outputs.append(output)
        if output.finish_reason:
            finished.set()

    thread.submit(request, deliver)
    with pytest.raises(WeightsMismatchError):
        thread.call(lambda engine: engine.load(5, {}))
    assert outputs == []
    thread.call(lambda engine: engine.wake())
    finished.wait()
    thread.close()
    assert [token for output in outputs for token in output.tokens] == expected
    with pytest.raises(GenerationError, match="closed"):
        thread.submit(request, outputs.append)


def test_requests_that_came_while_the_engine_slept_are_answered_whenever_it_is_woken(make_policy, params):
    engine = NativeEngine(make_policy())
    thread = EngineThread(engine)
    request = Request(tokens=(3, 4), params=dataclasses.replace(params, max_new_tokens=1))
    for _ in range(50):
        ended = threading.Event()
        thread.call(lambda engine: engine.sleep())
        thread.submit(request, lambda output, ended=ended: ended.set())
        thread.call(lambda engine: engine.wake())
        ended.wait()
    thread.close()


def test_requests_of_an_engine_that_breaks_fail_instead_of_waiting_for_ever(make_policy, params):
    class Broken(HFEngine):
        def step(self):
            raise OSError("out of order\nwith more to say")

    heard = []
    thread = EngineThread(Broken(make_policy()), on_failure=lambda failure: heard.append(str(failure.__cause__)))
    with pytest.raises(GenerationError, match=r"its requests are lost: OSError: out of order$"):
        list(outputs_of(thread, Request(tokens=(3, 4), params=params)))
    thread.close()
    assert thread.has_failed
    with pytest.raises(GenerationError, match=r"given up: OSError: out of order$"):
        thread.submit(Request(tokens=(3, 4), params=params), print)
    assert heard == ["out of order\nwith more to say"] * 2


@pytest.fixture
def failing(make_policy):
    """A policy, and errors that its coming passes raise, None for a pass that goes well."""
    model, errors = copy.deepcopy(make_policy()), []

    def fail(module, args):
        if errors and (error := errors.pop(0)) is not None:
            raise error

    model.base_model.register_forward_pre_hook(fail)
    return model, errors


def test_a_step_that_fails_costs_the_requests_under_way_and_the_engine_goes_on(failing, params):
    model, errors = failing
    endless = dataclasses.replace(params, stop_tokens=())
    requests = [Request(tokens=(3, 4 + n), params=endless, sample_index=n) for n in range(3)]
    expected = [[token for output in stream(NativeEngine(model), one) for token in output.tokens] for one in requests]
    engine = NativeEngine(model)
    thread = EngineThread(engine)
    for num_passes in (1, 2, 3):
        thread.call(lambda engine: engine.sleep())
        lost, ended = [], threading.Event()

        def deliver(output, lost=lost, ended=ended):
            lost.append(output)
            if len(lost) == 3:
                ended.set()

        for request in requests:
            thread.submit(request, deliver)
        errors[:] = [None] * (num_passes - 1) + [MemoryError("of the model")]
        thread.call(lambda engine: engine.wake())
        ended.wait()
        assert {str(output.error) for output in lost} == {
            "the engine failed and its requests are lost: MemoryError: of the model"
        }
        for request, tokens in zip(requests, expected, strict=True):
            assert [token for output in outputs_of(thread, request) for token in output.tokens] == tokens
    thread.close()
    assert not thread.has_failed
    assert not engine.has_work


def test_an_engine_is_given_up_when_it_cannot_answer_us_either(failing, params):
    model, errors = failing
    engine = NativeEngine(model)
    thread = EngineThread(engine)
    request = Request(tokens=(3, 4), params=params)
    assert list(outputs_of(thread, request))
    errors += [MemoryError("of the model")] * 2
    with pytest.raises(GenerationError, match="are lost: MemoryError: of the model"):
        list(outputs_of(thread, request))
    with pytest.raises(GenerationError, match="is given up: MemoryError: of the model"):
        list(outputs_of(thread, request))
    thread.close()


class Picky(HFEngine):
    """An engine that fails for requests of some length, and remembers by weak references what it computed for them."""

    def __init__(self, model):
        super().__init__(model)
        self.computed, self.alive = [], []

    def step(self):
        self.alive.append([one() is not None for one in self.computed])
        if any(len(request.tokens) > 3 and number not in self._cancelled for number, request in self._waiting.items()):
            activations = torch.zeros(3)
            self.computed.append(weakref.ref(activations))
            raise MemoryError("no room")
        return super().step()


def test_requests_that_an_engine_cannot_bear_never_end_it_and_leave_nothing_in_memory(make_policy, params):
    engine, heard = Picky(make_policy()), []
    thread = EngineThread(engine, on_failure=heard.append)
    for _ in range(5):
        with pytest.raises(GenerationError, match="are lost: MemoryError: no room"):
            list(outputs_of(thread, Request(tokens=(3, 4, 5, 6), params=params)))
    assert list(outputs_of(thread, Request(tokens=(3, 4), params=params)))
    thread.close()
    assert not thread.has_failed
    assert (len(heard), len(engine.computed)) == (5, 5)
    assert not any(map(any, engine.alive)), "the probe has the memory already"


def test_a_step_that_fails_without_requests_does_not_end_an_engine_that_samples(failing, params):
    model, _ = failing
    engine = NativeEngine(model)
    step, errors = engine.step, [OSError("once"), None, OSError("twice")]

    def failing_step():
        if errors and (error := errors.pop(0)) is not None:
            raise error
        return step()

    engine.step = failing_step
    heard = threading.Semaphore(0)
    thread = EngineThread(engine, on_failure=lambda failure: heard.release())
    for _ in range(2):
        thread.call(lambda engine: None)
        heard.acquire()
    assert list(outputs_of(thread, Request(tokens=(3, 4), params=params)))
    assert not errors
    thread.close()
    assert not thread.has_failed


def test_an_engine_that_sleeps_is_asked_nothing_when_a_step_fails(make_policy):
    engine = HFEngine(make_policy())
    errors, heard, submitted = [OSError("burnt")], threading.Event(), []
    step = engine.step

    def submit(request: Request) -> int:
        submitted.append(request)
        return 0

    def failing_step():
        if errors:
            raise errors.pop()
        return step()

    engine.step, engine.submit = failing_step, submit
    engine.sleep()
    thread = EngineThread(engine, on_failure=lambda failure: heard.set())
    thread.call(lambda engine: None)
    heard.wait()
    thread.close()
    assert (submitted, thread.has_failed) == ([], False)


def test_who_cannot_take_a_failure_or_a_output_holds_nobody_up(failing, params):
    def raising(_):
        raise OSError("the disk is full")

    model, errors = failing
    thread = EngineThread(NativeEngine(model), on_failure=raising)
    request = Request(tokens=(3, 4), params=params)
    outputs = queue.SimpleQueue()
    for _ in range(3):
        thread.call(lambda engine: engine.sleep())
        for deliver in (raising, outputs.put):
            thread.submit(request, deliver)
        errors.append(MemoryError("of the model"))
        thread.call(lambda engine: engine.wake())
        assert "are lost" in str(outputs.get().error)
    thread.submit(request, raising)
    assert list(outputs_of(thread, request))
    thread.close()
    assert not thread.has_failed
