"""Rollouts as training traces of OpenEnv, and back."""

import random
from types import SimpleNamespace

import pytest

from rallypoint.sampling.calls import Calls
from rallypoint.sampling.traces import trace_of
from rallypoint.types import Trajectory, Turn, assemble


def rollout(seed):
    """A tree of calls with responses of numbers that occur once, so that no two are asked again."""
    draw, calls, wholes = random.Random(seed), Calls((1, 2)), [(1, 2)]
    for number in range(8):
        tokens = (*draw.choice(wholes), 100 + number)
        response = tuple(range(1000 + 10 * number, 1000 + 10 * number + draw.randint(1, 4)))
        logprobs = tuple(-token / 2000 for token in response)
        sampled = {"logprobs": logprobs, "sampled_logprobs": logprobs, "version": 2}
        calls.end(calls.begin(tokens), Turn(prompt=(), response=response, truncated=False, **sampled))
        wholes.append(tokens + response)
    return Trajectory(turns=calls.kept())


def row_of(trajectory):
    """What a rollout file has of it."""
    batch = assemble([trajectory], prompt_index=4, sample_index=[1], is_narrowed=False)
    first = int(batch.num_prompt_tokens[0])
    starts = batch.sequence_starts
    row = SimpleNamespace(
        prompt_ids=batch.tokens[:first].tolist(),
        response_ids=batch.tokens[first:].tolist(),
        loss_mask=batch.loss_mask[first:].tolist(),
        sequence_starts=None if starts is None else starts[first:].tolist(),
        rollout_logprobs=batch.rollout_logprobs[first:].tolist(),
        token_rewards=batch.loss_mask[first:].double().tolist(),
        name="train.jsonl:7",
        prompt_index=4,
        sample_index=1,
        score=1.0,
        version=2,
    )
    return vars(row)


def trajectory_of(trace):
    """The rollout that a trace is of: each turn continues the one that it begins with."""
    calls = Calls(())
    for turn in trace["turns"]:
        response, logprobs = tuple(turn["completion_token_ids"]), tuple(turn["per_token_logps"])
        sampled = {"response": response, "logprobs": logprobs, "sampled_logprobs": logprobs, "version": 2}
        calls.end(calls.begin(tuple(turn["prompt_token_ids"])), Turn(prompt=(), truncated=False, **sampled))
    return Trajectory(turns=tuple(calls.turns))


@pytest.mark.parametrize("seed", range(10))
def test_a_trace_has_every_call_once_and_gives_the_rollout_back(seed):
    trajectory = rollout(seed)
    trace = trace_of(row_of(trajectory))
    assert [turn["completion_token_ids"] for turn in trace["turns"]] == [
        list(trajectory.turns[number].response) for number in trajectory.as_trained
    ]
    for turn in trace["turns"]:
        assert len(turn["loss_mask"]) == len(turn["prompt_token_ids"]) + len(turn["completion_token_ids"])
        assert turn["metadata"]["reward"] == len(turn["completion_token_ids"]) == sum(turn["loss_mask"])
    found = trajectory_of(trace)
    one, other = (
        assemble([each], prompt_index=0, sample_index=[0], is_narrowed=False).by_sequence()
        for each in (trajectory, found)
    )
    whole = [
        sorted(tuple(x.tolist()) for x in batch.tokens.tensor_split(batch.offsets[1:-1])) for batch in (one, other)
    ]
    assert whole[0] == whole[1]
    assert sorted(one.tokens[one.loss_mask].tolist()) == sorted(other.tokens[other.loss_mask].tolist())
