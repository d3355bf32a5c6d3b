"""What is drawn inside of vLLM, against our own engines, with a model of our own in its place."""

import copy
import dataclasses
import random

import pytest
import torch

from rallypoint.generation import Request, SamplingParams
from rallypoint.generation.sampler import Sampler
from rallypoint.generation.vllm.sampler import MovingRows, Slots, encode, needs_companion

NUM_IDS = 20
CPU = torch.device("cpu")

PARAMS = [
    SamplingParams(max_new_tokens=9, seed=3, **changes)
    for changes in (
        {},
        {"temperature": 0.0},
        {"temperature": 0.6},
        {"top_k": 3},
        {"top_p": 0.7, "temperature": 1.5},
        {"min_p": 0.3},
        {"repetition_penalty": 1.7},
        {"min_new_tokens": 6, "stop_tokens": (1, 2, 3)},
        {"top_k": 1},
    )
]
REQUESTS = [
    Request(tokens=(4, 5, number), params=params, prompt_index=number % 4, sample_index=number)
    for number, params in enumerate(PARAMS)
]


def logits_of(tokens):
    generator = torch.Generator().manual_seed(hash(tuple(tokens)) % 2**31)
    return 3 * torch.randn(NUM_IDS, generator=generator)


def expected_of(request, num_tokens=9):
    """(token, logprob, logprob in what was drawn from) of a response, row by row."""
    response = []
    drawn = []
    for _ in range(num_tokens):
        draws = Sampler([(request, response)], CPU).sample(logits_of((*request.tokens, *response)).unsqueeze(0))
        response.append(int(draws.tokens))
        drawn.append((int(draws.tokens), float(draws.logprobs), float(draws.sampled_logprobs)))
    return drawn


def read(logits, params):
    """What the engine is told of a row: the likeliest token, and what the two numbers say."""
    token = int(logits.argmax())
    others = logits[torch.arange(NUM_IDS) != token]
    logprob, sampled = -float(logits[token]), -float(logits[token])
    if params.temperature == 0:
        sampled = 0.0
    elif needs_companion(params):
        sampled = float(others.max()) if others.max() > -5000 else 0.0
    return token, logprob, sampled


def sent(request):
    """Arguments as they arrive: through JSON, tuples have become lists."""
    asked = copy.deepcopy(encode(request))
    asked["params"] = {k: list(v) if isinstance(v, tuple) else v for k, v in asked["params"].items()}
    return asked


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda request: str(request.sample_index))
def test_a_row_says_token_and_both_logprobs(request_):
    rows, response = MovingRows(CPU), []
    rows.add(0, sent(request_), request_.tokens, response)
    for expected in expected_of(request_):
        logits = rows.draw(logits_of((*request_.tokens, *response)).unsqueeze(0))
        token, logprob, sampled = read(logits[0], request_.params)
        assert token == expected[0]
        assert (logprob, sampled) == pytest.approx(expected[1:], abs=1e-6)
        response.append(token)


def test_rows_that_come_go_and_move_are_drawn_as_each_is_alone():
    chance = random.Random(0)
    rows = MovingRows(CPU)
    batch, found, waiting = [], {}, list(enumerate(REQUESTS))
    while waiting or batch:
        places = list(range(len(batch)))
        while waiting and len(batch) < 4 and chance.random() < 0.7:
            number, request = waiting.pop(0)
            batch.append((number, request, response := []))
            found[number] = response
            rows.add(len(batch) - 1, sent(request), request.tokens, response)
        if len(batch) > 1 and chance.random() < 0.5:
            first, second = chance.sample(range(len(batch)), 2)
            batch[first], batch[second] = batch[second], batch[first]
            rows.move(first, second, swap=True)
        del places
        if batch:
            contexts = [(*request.tokens, *response) for _, request, response in batch]
            logits = rows.draw(torch.stack([logits_of(context) for context in contexts]))
            for place, (_, request, response) in enumerate(batch):
                if chance.random() < 0.8:  # vLLM throws away what it draws for a prompt that is not through yet
                    response.append(read(logits[place], request.params)[0])
        for place in reversed(range(len(batch))):
            if len(batch[place][2]) == 9:
                rows.remove(place)
                last = len(batch) - 1
                if place != last:
                    rows.move(last, place, swap=False)
                batch[place] = batch[last]
                batch.pop()
    for number, request in enumerate(REQUESTS):
        assert found[number] == [token for token, _, _ in expected_of(request)]


def test_slots_in_any_order_are_drawn_as_each_is_alone():
    """Some rows belong to prompts that are not through yet; slots are used again, and one has a request of others."""
    chance = random.Random(0)
    in_slots, found, waiting, left = {}, {}, list(enumerate(REQUESTS)), {}
    slots = Slots(CPU, lambda slot, number: in_slots[slot][:number])
    assert not slots.add(7, None)
    while waiting or left:
        for slot in range(4):
            if slot not in left and waiting and chance.random() < 0.5:
                number, request = waiting.pop(0)
                assert slots.add(slot, sent(request))
                in_slots[slot], left[slot] = [*request.tokens], (number, request)
        order = chance.sample([*left, 7], 1 + len(left))
        is_through = {slot: chance.random() < 0.8 for slot in left}
        contexts = [in_slots[slot] if slot in left else [1] for slot in order]
        lengths = [
            len(context) if is_through.get(slot, True) else 1 for slot, context in zip(order, contexts, strict=True)
        ]
        before = torch.stack([logits_of(context) for context in contexts])
        logits = slots.draw(before.clone(), order, lengths)
        for place, slot in enumerate(order):
            if slot == 7:
                assert logits[place].equal(before[place])
            elif is_through[slot]:
                number, request = left[slot]
                in_slots[slot].append(read(logits[place], request.params)[0])
                if len(in_slots[slot]) == len(request.tokens) + 9:
                    found[number] = in_slots[slot][len(request.tokens) :]
                    del left[slot]
    for number, request in enumerate(REQUESTS):
        assert found[number] == [token for token, _, _ in expected_of(request)]


def test_a_response_that_is_sent_again_goes_on_where_it_was():
    for request in REQUESTS:
        expected = [token for token, _, _ in expected_of(request)]
        rows, response = MovingRows(CPU), []
        rows.add(0, sent(request), (*request.tokens, *expected[:4]), response)
        while len(response) < 5:
            logits = rows.draw(logits_of((*request.tokens, *expected[:4], *response)).unsqueeze(0))
            response.append(read(logits[0], request.params)[0])
        assert response == expected[4:]


def test_rows_of_others_are_left_as_they_are():
    rows = MovingRows(CPU)
    logits = torch.randn(3, NUM_IDS)
    assert rows.draw(logits.clone()).equal(logits)
    rows.add(0, None, (1, 2), [])
    rows.add(1, sent(REQUESTS[0]), REQUESTS[0].tokens, [])
    rows.add(2, None, (1, 2), [])
    after = rows.draw(logits.clone())
    assert after[[0, 2]].equal(logits[[0, 2]])
    assert after[1].isfinite().sum() == 1
    rows.add(1, None, (1, 2), [])
    assert rows.draw(logits.clone()).equal(logits)


def test_logits_that_are_not_finite_are_reported_as_such():
    rows = MovingRows(CPU)
    request = dataclasses.replace(REQUESTS[0])
    rows.add(0, sent(request), request.tokens, [])
    logits = rows.draw(torch.full((1, NUM_IDS), float("nan")))
    assert logits.max() == pytest.approx(1e30)


class Uncopied(list):
    """Tokens of which only the number is asked for."""

    def __iter__(self):
        raise AssertionError("they were copied")


def test_responses_are_not_copied_when_a_row_joins_unless_a_penalty_asks_for_them():
    sampler, logits = MovingRows(CPU), torch.zeros(2, NUM_IDS)
    plain, penalised = REQUESTS[0], REQUESTS[6]
    sampler.add(0, encode(plain), plain.tokens, Uncopied([1] * 7))
    sampler.draw(logits.clone())
    sampler.add(1, encode(penalised), penalised.tokens, Uncopied([2] * 3))
    with pytest.raises(AssertionError, match="they were copied"):
        sampler.draw(logits.clone())
