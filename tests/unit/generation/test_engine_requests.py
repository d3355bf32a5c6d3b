"""Requests of every engine from first to last: they come and go, wait for one that sleeps, and fail alone."""

import copy
import dataclasses
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from rallypoint.errors import NotFiniteError
from rallypoint.generation import Request, stream
from rallypoint.models import named_weights


def test_a_cancelled_request_ends_and_the_others_do_not_notice(engine, make_prompts, params):
    requests = [Request(tokens=(3, 4), params=params, sample_index=sample) for sample in range(3)]
    alone = [tuple(t for output in stream(engine, request) for t in output.tokens) for request in requests]
    ids = [engine.submit(request) for request in requests]
    engine.cancel(ids[1])
    found = dict.fromkeys(ids, ())
    reasons = {}
    while engine.has_work:
        for output in engine.step():
            found[output.request_id] += output.tokens
            if output.finish_reason:
                reasons[output.request_id] = output.finish_reason
    assert [found[ids[0]], found[ids[2]]] == [alone[0], alone[2]]
    assert reasons[ids[1]] == "cancelled"
    engine.cancel(ids[1])
    engine.cancel(10**6)
    assert engine.step() == []


def test_an_engine_that_sleeps_waits_and_goes_on_after_wake(engine, params):
    request = Request(tokens=(3, 4), params=params)
    expected = [token for output in stream(engine, request) for token in output.tokens]
    engine.submit(request)
    engine.sleep()
    assert engine.step() == []
    assert engine.has_work
    engine.wake()
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    assert [token for output in outputs for token in output.tokens] == expected


def test_what_is_cancelled_while_the_engine_sleeps_ends_there(engine, params):
    ids = [engine.submit(Request(tokens=(3, 4), params=params, sample_index=sample)) for sample in range(3)]
    engine.step()
    engine.sleep()
    engine.cancel(ids[2])
    assert [(output.request_id, output.finish_reason) for output in engine.step()] == [(ids[2], "cancelled")]
    assert engine.has_work
    engine.cancel(ids[1])
    engine.cancel(ids[0])
    engine.step()
    assert not engine.has_work


def test_requests_come_and_go_while_a_step_is_taken(make_engine, make_policy, params):
    model = copy.deepcopy(make_policy())
    requests = [Request(tokens=(3, 4), params=params, sample_index=sample) for sample in range(4)]
    other = make_engine(make_policy())
    alone = [tuple(t for output in stream(other, request) for t in output.tokens) for request in requests]
    engine = make_engine(model)
    ids = [engine.submit(request) for request in requests[:3]]

    def come_and_go():
        engine.cancel(ids[2])
        ids.append(engine.submit(requests[3]))

    def during_the_first_pass(*_):
        hook.remove()
        with ThreadPoolExecutor(1) as executor:
            executor.submit(come_and_go).result()

    hook = model.base_model.register_forward_pre_hook(during_the_first_pass)
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    found = {each: tuple(t for p in outputs if p.request_id == each for t in p.tokens) for each in ids}
    assert [found[ids[place]] for place in (0, 1, 3)] == [alone[place] for place in (0, 1, 3)]
    assert [output.request_id for output in outputs if output.finish_reason == "cancelled"] == [ids[2]]


@pytest.mark.parametrize("sleeps", [False, True], ids=["awake", "asleep"])
def test_every_token_is_stamped_with_the_weights_that_it_was_sampled_from(make_engine, make_policy, params, sleeps):
    """What is handed out at the end has the stamps of what is handed out token by token."""
    other = named_weights(make_policy(initializer_range=0.2))
    endless = dataclasses.replace(params, stop_tokens=())

    def stamped(streamed):
        engine = make_engine(copy.deepcopy(make_policy()))
        for sample in range(4):
            engine.submit(Request(tokens=(3, 4), params=endless, sample_index=sample, streamed=streamed))
        outputs = [output for _ in range(3) for output in engine.step()]
        if sleeps:
            engine.sleep()
        engine.load(5, other)
        engine.wake()
        while engine.has_work:
            outputs += engine.step()
        outputs.sort(key=lambda output: output.request_id)
        return [(output.request_id, token, output.version) for output in outputs for token in output.tokens]

    expected = stamped(streamed=True)
    assert {version for _, _, version in expected} == {4, 5}
    assert stamped(streamed=False) == expected


def test_logits_that_are_not_finite_fail_their_request_and_no_other(make_engine, make_policy, params):
    model = copy.deepcopy(make_policy())
    with torch.no_grad():
        model.get_input_embeddings().weight[19] = float("nan")
    engine = make_engine(model)
    good, bad = (Request(tokens=tokens, params=params, prompt_index=8) for tokens in ((3, 4), (3, 19)))
    expected = [token for output in stream(engine, good) for token in output.tokens]
    ids = [engine.submit(request) for request in (bad, good)]
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    assert [token for output in outputs if output.request_id == ids[1] for token in output.tokens] == expected
    (failed,) = [output for output in outputs if output.request_id == ids[0]]
    assert failed.finish_reason == "failed"
    with pytest.raises(NotFiniteError, match="token 0 of the response of prompt 8 sample 0"):
        list(stream(engine, bad))
