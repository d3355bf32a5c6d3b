"""What an episode samples with, what it may return, and what becomes of one that fails."""

import asyncio
import contextlib
import dataclasses
from typing import Any, cast

import numpy as np
import pytest
import torch

from rallypoint.config import load_config
from rallypoint.data import Example
from rallypoint.data.prompt_sets import Prompt
from rallypoint.environments.episodes import with_prompt_first
from rallypoint.environments.failures import RolloutFailure
from rallypoint.errors import (
    EnvironmentFailedError,
    EpisodeError,
    GenerationError,
    RallyError,
    RequestError,
    RowFullError,
)
from rallypoint.generation import Output, SamplingParams
from rallypoint.journal import RolloutFailed
from rallypoint.sampling.client import EpisodeClient, Terms
from rallypoint.sampling.episode_end import Results
from rallypoint.sampling.episode_task import EpisodeLimits
from rallypoint.types import Trajectory

EXAMPLE = Example("rows.jsonl:3", data_source="rows", prompt=(), ability="", ground_truth="", extra_info={})
PROMPT = Prompt((5, 6), EXAMPLE)
TOKENIZER = object()


class FakeMailbox:
    """Answers every request with its number of tokens, after a while, or with an error."""

    def __init__(self, *errors: BaseException, seconds: float = 0) -> None:
        self.asked: list[Any] = []
        self._errors, self._seconds = list(errors), seconds
        self.num_cancelled = 0

    async def sample(self, request, rank, deliver=None):
        self.asked.append(request)
        try:
            await asyncio.sleep(self._seconds)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        if self._errors:
            raise self._errors.pop(0)
        output = {"tokens": (len(request.tokens),), "logprobs": (-1.0,), "sampled_logprobs": (-1.0,), "version": 0}
        return [Output(request_id=0, finish_reason="stop", **output)]


def end_of(
    episode, *, mailbox: FakeMailbox | None = None, max_tokens: int = 12, recorded=None, tokenizer=TOKENIZER, **terms
):
    """Return what an episode came to."""

    async def main():
        all_terms = Terms(cast("Any", mailbox or FakeMailbox()), cast("Any", tokenizer), max_tokens, **terms)
        client = EpisodeClient(all_terms, SamplingParams(max_new_tokens=5), (7, PROMPT), 1, rank=0, recorded=recorded)
        return await client.rollout(with_prompt_first(episode))

    return asyncio.run(main())


def have(episode, **options) -> Trajectory:
    found = end_of(episode, **options)
    assert isinstance(found, Trajectory), found
    return found


def failed(episode, **options) -> RolloutFailure:
    found = end_of(episode, **options)
    assert isinstance(found, RolloutFailure), found
    return found


async def first_of_two(prompt, client):
    first = await client.sample(prompt.tokens)
    await client.sample([8])
    return Trajectory(turns=(first,))


async def in_tensors(prompt, client):
    return Trajectory(turns=(await client.sample(torch.tensor(prompt.tokens)),))


async def nothing(prompt, client):
    await client.sample(prompt.tokens)


async def silent(client, example):
    pass


def returning(result):
    async def returns(client, example):
        await client.sample(client.prompt)
        return result

    return returns


async def text(prompt, client):
    await client.sample(prompt.tokens)
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


async def fills(prompt, client):
    return Trajectory(turns=(await client.sample((*prompt.tokens, *range(10))),))


@pytest.mark.parametrize(
    ("episode", "told"),
    [
        (silent, "ended without a response: it has to await client.sample at least once"),
        (text, "returned str; expected a reward, a list with a reward for each turn, a dict of numbers such as"),
        (no_turns, "returned a Trajectory without turns"),
        (one_turn, "returned a Trajectory whose turns are a Turn; expected Trajectory"),
        (skips, "whose turn 1 is not turn 1 of its client"),
        (edits, "whose turn 1 is not turn 1 of its client"),
        (twice, "whose turn 2 is not turn 2 of its client"),
        (side_by_side, "client.sample was called while it samples another turn"),
        (says_text, "client.sample was called with str, expected token ids"),
        (returning([1.0, 2.0]), "returned 2 rewards for 1 turns; expected one for each"),
        (returning([None]), "returned a list of rewards with a NoneType; expected a reward"),
        (returning(float("nan")), "returned the reward nan; expected a reward"),
        (returning(1e20), "returned a reward that is 1e"),
        (returning({"score": 1.0}), "returned a dict with 'score', expected 'reward'"),
        (returning({"reward": 1.0, "moves": "7"}), "returned a dict with str under 'moves'; expected a reward"),
        (returning((1.0, "x")), "returned a list of rewards with a str"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_an_episode_that_breaks_a_rule_is_malformed_and_told_what_is_expected(episode, told):
    found = failed(episode)
    assert (found.kind, found.prompt, found.sample) == ("malformed", 7, 1)
    assert told in found.reason
    assert str(found).startswith("rows.jsonl:3, sample 1: ")


@pytest.mark.parametrize(
    ("result", "rewards", "metrics"),
    [
        (0.5, (0.0, 0.5), {}),
        (True, (0.0, 1.0), {}),
        (torch.tensor(0.5), (0.0, 0.5), {}),
        ([0.25, 1], (0.25, 1.0), {}),
        (np.array([0.25, 1.0]), (0.25, 1.0), {}),
        ({"reward": 2, "moves": 7}, (0.0, 2.0), {"moves": 7.0}),
        ({"reward": (1, 2), "moves": np.float32(0.5), "lost": float("nan")}, (1.0, 2.0), {"moves": 0.5}),
        ({"moves": 7}, None, {"moves": 7.0}),
        (None, None, {}),
    ],
)
@pytest.mark.parametrize("form", ["client, example", "prompt, client"])
def test_an_episode_returns_a_reward_or_rewards_by_turn_or_metrics_or_leaves_it_to_the_reward_function(
    result, rewards, metrics, form
):
    async def two_turns(client):
        await client.sample(client.prompt)
        await client.sample((8,))
        return result

    async def of_example(client, example):
        assert example is EXAMPLE
        return await two_turns(client)

    async def of_prompt(prompt, client):
        assert prompt is PROMPT
        return await two_turns(client)

    found = have(of_example if form == "client, example" else of_prompt)
    assert (len(found.turns), found.rewards, found.metrics) == (2, rewards, metrics)


def test_a_trajectory_may_have_rewards_for_its_turns():
    async def first_alone(client, example):
        first = await client.sample(client.prompt)
        await client.sample((8,))
        return Trajectory(turns=(first,), rewards=(0.5,), metrics={"moves": 1})

    found = have(first_alone)
    assert (len(found.turns), found.rewards, found.metrics) == (1, (0.5,), {"moves": 1.0})


def test_who_gives_the_reward_is_one_and_it_is_there():
    nobody, several = Results(may_have_none=False), Results(has_functions=True)
    assert "returned no reward, and reward.function=null scores nothing" in failed(nothing, results=nobody).reason
    assert "which is none of reward.functions; return None" in failed(returning(1.0), results=several).reason
    assert have(returning(1.0), results=nobody).rewards == (1.0,)
    assert have(nothing, results=several).rewards is None


@pytest.mark.parametrize(
    ("recipe", "reward", "may"), [("opd", "null", True), ("grpo", "null", False), ("grpo", "r.py:f", True)]
)
def test_only_what_is_learned_from_rewards_needs_some(recipe, reward, may):
    keys = [f"reward.function={reward}", "rollout.episode=e.py:play", "model.path=m", "data.train=x.jsonl"]
    keys += ["teacher.path=t"] if recipe == "opd" else []
    assert Results.of(load_config(recipe, keys).config).may_have_none is may


def test_a_rollout_may_leave_out_its_last_turns():
    mailbox = FakeMailbox()
    found = have(first_of_two, mailbox=mailbox)
    assert [turn.response for turn in found.turns] == [(2,)]
    assert [request.tokens for request in mailbox.asked] == [(5, 6), (5, 6, 2, 8)]


def test_tokens_may_come_as_a_tensor_and_are_kept_as_numbers():
    found = have(in_tensors)
    assert found.turns[0].prompt == (5, 6)
    assert set(map(type, found.turns[0].prompt)) == {int}


def test_a_first_turn_that_adds_to_the_prompt_ends_at_the_limit_of_the_row_and_without_room_it_is_overlong():
    mailbox = FakeMailbox()
    have(fills, mailbox=mailbox, max_tokens=14)
    assert [request.params.max_new_tokens for request in mailbox.asked] == [2]
    found = failed(fills)
    assert found.kind == "overlong"
    assert "turn 1 begins with 12 tokens, and a row may have 12; raise" in found.reason


def raising(error):
    async def raises(client, example):
        await client.sample(client.prompt)
        raise error

    return raises


@pytest.mark.parametrize(
    ("error", "kind", "told"),
    [
        (ZeroDivisionError("by zero\nand more"), "raised", "the episode raised ZeroDivisionError: by zero"),
        (SystemExit(3), "raised", "the episode raised SystemExit: 3"),
        (asyncio.CancelledError(), "raised", "the episode raised CancelledError"),
        (TimeoutError("the tool"), "environment", "the episode raised TimeoutError: the tool"),
        (ConnectionResetError("gone"), "environment", "the episode raised ConnectionResetError: gone"),
        (EnvironmentFailedError("no board"), "environment", "the episode raised EnvironmentFailedError: no board"),
        (GenerationError("no answer"), "environment", "the episode raised GenerationError: no answer"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_what_an_episode_raises_is_counted_with_its_traceback(error, kind, told):
    found = failed(raising(error))
    assert (found.kind, found.reason, found.num_turns) == (kind, told, 1)
    assert ("in raises\n    raise error" in found.traceback) == (not isinstance(error, asyncio.CancelledError))


def test_an_engine_that_fails_on_a_turn_is_told_apart_also_from_tokens_that_no_model_has():
    assert failed(nothing, mailbox=FakeMailbox(GenerationError("nonsense"))).kind == "engine"

    async def adds(client, example):
        await client.sample((*client.prompt, 10**9))

    assert failed(adds, mailbox=FakeMailbox(RequestError("token 2"))).kind == "malformed"


@pytest.mark.parametrize("error", [RallyError("a rank died"), RequestError("the prompt"), asyncio.CancelledError()])
def test_what_concerns_all_rollouts_is_raised_also_if_the_episode_hides_it(error):
    async def hides(client, example):
        try:
            await client.sample(client.prompt)
        except (Exception, asyncio.CancelledError):  # noqa: BLE001
            return 0.0

    with pytest.raises(type(error)):
        end_of(hides, mailbox=FakeMailbox(error))


async def hangs(client, example):
    await client.sample(client.prompt)
    await waits_for_its_tool()


async def waits_for_its_tool():
    await asyncio.Event().wait()


async def hangs_on(client, example):
    await client.sample(client.prompt)
    while True:
        try:
            await waits_for_its_tool()
        except asyncio.CancelledError:  # a habit of some libraries
            with contextlib.suppress(EpisodeError):
                await client.sample((8,))
            if client.is_test_over:
                raise


def test_an_episode_that_hangs_costs_its_deadline_and_shows_where_it_waits():
    for limits, key in (({"turn_s": 0.05}, "turn"), ({"episode_s": 0.05, "turn_s": 9}, "episode")):
        found = failed(hangs, limits=EpisodeLimits(**limits))
        assert (found.kind, found.num_turns) == ("timeout", 1)
        assert f"took more than rollout.{key}_timeout_s=0.05 s" in found.reason
        assert "in waits_for_its_tool\n    await asyncio.Event().wait()" in found.traceback
        assert "/sampling/client.py" not in found.traceback


def test_an_episode_that_swallows_its_cancellation_is_left_behind_and_samples_no_more():
    mailbox = FakeMailbox()

    async def main():
        terms = Terms(cast("Any", mailbox), cast("Any", TOKENIZER), 12, EpisodeLimits(turn_s=0.05))
        client = cast("Any", EpisodeClient(terms, SamplingParams(max_new_tokens=5), (7, PROMPT), 1, rank=0))
        client.is_test_over = False
        found = await client.rollout(with_prompt_first(hangs_on))
        await asyncio.sleep(0)
        client.is_test_over = True
        return found

    found = asyncio.run(main())
    assert found.kind == "timeout"
    assert len(mailbox.asked) == 1


def test_the_time_in_which_a_response_is_sampled_does_not_count():
    mailbox = FakeMailbox(seconds=0.2)
    assert have(first_of_two, mailbox=mailbox, limits=EpisodeLimits(turn_s=0.1, episode_s=0.15))


def test_a_response_that_nobody_waits_for_any_more_is_given_up():
    mailbox = FakeMailbox(seconds=30)
    assert failed(side_by_side, mailbox=mailbox).kind == "malformed"
    assert mailbox.num_cancelled == 1


def test_a_recorded_failure_is_repeated_where_it_was_and_no_deadline_is_kept_beside_it():
    recorded = RolloutFailed(prompt=7, sample=1, validation=None, num_turns=1, why="timeout", reason="it hung")
    mailbox = FakeMailbox()
    found = failed(
        first_of_two, mailbox=mailbox, recorded=recorded, limits=EpisodeLimits(turn_s=1e-9, hold=lambda: False)
    )
    assert (found.kind, found.reason, found.num_turns) == ("timeout", "it hung", 1)
    assert len(mailbox.asked) == 1
    assert have(first_of_two, limits=EpisodeLimits(turn_s=1e-9, hold=lambda: False))


async def until_full(prompt, client):
    turns = [await client.sample(prompt.tokens)]
    try:
        while True:
            turns.append(await client.sample((8, 9)))
    except RowFullError:
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
    trajectory = have(episode)
    assert [turn.truncated for turn in trajectory.turns] == truncated


def test_a_turn_may_have_limits_of_its_own():
    mailbox = FakeMailbox()

    async def limited(client, example):
        await client.sample(client.prompt, max_tokens=2, stop=["</move>"])
        await client.sample((8,))

    have(limited, mailbox=mailbox)
    first, second = [request.params for request in mailbox.asked]
    assert (first.max_new_tokens, first.stop_strings) == (2, ("</move>",))
    assert (second.max_new_tokens, second.stop_strings) == (5, ())


def test_a_turn_of_its_own_temperature_has_the_logprobs_of_the_runs():
    mailbox = FakeMailbox()

    async def greedy_then_hot(client, example):
        await client.sample(client.prompt, temperature=0)
        await client.sample((8,), temperature=1.5)
        await client.sample((8,))

    have(greedy_then_hot, mailbox=mailbox)
    asked = [request.params for request in mailbox.asked]
    assert [one.temperature for one in asked] == [0, 1.5, 1.0]
    assert [one.policy_temperature for one in asked] == [1.0, 1.0, None]
    assert [one.narrows for one in asked] == [True, True, False]


class Cut(FakeMailbox):
    """Cuts every response off, after as many tokens as were asked for, or before."""

    def __init__(self, *, missing: int = 0) -> None:
        super().__init__()
        self._missing = missing

    async def sample(self, request, rank, deliver=None):
        (whole,) = await super().sample(request, rank)
        num = request.params.max_new_tokens - self._missing
        many = {"tokens": (3,) * num, "logprobs": (-1.0,) * num, "sampled_logprobs": (-1.0,) * num}
        return [dataclasses.replace(whole, finish_reason="length", **many)]


@pytest.mark.parametrize(
    ("missing", "wanted", "limits"),
    [(0, 3, ["turn", "turn"]), (0, None, ["turn", "row"]), (1, 3, ["engine", "engine"])],
)
def test_a_turn_says_at_which_limit_it_was_cut_off(missing, wanted, limits):
    async def two_turns(client, example):
        for tokens in (client.prompt, (8,)):
            await client.sample(tokens, max_tokens=wanted)

    assert [turn.limit for turn in have(two_turns, mailbox=Cut(missing=missing)).turns] == limits
    assert [turn.limit for turn in have(two_turns).turns] == [None, None]


@pytest.mark.parametrize(
    "limits",
    [
        {"max_tokens": 0},
        {"max_tokens": "9"},
        {"stop": "text"},
        {"stop": [""]},
        {"temperature": -1.0},
        {"temperature": "hot"},
    ],
)
def test_limits_of_a_turn_that_make_no_sense_are_malformed(limits):
    async def limited(client, example):
        await client.sample(client.prompt, **limits)

    found = failed(limited)
    assert found.kind == "malformed"
    assert "prompt 7 sample 1: client.sample(max_tokens=" in found.reason
    assert "expected" in found.reason


class Letters:
    """A tokenizer of which a text may have several encodings: 1 is a, 2 is b, 3 is ab."""

    def decode(self, tokens, skip_special_tokens=False):
        return "".join({1: "a", 2: "b", 3: "ab"}.get(token, "?") for token in tokens)


@pytest.mark.parametrize(
    ("second", "is_again"),
    [
        ((5, 6, 2, 8), True),  # the prompt, the response 2, and what is new
        ((5, 6, 2), True),
        ((5, 6), False),  # the question alone, once more
        ((5, 6, 1, 8), False),
        ((8,), False),
        ((), False),
    ],
)
def test_a_turn_that_sends_the_whole_conversation_again_is_told_what_to_send(second, is_again):
    async def resends(client, example):
        await client.sample(client.prompt)
        await client.sample(second)

    found = end_of(resends, max_tokens=40, tokenizer=Letters())
    assert isinstance(found, RolloutFailure) == is_again
    if is_again:
        assert "turn 2 was given the whole conversation again" in found.reason
        assert "send only what comes after the last response" in found.reason


def test_a_response_that_was_encoded_anew_is_recognised_as_sent_again():
    class SaysTwo(FakeMailbox):
        async def sample(self, request, rank, deliver=None):
            whole = await super().sample(request, rank)
            return [dataclasses.replace(whole[0], tokens=(1, 2), logprobs=(-1.0,) * 2, sampled_logprobs=(-1.0,) * 2)]

    async def encodes_anew(client, example):
        await client.sample(client.prompt)
        await client.sample((5, 6, 3, 8))

    found = failed(encodes_anew, mailbox=SaysTwo(), max_tokens=40, tokenizer=Letters())
    assert "turn 2 was given the whole conversation again" in found.reason


def test_short_text_that_begins_as_the_prompt_does_is_new():
    async def begins_alike(client, example):
        for _ in range(4):
            await client.sample(client.prompt[:1])
            await client.sample((5, 6, 8))
        return 1.0

    assert len(have(begins_alike, max_tokens=60, tokenizer=Letters()).turns) == 8


def test_calls_run_at_the_same_time_and_a_turn_of_sample_does_not():
    mailbox = FakeMailbox(seconds=0.01)

    async def parallel(client, example):
        first = await client.call(client.prompt)
        history = (*client.prompt, *first.response)
        await asyncio.gather(client.call((*history, 8)), client.call((*history, 9)), client.call((1,)))
        return 1.0

    found = have(parallel, mailbox=mailbox)
    assert sorted(map(len, found.sequences)) == [1, 2, 2]
    assert [request.tokens for request in mailbox.asked] == [(5, 6), (5, 6, 2, 8), (5, 6, 2, 9), (1,)]
    assert len({request.params.seed for request in mailbox.asked}) == 4
    assert mailbox.asked[0].params.seed == 0

    async def beside(client, example):
        await asyncio.gather(client.call(client.prompt), client.sample(client.prompt))

    assert "client.sample was called while it samples another turn" in failed(beside).reason


def test_turns_of_sample_keep_their_random_numbers_and_calls_beside_them_have_others():
    mailbox = FakeMailbox()

    async def linear(client, example):
        first = await client.sample(client.prompt)
        await client.sample((8,))
        await client.call((*client.prompt, *first.response, 9))
        await client.sample((3,))

    found = have(linear, mailbox=mailbox)
    assert [request.params.seed for request in mailbox.asked[:2]] == [0, 2**33]
    assert all(request.params.seed >= 2**62 for request in mailbox.asked[2:])
    assert [request.tokens for request in mailbox.asked][2:] == [(5, 6, 2, 9), (5, 6, 2, 8, 4, 3)]
    assert found.sequences == ((0, 2), (0, 1, 3))


def test_a_call_may_have_a_temperature_and_needs_ids_and_an_episode_that_goes_on():
    kept, mailbox = [], FakeMailbox()

    async def text(client, example):
        await client.call("text")

    async def hot(client, example):
        await client.call(client.prompt, temperature=0.5)

    async def ends(client, example):
        kept.append(client)
        await client.call(client.prompt, temperature=1.0, max_tokens=3)

    assert "client.call was called with str, expected token ids" in failed(text).reason
    have(hot, mailbox=mailbox)
    (asked,) = mailbox.asked
    assert (asked.params.temperature, asked.params.policy_temperature) == (0.5, 1.0)
    assert end_of(ends).turns[0].response == (2,)
    with pytest.raises(Exception, match="after the end of the episode"):
        asyncio.run(kept[0].call((5, 6)))


def test_the_end_of_an_episode_gives_up_all_its_calls_and_their_time_does_not_count():
    mailbox = FakeMailbox(seconds=3600)

    async def leaves(client, example):
        for _ in range(3):
            asyncio.create_task(client.call(client.prompt))  # noqa: RUF006
            await asyncio.sleep(0)
        return 1.0

    assert failed(leaves, mailbox=mailbox).kind == "malformed"
    assert mailbox.num_cancelled == 3
