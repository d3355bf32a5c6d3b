"""What an episode samples with, and what becomes of one that breaks the rules."""

import asyncio
import dataclasses
from typing import Any, cast

import pytest
import torch

from rallypoint.data import Example
from rallypoint.environments.environment import Prompt
from rallypoint.errors import EpisodeError, GenerationError
from rallypoint.generation import Output, SamplingParams
from rallypoint.sampling.client import EpisodeClient
from rallypoint.types import Trajectory

EXAMPLE = Example("rows.jsonl:3", data_source="rows", prompt=(), ability="", ground_truth="", extra_info={})
PROMPT = Prompt((5, 6), EXAMPLE)
TOKENIZER = object()


class FakeMailbox:
    """Answers every request with its number of tokens."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    async def sample(self, request, rank):
        self.asked.append(request)
        await asyncio.sleep(0)
        output = {"tokens": (len(request.tokens),), "logprobs": (-1.0,), "sampled_logprobs": (-1.0,), "version": 0}
        return [Output(request_id=0, finish_reason="stop", **output)]


def have(episode, *, max_tokens: int = 12):
    mailbox = FakeMailbox()
    params = SamplingParams(max_new_tokens=5)
    client = EpisodeClient(
        cast("Any", mailbox), params, 7, 1, rank=0, max_tokens=max_tokens, tokenizer=cast("Any", TOKENIZER)
    )
    return asyncio.run(client.have(episode, PROMPT)), mailbox.asked


async def first_of_two(prompt, client):
    first = await client.sample(prompt.tokens)
    await client.sample([8])
    return Trajectory(turns=(first,))


async def in_tensors(prompt, client):
    return Trajectory(turns=(await client.sample(torch.tensor(prompt.tokens)),))


async def nothing(prompt, client):
    await client.sample(prompt.tokens)


async def text(prompt, client):
    return "an answer"


async def no_turns(prompt, client):
    return Trajectory(turns=())


async def one_turn(prompt, client):
    return Trajectory(turns=await client.sample(prompt.tokens))


async def skips(prompt, client):
    await client.sample(prompt.tokens)
    return Trajectory(turns=(await client.sample((8,)),))


async def edits(prompt, client):
    turn = await client.sample(prompt.tokens)
    return Trajectory(turns=(dataclasses.replace(turn, response=(9,)),))


async def twice(prompt, client):
    turn = await client.sample(prompt.tokens)
    return Trajectory(turns=(turn, turn))


async def side_by_side(prompt, client):
    return Trajectory(turns=tuple(await asyncio.gather(client.sample(prompt.tokens), client.sample((8,)))))


async def says_text(prompt, client):
    return Trajectory(turns=(await client.sample("look again"),))


async def divides(prompt, client):
    return 1 / 0


async def fills(prompt, client):
    return Trajectory(turns=(await client.sample((*prompt.tokens, *range(10))),))


async def gives_up(prompt, client):
    raise GenerationError("the tool has no answer")


def plain(prompt, client):
    return Trajectory(turns=())


@pytest.mark.parametrize(
    ("episode", "told"),
    [
        (nothing, "the episode nothing returned nothing; expected Trajectory"),
        (text, "the episode text returned str; expected Trajectory"),
        (no_turns, "returned a Trajectory without turns"),
        (one_turn, "returned a Trajectory whose turns are a Turn; expected Trajectory"),
        (skips, "whose turn 1 is not turn 1 of its client"),
        (edits, "whose turn 1 is not turn 1 of its client"),
        (twice, "whose turn 2 is not turn 2 of its client"),
        (side_by_side, "client.sample was called while it samples another turn"),
        (says_text, "client.sample was called with str, expected token ids"),
        (divides, r"the episode divides raised ZeroDivisionError:\n(.*\n)*.*return 1 / 0"),
        (plain, "the episode plain raised TypeError"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_an_episode_that_breaks_a_rule_is_named_with_its_prompt_and_sample(episode, told):
    with pytest.raises(EpisodeError, match=rf"prompt 7 sample 1.*{told}") as caught:
        have(episode)
    if episode not in (side_by_side, says_text):
        assert "(rows.jsonl:3)" in str(caught.value)


def test_a_rollout_may_leave_out_its_last_turns():
    found, asked = have(first_of_two)
    assert [turn.response for turn in found.turns] == [(2,)]
    assert [request.tokens for request in asked] == [(5, 6), (5, 6, 2, 8)]


def test_tokens_may_come_as_a_tensor_and_are_kept_as_numbers():
    found, _ = have(in_tensors)
    assert found.turns[0].prompt == (5, 6)
    assert set(map(type, found.turns[0].prompt)) == {int}


def test_a_first_turn_that_adds_to_the_prompt_ends_at_the_limit_of_the_row_and_without_room_it_fails():
    _, asked = have(fills, max_tokens=14)
    assert [request.params.max_new_tokens for request in asked] == [2]
    with pytest.raises(GenerationError, match="turn 1 begins with 12 tokens, and a row may have 12; raise"):
        have(fills)


def test_an_episode_gives_a_rollout_up_with_a_generation_error():
    with pytest.raises(GenerationError, match="the tool has no answer"):
        have(gives_up)


async def until_full(prompt, client):
    turns = [await client.sample(prompt.tokens)]
    try:
        while True:
            turns.append(await client.sample((8, 9)))
    except GenerationError:
        return Trajectory(turns=tuple(turns))


async def until_full_without_the_last(prompt, client):
    found = await until_full(prompt, client)
    return Trajectory(turns=found.turns[:1])


async def too_much_then_less(prompt, client):
    turns = [await client.sample(prompt.tokens)]
    try:
        await client.sample(range(99))
    except GenerationError:
        turns.append(await client.sample((8,)))
    return Trajectory(turns=tuple(turns))


@pytest.mark.parametrize(
    ("episode", "truncated"),
    [
        (until_full, [False, False, False, True]),
        (until_full_without_the_last, [True]),
        (too_much_then_less, [False] * 2),
    ],
)
def test_an_episode_that_ends_for_want_of_room_is_truncated(episode, truncated):
    trajectory, _ = have(episode)
    assert [turn.truncated for turn in trajectory.turns] == truncated
