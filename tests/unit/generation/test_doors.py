"""The ways to ask an engine, whichever it is: a batch, a stream, and a thread that many ask at once."""

import threading

import pytest

from rallypoint.errors import GenerationError, RequestError, WeightsMismatchError
from rallypoint.generation import EngineThread, HFEngine, Request, generate, stream

LENGTHS = [3, 9, 1, 17]


def test_no_door_waits_for_an_engine_that_sleeps(engine, make_prompts, params):
    engine.sleep()
    with pytest.raises(GenerationError, match="asleep"):
        generate(engine, make_prompts(LENGTHS), params, version=4)
    with pytest.raises(GenerationError, match="asleep"):
        list(stream(engine, Request(tokens=(3, 4), params=params)))
    engine.wake()
    assert not engine.has_work
    assert len(generate(engine, make_prompts([3]), params, version=4)) == params.group_size


def test_a_bad_prompt_of_a_batch_leaves_nothing_behind(engine, make_prompts, params):
    with pytest.raises(RequestError, match="prompt 9 has no tokens"):
        generate(engine, make_prompts([3, 4, 0]), params, version=4)
    for _ in range(20):
        engine.step()
    assert not engine.has_work
    assert len(generate(engine, make_prompts([3]), params, version=4)) == params.group_size


def test_requests_of_many_threads_get_their_own_pieces(engine, params):
    requests = [
        Request(tokens=(3, 4 + place % 3), params=params, sample_index=place, streamed=True) for place in range(12)
    ]
    expected = [[token for piece in stream(engine, request) for token in piece.tokens] for request in requests]
    found = [[] for _ in requests]
    thread = EngineThread(engine)

    def ask(place):
        for piece in thread.stream(requests[place]):
            found[place].extend(piece.tokens)

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
    expected = [token for piece in thread.stream(request) for token in piece.tokens]
    thread.call(lambda engine: engine.sleep())
    pieces = []
    finished = threading.Event()

    def deliver(piece):
        pieces.append(piece)
        if piece.finish_reason:
            finished.set()

    thread.submit(request, deliver)
    with pytest.raises(WeightsMismatchError):
        thread.call(lambda engine: engine.load(5, {}))
    assert pieces == []
    thread.call(lambda engine: engine.wake())
    finished.wait()
    thread.close()
    assert [token for piece in pieces for token in piece.tokens] == expected
    with pytest.raises(GenerationError, match="closed"):
        thread.submit(request, pieces.append)


def test_requests_of_an_engine_that_breaks_fail_instead_of_waiting_for_ever(make_policy, params):
    class Broken(HFEngine):
        def step(self):
            raise OSError("out of order")

    thread = EngineThread(Broken(make_policy()))
    with pytest.raises(GenerationError, match="OSError: out of order"):
        list(thread.stream(Request(tokens=(3, 4), params=params)))
    with pytest.raises(GenerationError, match="out of order"):
        thread.submit(Request(tokens=(3, 4), params=params), print)
