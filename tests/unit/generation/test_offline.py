"""A batch and a stream of an engine that has no other requests, whichever engine it is."""

import pytest

from rallypoint.errors import GenerationError, RequestError
from rallypoint.generation import Request, generate, stream

LENGTHS = [3, 9, 1, 17]


def test_nobody_waits_for_an_engine_that_sleeps(engine, make_prompts, params):
    engine.sleep()
    with pytest.raises(GenerationError, match="asleep"):
        generate(engine, make_prompts(LENGTHS), params, version=4, group_size=4)
    with pytest.raises(GenerationError, match="asleep"):
        list(stream(engine, Request(tokens=(3, 4), params=params)))
    engine.wake()
    assert not engine.has_work
    assert len(generate(engine, make_prompts([3]), params, version=4, group_size=4)) == 4


def test_a_bad_prompt_of_a_batch_leaves_nothing_behind(engine, make_prompts, params):
    with pytest.raises(RequestError, match="prompt 9 has no tokens"):
        generate(engine, make_prompts([3, 4, 0]), params, version=4, group_size=4)
    for _ in range(20):
        engine.step()
    assert not engine.has_work
    assert len(generate(engine, make_prompts([3]), params, version=4, group_size=4)) == 4
