"""Prompts in, scored batches out, whatever the latencies of what samples them."""

import asyncio
import dataclasses
import gc
import os
import random
import statistics
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

import pytest
import torch
from heard import heard
from transformers import PreTrainedTokenizerBase

from rallypoint.algorithms import ADVANTAGES
from rallypoint.config import load_config
from rallypoint.config.sections.material import OverlongConfig
from rallypoint.data import EncodedPrompts, Example, Message
from rallypoint.data.prompt_sets import PromptSets
from rallypoint.environments.environment import single_turn
from rallypoint.environments.failures import TooManyFailuresError
from rallypoint.environments.grader import Inline
from rallypoint.errors import AbandonedError, GenerationError, RewardError, StalenessError
from rallypoint.generation import Output
from rallypoint.journal import Journal, Resumed, RunBegan, SliceSent, read_journal
from rallypoint.roles.frozen import RewardModels, Scorers
from rallypoint.roles.rank_engine import SliceResult
from rallypoint.run.recorded_schedule import Origin, RecordedSchedule
from rallypoint.sampling.groups import PromptsDone
from rallypoint.sampling.in_flight import Watch
from rallypoint.sampling.kept import KeptGroups
from rallypoint.sampling.mailbox import Mailbox
from rallypoint.sampling.replay import Recorder, Schedule, ScheduleReplay
from rallypoint.sampling.source import RolloutSource
from rallypoint.sampling.timekeeper import Timekeeper
from rallypoint.types import Trajectory

P, G = 4, 2
CONFIG = load_config("digits", [f"rollout={{num_prompts: {P}, group_size: {G}, max_response_tokens: 5}}"]).config


class FakeMailbox:
    """Answers a request with its numbers, after a while, and remembers what it was asked."""

    def __init__(self, seed=0):
        self.version, self.num_loads, self.random = 0, 1, random.Random(seed)
        self.asked, self.failing, self.num_stops = [], set(), 0
        self.schedule, self.is_idle = Schedule(), asyncio.Event()

    def rank_of(self, place, num_prompts):
        return place * 2 // num_prompts

    async def sample(self, request, rank, deliver=None):
        self.asked.append((request.prompt_index, request.sample_index, rank, request))
        version = self.version
        await asyncio.sleep(self.random.random() * 0.01)
        if (request.prompt_index, request.sample_index) in self.failing:
            raise GenerationError("nonsense came")
        tokens = (10 + request.prompt_index, 20 + request.sample_index)
        numbers = (-1.0, -2.0)
        return [
            Output(request_id=1, tokens=tokens, logprobs=numbers, sampled_logprobs=numbers, version=version,
                   finish_reason="stop")
        ]  # fmt: skip

    async def load(self, version, published):
        self.version, self.num_loads = version, self.num_loads + 1

    def take_busy_s(self):
        return [0.5, 0.25]

    async def stop(self):
        self.num_stops += 1


class InThreads(Inline):
    """Calls the function for each response in a thread of its own."""

    def submit(self, calls):
        threads, one = ThreadPoolExecutor(len(calls)), super().submit
        return [threads.submit(lambda call=call: one([call])[0].result()) for call in calls]


class FakeTokenizer:
    all_special_ids = (0,)
    added_tokens_decoder = types.MappingProxyType({})

    def get_vocab(self):
        return {str(token): token for token in range(100)}

    def decode(self, row, skip_special_tokens=False, clean_up_tokenization_spaces=False):
        return " ".join(map(str, row))

    def batch_decode(self, rows, skip_special_tokens):
        return [" ".join(map(str, row)) for row in rows]


FIRST_NUMBER = Inline(lambda solution_str, **row: float(solution_str.split()[0]))
RLOO = ADVANTAGES["rloo"](whiten=False)
NOWHERE = Journal(Path(os.devnull))


def make_source(
    mailbox,
    *,
    grader=FIRST_NUMBER,
    overlong=None,
    sampling=None,
    advantage=RLOO,
    episode=single_turn,
    journal=NOWHERE,
    kept=None,
    **patience,
):
    examples = [Example(f"train:{n}", "lab", (Message("user", str(n)),), "", "", {}) for n in range(16)]
    train = EncodedPrompts(tuple((1, 2 + n) for n in range(16)), tuple(examples), (), ())
    reward = CONFIG.reward.model_copy(update={"overlong": overlong})
    return RolloutSource(
        CONFIG.model_copy(update={"reward": reward, "rollout": CONFIG.rollout.model_copy(update=sampling or {})}),
        mailbox,
        PromptSets(train, None, cast("PreTrainedTokenizerBase", FakeTokenizer()), (0,)),
        Scorers(grader, RewardModels(CONFIG, None), advantage),
        episode,
        Watch(journal, Timekeeper(), kept or KeptGroups(), **patience),
    )


def test_a_batch_is_the_same_whatever_the_latencies_and_is_asked_for_in_order():
    async def batch(seed):
        mailbox = FakeMailbox(seed)
        return await make_source(mailbox).next_batch(), mailbox.asked

    found = [asyncio.run(batch(seed)) for seed in range(3)]
    for sampled, asked in found:
        assert [one[:3] for one in asked] == [(p, s, p * 2 // P) for p in range(P) for s in range(G)]
        assert sampled.batch.prompt_index.tolist() == [p for p in range(P) for _ in range(G)]
        assert sampled.batch.scores.tolist() == [10.0 + p for p in range(P) for _ in range(G)]
        assert sampled.batch.tokens.tolist() == found[0][0].batch.tokens.tolist()
        assert sampled.metrics.scalars() == found[0][0].metrics.scalars()


async def asks_again(prompt, client):
    """Look at the first response, and ask for another one."""
    first = await client.sample(prompt.tokens)
    second = await client.sample((7, first.response[0]))
    return Trajectory(turns=(first, second))


def test_an_environment_of_two_turns_is_sampled_on_the_same_road_and_trains_its_own_tokens_only():
    async def main():
        mailbox = FakeMailbox()
        return await make_source(mailbox, episode=asks_again).next_batch(), mailbox.asked

    sampled, asked = asyncio.run(main())
    row = sampled.batch.rows([5])  # the second rollout of the third prompt
    prompt = row.tokens[:2].tolist()
    assert row.tokens.tolist() == [*prompt, 12, 21, 7, 12, 12, 21]
    assert row.loss_mask.tolist() == [False, False, True, True, False, False, True, True]
    assert row.rollout_logprobs.tolist() == [0, 0, -1, -2, 0, 0, -1, -2]
    first, second = [request for p, s, _, request in asked if (p, s) == (2, 1)]
    assert second.tokens == (*first.tokens, 12, 21, 7, 12)
    assert first.params.seed != second.params.seed
    assert dataclasses.replace(second.params, seed=first.params.seed) == first.params


async def goes_on(prompt, client):
    """Ask until there is no room."""
    turns = [await client.sample(prompt.tokens)]
    while True:
        turns.append(await client.sample((7, 7, 7)))


def test_a_turn_without_room_in_its_row_fails_that_rollout_and_not_the_run():
    async def main():
        mailbox = FakeMailbox()
        with pytest.raises(TooManyFailuresError, match="turn 4 begins with 17 tokens, and a row may have 13; raise"):
            await make_source(mailbox, episode=goes_on).next_batch()
        return [request.params.max_new_tokens for p, s, _, request in mailbox.asked if (p, s) == (0, 0)]

    assert asyncio.run(main()) == [5, 5, 1]


async def tries_twice(prompt, client):
    """Answer a prompt, once more if that fails."""
    try:
        return Trajectory(turns=(await client.sample(prompt.tokens),))
    except GenerationError:
        client._terms.sampler.failing = set()
        return Trajectory(turns=(await client.sample(prompt.tokens),))


def test_an_episode_may_repeat_a_turn_that_failed_and_asks_for_the_same_again():
    async def main():
        mailbox = FakeMailbox()
        mailbox.failing = {(1, 0)}
        return await make_source(mailbox, episode=tries_twice).next_batch(), mailbox.asked

    sampled, asked = asyncio.run(main())
    first, second = [request for p, s, _, request in asked if (p, s) == (1, 0)]
    assert second == first
    assert len(sampled.batch) == P * G


def test_an_error_of_scoring_while_others_are_sampled_is_all_that_is_said():
    said = []

    def unreadable(solution_str, **row):
        raise ValueError("unreadable")

    async def main():
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: said.append(context["message"]))
        mailbox = FakeMailbox()
        answer = mailbox.sample

        async def sample(request, rank, deliver=None):
            await asyncio.sleep(30 if request.prompt_index else 0)
            return await answer(request, rank)

        mailbox.sample = sample
        with pytest.raises(TooManyFailuresError, match="unreadable"):
            await make_source(mailbox, grader=Inline(unreadable), sampling={"max_failed": 0.0}).next_batch()
        await asyncio.sleep(0.01)
        gc.collect()

    asyncio.run(main())
    gc.collect()
    assert not said


def test_a_rollout_that_fails_is_left_out_and_counted():
    async def main():
        mailbox = FakeMailbox()
        mailbox.failing = {(1, 0), (2, 0), (2, 1)}
        return await make_source(mailbox).next_batch()

    sampled = asyncio.run(main())
    assert sampled.metrics.scalars()["rollout/failed"] == 3
    assert sampled.batch.prompt_index.tolist() == [0, 0, 1, 3, 3]


WAYS = ("timeout", "raised", "environment", "overlong", "malformed")


async def fails_in_five_ways(client, example):
    """Fail in three samples of ten, each time in another way."""
    first = await client.sample(client.prompt)
    prompt, sample = first.response[0] - 10, first.response[1] - 20
    match WAYS[(3 * prompt + sample) % 5] if sample in (1, 4, 8) else None:
        case None:
            return {"reward": prompt + sample / 2, "moves": 1}
        case "timeout":
            await asyncio.Event().wait()
        case "raised":
            raise LookupError(f"no {example.name}")
        case "environment":
            raise ConnectionError("the board is gone")
        case "overlong":
            await client.sample(range(99))
        case _:
            return "won"
    return None


async def fails_never(client, example):
    first = await client.sample(client.prompt)
    return {"reward": first.response[0] - 10 + (first.response[1] - 20) / 2, "moves": 1}


def test_episodes_that_fail_in_five_ways_leave_the_batch_of_the_rest_and_are_counted():
    said = []
    sampling = {"group_size": 10, "turn_timeout_s": 0.3}

    async def batch(episode, **more):
        source = make_source(FakeMailbox(), episode=episode, sampling=sampling | more, journal=heard(said.append))
        return await source.next_batch()

    whole, some = asyncio.run(batch(fails_never)).batch, asyncio.run(batch(fails_in_five_ways))
    rest = whole.rows([row for row in range(40) if row % 10 not in (1, 4, 8)])
    for field in dataclasses.fields(rest):
        mine, theirs = getattr(some.batch, field.name), getattr(rest, field.name)
        assert torch.equal(mine, theirs) if isinstance(theirs, torch.Tensor) else mine == theirs, field.name
    found = some.metrics.scalars()
    assert (found["rollout/failed"], found["episode/moves"]) == (12, 1)
    assert [found[f"rollout/failed_{way}"] for way in WAYS] == [2, 2, 3, 2, 3]
    assert found["rollout/failed_engine"] == 0
    (told,) = said
    assert told.startswith("left out: 12 rollouts failed (")
    assert "the episode's traceback for train:" in told
    with pytest.raises(TooManyFailuresError, match=r"of 40 rollouts more failed than rollout.max_failed=0.2"):
        asyncio.run(batch(fails_in_five_ways, max_failed=0.2))


def test_failed_episodes_and_failed_rewards_of_a_step_count_together():
    """Of 40 rollouts the episodes of 12 fail, and the function raises for a fourth of the other 28."""

    async def leaves_all_to_the_function(client, example):
        found = await fails_in_five_ways(client, example)
        return None if isinstance(found, dict) else found

    def raises_for_some(solution_str, **row):
        calls.append(solution_str)
        if len(calls) % 4 == 0:
            raise ValueError("unreadable")
        return 1.0

    async def batch(max_failed):
        calls.clear()
        sampling = {"group_size": 10, "turn_timeout_s": 0.3, "max_failed": max_failed}
        source = make_source(FakeMailbox(), episode=leaves_all_to_the_function, grader=Inline(raises_for_some),
                             sampling=sampling)  # fmt: skip
        return await source.next_batch()

    calls = []
    assert len(asyncio.run(batch(0.475)).batch) == 21
    with pytest.raises(
        TooManyFailuresError, match=r"of 40 rollouts more failed than rollout.max_failed=0.45"
    ) as raised:
        asyncio.run(batch(0.45))
    assert "rollouts failed (" in str(raised.value)
    assert "have no score (" in str(raised.value)


async def leaves_half_to_the_function(client, example):
    first = await client.sample(client.prompt)
    return None if first.response[1] % 2 else [-1.0]


@pytest.mark.parametrize("is_plural", [False, True])
def test_rollouts_without_a_reward_of_their_episode_are_scored_by_the_function_and_others_are_not(is_plural):
    asked = []

    def plural(data_sources, solution_strs, ground_truths, extra_infos):
        asked.extend(solution_strs)
        return [1.0] * len(solution_strs)

    def single(solution_str, **row):
        asked.append(solution_str)
        return 1.0

    async def main():
        grader = Inline(plural if is_plural else single)
        return await make_source(FakeMailbox(), grader=grader, episode=leaves_half_to_the_function).next_batch()

    assert asyncio.run(main()).batch.scores.tolist() == [-1.0, 1.0] * P
    assert sorted(asked) == [f"{10 + prompt} 21" for prompt in range(P)]


@pytest.mark.parametrize("max_staleness", range(3))
def test_batches_are_sampled_ahead_within_the_bound(max_staleness):
    async def main():
        mailbox = FakeMailbox()
        source = make_source(mailbox, sampling={"max_staleness": max_staleness})
        staleness = []
        for step in range(5):
            sampled = await source.next_batch()
            await asyncio.sleep(0.05)  # an update, beside which the groups ahead are sampled
            staleness.append(step - int(sampled.batch.versions.min()))
            assert sampled.batch.prompt_index[0] == step * P
            assert len(mailbox.asked) == (step + 1 + max_staleness) * P * G
            await source.load(step + 1)
        await source.close()
        return source.num_admitted, max(staleness)

    assert asyncio.run(main()) == (5 * P, max_staleness)


def test_a_batch_that_no_weights_were_loaded_for_is_refused():
    async def main():
        source = make_source(FakeMailbox())
        await source.next_batch()
        with pytest.raises(StalenessError, match="no weights were loaded since the batch before: version 0"):
            await source.next_batch()

    asyncio.run(main())


def test_a_token_older_than_the_bound_stops_the_run():
    async def main():
        mailbox = FakeMailbox()
        source = make_source(mailbox, sampling={"max_staleness": 1})
        for version in (4, 8):
            await source.next_batch()
            await source.load(version)
            mailbox.version = 0  # as of a rank that has missed the load
        with pytest.raises(
            StalenessError, match=r"prompt 8 was sampled from version 0; the newest is 8, .* allowed is 4"
        ):
            await source.next_batch()

    asyncio.run(main())


def test_a_window_lets_a_step_overtake_a_straggler_and_the_straggler_is_taken_later():
    async def main():
        mailbox, straggler = FakeMailbox(), asyncio.Event()
        answer = mailbox.sample

        async def sample(request, rank, deliver=None):
            if request.prompt_index == 0:
                await straggler.wait()
            return await answer(request, rank)

        mailbox.sample = sample
        source = make_source(mailbox, sampling={"max_staleness": 2, "window": P + 1})
        first = await source.next_batch()
        kept = source.done
        await source.load(1)
        straggler.set()
        second = await source.next_batch()
        await source.close()
        return first.batch.prompt_index.unique().tolist(), kept, second.batch.prompt_index.unique().tolist()

    first, kept, second = asyncio.run(main())
    assert first == [1, 2, 3, 4]
    assert (kept.num_taken, kept.oldest, kept.ahead) == (P, 0, (1, 2, 3, 4))
    assert second[0] == 0


@pytest.mark.parametrize("is_reward", [False, True], ids=["rank", "reward"])
@pytest.mark.parametrize("max_staleness", [0, 1])
def test_a_rank_or_reward_that_is_much_slower_is_named_and_loses_no_group(is_reward, max_staleness):
    said, free = [], threading.Event()

    def score(solution_str, **row):
        return float(free.wait(60)) if is_reward and solution_str.startswith("12 ") else 1.0

    async def main():
        mailbox, named = FakeMailbox(), asyncio.Event()
        answer = mailbox.sample

        async def sample(request, rank, deliver=None):
            if not is_reward and request.prompt_index == 2:
                await asyncio.to_thread(free.wait, 60)
            return await answer(request, rank)

        def say(line):
            said.append(line)
            named.set()

        mailbox.sample = sample
        source = make_source(
            mailbox,
            sampling={"max_staleness": max_staleness},
            grader=InThreads(score),
            journal=heard(say),
            patience_s=0.02,
        )
        batch = asyncio.create_task(source.next_batch())
        await asyncio.wait_for(named.wait(), 60)
        free.set()
        sampled = await batch
        await source.close()
        return sampled

    sampled = asyncio.run(main())
    assert sampled.batch.prompt_index.tolist() == [p for p in range(P) for _ in range(G)]
    doing = "scored" if is_reward else "sampled by rank 1 of rollout"
    assert f"the step waits for 1 of {P} prompts: train:" in said[0]
    assert "prompt 2 of the run, has been under way for" in said[0]
    assert f"is being {doing}; most others took" in said[0]


def test_episodes_that_wait_for_something_else_than_a_response_are_named_also_in_a_first_step():
    said = []

    async def main():
        mailbox, named = FakeMailbox(), asyncio.Event()
        mailbox.is_idle.set()

        async def uses_a_tool(prompt, client):
            await named.wait()
            return Trajectory(turns=(await client.sample(prompt.tokens),))

        def say(line):
            said.append(line)
            named.set()

        sampled = await make_source(mailbox, episode=uses_a_tool, journal=heard(say), patience_s=0.02).next_batch()
        return len(sampled.batch)

    assert asyncio.run(main()) == P * G
    assert f"the step waits for {P} of {P} prompts, of which no response is being sampled: train:" in said[0]
    assert "has an episode that waits for something else; give what it awaits a deadline" in said[0]


def test_the_turns_of_an_episode_have_the_versions_that_sampled_them_and_a_row_counts_as_its_oldest():
    async def main():
        mailbox, loaded = FakeMailbox(), asyncio.Event()

        async def over_a_load(prompt, client):
            first = await client.sample(prompt.tokens)
            if client.prompt_index >= P:
                await loaded.wait()
            return Trajectory(turns=(first, await client.sample((7,))))

        source = make_source(mailbox, episode=over_a_load, sampling={"max_staleness": 1})
        await source.next_batch()
        await asyncio.sleep(0.05)  # the second step's first turns are sampled meanwhile
        await source.load(1)
        loaded.set()
        batch = (await source.next_batch()).batch
        await source.close()
        return batch

    batch = asyncio.run(main())
    assert batch.versions.tolist() == [0] * P * G
    assert batch.rows([0]).token_versions.tolist() == [0, 0, 0, 0, 0, 1, 1]


def test_a_step_that_is_given_up_while_others_are_sampled_ahead_is_not_done_and_leaves_nothing_running():
    hangs, free = threading.Event(), threading.Event()

    def score(solution_str, **row):
        if solution_str.startswith(f"{10 + P} "):  # the first prompt of the second step
            hangs.set()
            free.wait(60)
        return 1.0

    async def main():
        mailbox = FakeMailbox()
        source = make_source(mailbox, sampling={"max_staleness": 2}, grader=InThreads(score), grace_s=0.01)
        await source.next_batch()
        await source.load(1)
        second = asyncio.create_task(source.next_batch())
        await asyncio.to_thread(hangs.wait, 60)
        source.hurry()
        with pytest.raises(AbandonedError, match=r"the reward function was busy for 0\.01 s more"):
            await second
        free.set()
        done, before = source.done, mailbox.num_stops
        await source.close()
        resumed = make_source(FakeMailbox(), sampling={"max_staleness": 2})
        resumed.done = done
        again = await resumed.next_batch()
        await resumed.close()
        return done, before, again

    done, num_stops, again = asyncio.run(main())
    assert done == PromptsDone(P, P)
    assert num_stops == 1
    assert again.batch.prompt_index.unique().tolist() == list(range(P, 2 * P))


def test_the_versions_of_tokens_reach_the_batch_and_the_metrics():
    async def main():
        mailbox = FakeMailbox()
        source = make_source(mailbox, sampling={"max_staleness": 1})
        await source.next_batch()
        await source.load(3)
        sampled = await source.next_batch()  # of version 0, but for what was sampled since
        await source.close()
        return sampled

    sampled = asyncio.run(main())
    batch, metrics = sampled.batch, sampled.metrics.scalars()
    assert batch.token_versions is not None
    assert (batch.token_versions[batch.loss_mask].view(-1, 2) == batch.versions.unsqueeze(1)).all()
    assert metrics["rollout/staleness_max"] == float((batch.versions < 3).any())
    assert metrics["rollout/staleness_mean"] == pytest.approx(float((batch.versions < 3).double().mean()))
    assert 0 <= metrics["actor/idle"] <= 1


def test_groups_of_equal_scores_are_replaced_by_the_next_prompts_and_counted():
    async def batches(seed):
        mailbox = FakeMailbox(seed)
        source = make_source(mailbox, grader=some_equal(3), sampling={"dynamic_sampling": 4})
        first = await source.next_batch()
        done = source.done
        await source.load(1)
        return first, done, await source.next_batch()

    (first, done, second), again = asyncio.run(batches(0)), asyncio.run(batches(1))
    assert first.batch.prompt_index.tolist() == [p for p in (1, 2, 4, 5) for _ in range(G)]
    assert (done.num_taken, done.oldest) == (4, 6)
    assert second.batch.prompt_index.tolist() == [p for p in (7, 8, 10, 11) for _ in range(G)]
    for sampled, replaced, epoch in ((first, [0, 3], 6 / 16), (second, [6, 9], 12 / 16)):
        rows, scalars = sampled.rollouts.table(1).to_pylist(), sampled.metrics.scalars()
        assert (scalars["rollout/num_replaced"], scalars["data/epoch"]) == (2, epoch)
        assert [row["prompt_index"] for row in rows if row["replaced"]] == [p for p in replaced for _ in range(G)]
        assert scalars["reward/mean"] == pytest.approx(sum(row["score"] for row in rows) / len(rows))
        assert scalars["reward/std"] == pytest.approx(statistics.pstdev(row["score"] for row in rows))
        assert scalars["reward/kept_mean"] == pytest.approx(float(sampled.batch.scores.mean()))
        assert scalars["rollout/num_tokens"] == sum(sum(row["loss_mask"]) for row in rows)
        assert scalars["reward/num_scored"] == len(rows) == (P + 2) * G
    assert again[2].batch.tokens.tolist() == second.batch.tokens.tolist()


class LongerThirds(FakeMailbox):
    """Says more to every third prompt."""

    async def sample(self, request, rank, deliver=None):
        (one,) = await super().sample(request, rank)
        if request.prompt_index % 3:
            return [one]
        return [
            dataclasses.replace(one, tokens=(*one.tokens, 1, 1, 1), logprobs=(-1.0,) * 5, sampled_logprobs=(-1.0,) * 5)
        ]


def test_what_is_lost_for_length_and_the_lengths_are_of_all_that_was_sampled():
    async def batch(sampling):
        overlong = OverlongConfig(buffer_tokens=4, factor=1.0)
        source = make_source(LongerThirds(), grader=some_equal(3), overlong=overlong, sampling=sampling)
        return await source.next_batch()

    sampled, scalars = (found := asyncio.run(batch({"dynamic_sampling": 4}))), found.metrics.scalars()
    assert scalars["rollout/num_replaced"] == 2
    assert scalars["rollout/response_length"] == pytest.approx((4 * 2 + 2 * 5) / 6)
    assert scalars["reward/overlong_penalty"] == pytest.approx((4 * 0.25 + 2 * 1.0) / 6)
    assert scalars["reward/kept_mean"] - 0.25 == pytest.approx(float(sampled.batch.scores.mean()))
    assert asyncio.run(batch({})).metrics.scalars()["reward/overlong_penalty"] == pytest.approx((1 + 0.25) / 2)


def test_a_run_goes_on_behind_the_prompts_that_were_replaced():
    async def second(done):
        source = make_source(FakeMailbox(), grader=some_equal(3), sampling={"dynamic_sampling": 4})
        source.done = done
        return (await source.next_batch()).batch.prompt_index.tolist()

    assert asyncio.run(second(PromptsDone(4, 6)))[::G] == [7, 8, 10, 11]


@pytest.mark.parametrize("sampling", [{}, {"dynamic_sampling": 4}])
def test_a_run_resumed_anywhere_in_an_epoch_takes_the_prompts_of_one_that_was_never_stopped(sampling):
    async def steps(done, num):
        source, found = make_source(FakeMailbox(), grader=some_equal(3), sampling=sampling), []
        source.done = done
        for step in range(num):
            await source.load(step)
            batch = await source.next_batch()
            found.append((source.done, source.examples_of(batch.batch)[::G], batch.metrics.scalars()["data/epoch"]))
        return found

    whole = asyncio.run(steps(PromptsDone(), 6))
    assert whole[-1][2] > 1.4, "an epoch ends within a step"
    for step, (done, _, _) in enumerate(whole[:-1], start=1):
        assert asyncio.run(steps(done, 6 - step)) == whole[step:]


def test_what_is_replaced_is_what_the_advantage_finds_no_difference_in():
    """All scores are 0.5 or 1: right answers, whatever else they earned."""

    async def chosen(advantage):
        grader = Inline(lambda solution_str, extra_info, **row: 0.5 + 0.5 * (float(solution_str.split()[1]) % 2))
        source = make_source(FakeMailbox(), grader=grader, sampling={"dynamic_sampling": 2}, advantage=advantage)
        try:
            return (await source.next_batch()).batch.prompt_index.tolist()[::G]
        finally:
            await source.close()

    assert asyncio.run(chosen(ADVANTAGES["rloo"](whiten=False))) == [0, 1, 2, 3]
    with pytest.raises(RewardError, match="equal for 8 prompts"):
        asyncio.run(chosen(ADVANTAGES["pass_at_k"](whiten=False, k=1)))


def test_prompts_that_never_differ_stop_the_run_with_advice_and_leave_nothing_under_way():
    async def main():
        source = make_source(FakeMailbox(), grader=some_equal(1), sampling={"dynamic_sampling": 3})
        with pytest.raises(RewardError, match=r"equal for 12 prompts of a step, 3 times .*raise rollout.group_size"):
            await source.next_batch()
        await source.close()

    asyncio.run(main())


@pytest.mark.parametrize("max_staleness", [1, 2])
def test_groups_of_equal_scores_are_replaced_while_others_are_trained_on_in_the_same_order_whatever_the_latencies(
    max_staleness,
):
    async def steps(seed):
        mailbox, found = FakeMailbox(seed), []
        sampling = {"max_staleness": max_staleness, "dynamic_sampling": 4}
        source = make_source(mailbox, grader=some_equal(3), sampling=sampling)
        for step in range(4):
            sampled = await source.next_batch()
            assert step - int(sampled.batch.versions.min()) <= max_staleness
            found.append((sampled.batch.prompt_index.tolist()[::G], sampled.metrics.scalars()["rollout/num_replaced"]))
            await asyncio.sleep(0.02)  # an update
            await source.load(step + 1)
        done = source.done
        await source.close()
        resumed = make_source(FakeMailbox(), grader=some_equal(3), sampling=sampling)
        resumed.done = done
        after = (await resumed.next_batch()).batch.prompt_index.tolist()[::G]
        await resumed.close()
        return found, done, after, {index: rank for index, _, rank, _ in mailbox.asked}

    runs = [asyncio.run(steps(seed)) for seed in range(3)]
    for found, done, after, ranks in runs:
        assert found == [
            ([1, 2, 4, 5], 2),
            ([7, 8, 10, 11], 2),
            ([13, 14, 16, 17], 2),
            ([19, 20, 22, 23], 2),
        ]
        assert {*range(done.oldest), *done.ahead} >= {*range(24)}
        assert all(index % 3 == 0 for index in done.ahead)
        assert after == [25, 26, 28, 29]
        assert all(rank == index % P * 2 // P for index, rank in ranks.items()), "a replacement's rank is its own"


@pytest.mark.parametrize("window", [1, 3])
def test_prompts_that_never_differ_stop_a_run_that_samples_ahead(window):
    async def main():
        sampling = {"max_staleness": 1, "dynamic_sampling": 3, "window": window}
        source = make_source(FakeMailbox(), grader=some_equal(1), sampling=sampling)
        with pytest.raises(RewardError, match=r"equal for \d+ prompts of a step, 3 times .*raise rollout.group_size"):
            await source.next_batch()
        await source.close()
        return source.num_admitted

    assert asyncio.run(main()) == 0


class FakeRanks:
    """Ranks whose responses take so many steps each, a prompt; slices take a while."""

    num_ranks = 2

    def __init__(self, lengths, seed=0):
        self.lengths, self.random, self.running, self.begun = lengths, random.Random(seed), [{}, {}], []

    async def forget(self):
        self.running = [{}, {}]

    async def load(self, version, published):
        pass

    async def until_whole(self, ranks):
        pass

    async def advance(self, rank, orders):
        self.begun += [request.prompt_index for _, request in orders.new]
        await asyncio.sleep(self.random.random() * 0.003)
        return self.step(self.running[rank], orders)

    def step(self, running, orders):
        for number, request in orders.new:
            running[number] = [self.lengths(request.prompt_index, request.sample_index), request]
        outputs = []
        for _ in range(orders.num_steps or self.random.randrange(1, 40)):
            for number, (left, request) in list(running.items()):
                running[number][0] -= 1
                if left <= 1:
                    del running[number]
                    outputs.append(answer(number, request, orders.version))
        return SliceResult(tuple(outputs))


class CompanyRanks(FakeRanks):
    """Ranks whose tokens depend on the weights and on all that is sampled beside, as those of a real engine do."""

    def __init__(self, lengths, seed):
        super().__init__(lengths, seed)
        self.turns = [asyncio.Lock(), asyncio.Lock()]  # a rank does one thing after the other

    async def advance(self, rank, orders):
        async with self.turns[rank]:
            return await super().advance(rank, orders)

    async def load(self, version, published):
        async with self.turns[0], self.turns[1]:
            pass

    def step(self, running, orders):
        for number, request in orders.new:
            running[number] = [self.lengths(request.prompt_index, request.sample_index), request, 0]
        outputs, num_steps = [], 0
        most = self.random.randrange(1, 9) if orders.num_steps is None else orders.num_steps
        while running and num_steps < most:
            num_steps += 1
            company = sum(left * (1 + request.prompt_index) for left, request, _ in running.values())
            for number, (left, request, seen) in list(running.items()):
                running[number] = [left - 1, request, (31 * seen + company + orders.version) % 9973]
                if left <= 1:
                    whole = answer(number, request, orders.version)
                    outputs.append(dataclasses.replace(whole, tokens=(*whole.tokens[:1], running.pop(number)[2])))
        return SliceResult(tuple(outputs), num_steps)


def differ_by_company(solution_str, **row):
    return float(int(solution_str.split()[1]) % 5 > 0)  # two of two are alike in two thirds of all groups


@pytest.mark.parametrize(("window", "killed_in"), [(1, 3), (3, 3), (1, 5), (3, 5)])
def test_a_run_that_replaces_groups_ahead_is_repeated_by_its_schedule_also_where_it_was_killed(
    tmp_path, window, killed_in
):
    """It goes on after step 3, with the groups that it had finished before it had newer weights."""
    replaced, kept = [], KeptGroups(is_on=True, is_ahead=True)
    file, sampling = tmp_path / "journal.jsonl", {"max_staleness": 2, "dynamic_sampling": 99, "window": window}

    async def steps(journal, schedule, seed, first, last, done=None, kept=kept):
        ranks = CompanyRanks(lambda prompt, sample: 1 + (7 * prompt + 3 * sample) % 11, seed)
        more = {"grader": Inline(differ_by_company), "sampling": sampling, "journal": journal, "kept": kept}
        source = make_source(Mailbox(ranks, schedule), **more)
        if done is not None:
            source.go_on(first, first, done)
        found = []
        source.announce(first, "")
        await source.load(first)
        for step in range(first, last):
            sampled = await source.next_batch()
            ages = sampled.batch.steps_behind.tolist()
            found.append((sampled.batch.tokens.tolist(), sampled.batch.versions.tolist(), ages))
            replaced.append(sampled.metrics.scalars()["rollout/num_replaced"])
            await asyncio.sleep(ranks.random.random() * 0.01)  # an update
            while step + 1 == 3 and sum(map(source._groups.is_complete, kept.groups)) < 2:
                await asyncio.sleep(0.001)  # the update takes until two groups of later steps can be trained on
            source.announce(step + 1, "")
            await source.load(step + 1)
            if step + 1 == 3:
                done = source.done
        await source.close()
        return found, done

    def recorded(seed, first, last, done=None):
        with Journal(file) as journal:
            journal.append(RunBegan(first=first, config={"rollout.window": window}, software={}, machine=""))
            schedule = Schedule(Recorder(journal, Origin(2, {}), CONFIG.seed))
            return asyncio.run(steps(journal, schedule, seed, first, last, done))

    found, done = recorded(1, 0, killed_in)
    killed = found[:3]
    rest, _ = recorded(2, 3, 6, done)
    (resumed,) = (entry.event for entry in read_journal(file) if isinstance(entry.event, Resumed))
    assert len(resumed.kept) > 1
    sent = [name for entry in read_journal(file) if isinstance(entry.event, SliceSent) for name in entry.event.new]
    assert all(sum(prompt == one for _, prompt, *_ in sent) == 1 for one in resumed.kept), "they are sampled once"

    async def again(seed):
        nowhere = Journal(Path(os.devnull))
        replay = ScheduleReplay(RecordedSchedule.read(file), CONFIG.seed, journal=nowhere, timeout_s=60)
        kept = KeptGroups(is_on=True, is_ahead=True)
        return (await steps(nowhere, Schedule(replay=replay), seed, 0, 6, kept=kept))[0]

    for seed in (3, 4):
        assert asyncio.run(again(seed)) == killed + rest
    assert sum(replaced[:6]) > 6
    if window == 1:
        assert replaced[-6:] == replaced[-12:-6] == [*replaced[:3], *replaced[killed_in : killed_in + 3]]


@pytest.mark.parametrize("hangs", [True, False], ids=["it hangs again", "it is quick this time"])
def test_a_schedule_repeats_the_rollouts_that_timed_out_whatever_takes_long_now(tmp_path, hangs):
    file, is_first = tmp_path / "journal.jsonl", [True]

    async def asks_twice(client, example):
        first = await client.sample(client.prompt)
        if first.response[1] % 3 == 0 and (is_first[0] or hangs):
            await asyncio.Event().wait()
        return float((await client.sample((7,))).response[1] % 2)

    async def steps(journal, schedule, seed):
        ranks = CompanyRanks(lambda prompt, sample: 1 + (7 * prompt + 3 * sample) % 11, seed)
        sampling = {"max_staleness": 1, "turn_timeout_s": 0.2 if is_first[0] else 1e-9, "max_failed": 1.0}
        source = make_source(Mailbox(ranks, schedule), episode=asks_twice, journal=journal, sampling=sampling)
        found, num_failed = [], 0
        await source.load(0)
        for step in range(3):
            sampled = await source.next_batch()
            found.append((sampled.batch.tokens.tolist(), sampled.batch.versions.tolist()))
            num_failed += sampled.metrics.scalars()["rollout/failed_timeout"]
            await source.load(step + 1)
        await source.close()
        return found, num_failed

    with Journal(file) as journal:
        journal.append(RunBegan(first=0, config={}, software={}, machine=""))
        before = asyncio.run(steps(journal, Schedule(Recorder(journal, Origin(2, {}), CONFIG.seed)), 1))
    is_first[0] = False
    replay = ScheduleReplay(RecordedSchedule.read(file), CONFIG.seed, journal=NOWHERE, timeout_s=60)
    assert asyncio.run(steps(NOWHERE, Schedule(replay=replay), 2)) == before
    assert 0 < before[1] < 24


def answer(number, request, version):
    return Output(
        request_id=number,
        tokens=(10 + request.prompt_index, 20 + request.sample_index),
        logprobs=(-1.0, -2.0),
        sampled_logprobs=(-1.0, -2.0),
        version=version,
        finish_reason="stop",
    )


def over_sampled(ranks, **options):
    mailbox = Mailbox(ranks, Schedule())
    mailbox.num_loads = 1
    return make_source(mailbox, **options)


async def steps_of(source, num_steps):
    """Return the prompts of each step, and how many were given up or replaced."""
    found = []
    for step in range(num_steps):
        sampled = await source.next_batch()
        counts = sampled.metrics.scalars()
        found.append(
            (
                sampled.batch.prompt_index.tolist()[::G],
                counts["rollout/num_aborted"],
                counts.get("rollout/num_replaced"),
            )
        )
        assert source.mailbox.is_idle.is_set() or not any(source.role.running)
        await source.load(step + 1)
    return found


def test_an_over_sampled_step_takes_the_first_groups_that_end_by_steps_of_the_engines_not_by_time():
    def lengths(prompt, sample):  # slices have 16 steps: prompts 1 and 4 end last, 5 in the slice of 2 and 3
        return 100 if (prompt % 6 in (1, 4) and sample == 1) else 20 if prompt % 6 in (2, 3, 5) else 3

    async def steps(seed):
        ranks = FakeRanks(lengths, seed)
        source = over_sampled(ranks, sampling={"over_sampling": 6})
        found = await steps_of(source, 3)
        return found, ranks.begun

    (found, begun), *others = [asyncio.run(steps(seed)) for seed in range(4)]
    assert found == [([0, 2, 3, 5], 2, None), ([6, 8, 9, 11], 2, None), ([1, 4, 7, 10], 0, None)]
    assert begun.count(1) == 2 * G
    assert begun.count(0) == G
    assert all(other == (found, begun) for other in others)


def test_an_over_sampled_step_replaces_groups_of_equal_scores_and_a_resumed_run_goes_on_alike():
    async def steps(seed, done=None, num_steps=3):
        ranks = FakeRanks(lambda prompt, sample: 1 + 7 * prompt % 61, seed)
        source = over_sampled(ranks, sampling={"over_sampling": 6, "dynamic_sampling": 4}, grader=some_equal(3))
        source.done = done or source.done
        found = await steps_of(source, num_steps)
        return found, source.done

    found, _ = asyncio.run(steps(0))
    assert all(one % 3 for taken, _, _ in found for one in taken)
    assert sum(replaced for _, _, replaced in found) > 0
    assert asyncio.run(steps(1))[0] == found
    begun, done = asyncio.run(steps(2, num_steps=1))
    assert begun + asyncio.run(steps(3, done, num_steps=2))[0] == found


async def asks_slowly(prompt, client):
    """Answer once, then use a tool."""
    turn = await client.sample(prompt.tokens)
    await asyncio.sleep(0.01 * (client.prompt_index % 6))
    return Trajectory(turns=(turn,))


def test_an_over_sampled_step_looks_at_groups_that_end_while_no_rank_samples():
    async def main():
        source = over_sampled(FakeRanks(lambda *_: 3), sampling={"over_sampling": 6}, episode=asks_slowly)
        return await asyncio.wait_for(steps_of(source, 2), 60)

    assert [len(taken) for taken, _, _ in asyncio.run(main())] == [P, P]


def some_equal(every):
    """Return what scores the rollouts of every so-many-th prompt alike, and others by their number."""

    def score(solution_str, **row):
        prompt, sample = map(int, solution_str.split()[:2])
        return 0.5 if (prompt - 10) % every == 0 else float(sample)

    return Inline(score)


def test_a_step_that_is_done_again_takes_the_batch_that_was_sampled_for_it_but_no_part_of_one():
    kept = KeptGroups(is_on=True)

    async def step():
        mailbox = FakeMailbox(0)
        batch = (await make_source(mailbox, kept=kept).next_batch()).batch
        return batch.tokens.tolist(), batch.scores.tolist(), sorted({prompt for prompt, *_ in mailbox.asked})

    everything = list(range(P))
    *first, asked = asyncio.run(step())
    assert asked == everything
    assert asyncio.run(step()) == (*first, []), "a process was lost, nothing is saved"
    kept.forget([1])
    assert asyncio.run(step()) == (*first, everything), "rows may depend on those beside them"
    kept.saved(1)
    assert asyncio.run(step())[2] == everything
