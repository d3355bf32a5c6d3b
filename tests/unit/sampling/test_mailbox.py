"""Requests are kept until they have ended: whatever ranks are lost, and without waiting for slower ones."""

import asyncio
import dataclasses
import random

import pytest
from tiny_models import make_tiny_model

from rallypoint.cluster import Mesh, WorkerContext
from rallypoint.config import load_config
from rallypoint.errors import GenerationError, WorkerDiedError
from rallypoint.generation import Output, Request, SamplingParams
from rallypoint.recipes.recipe import actor_loss_of
from rallypoint.roles.actor import ActorWorker
from rallypoint.roles.placement import SharedFolder, WorkerSpec
from rallypoint.roles.rank_engine import SliceResult
from rallypoint.roles.rollout import RolloutWorker
from rallypoint.sampling.mailbox import Mailbox, RequestQueue
from rallypoint.sampling.replay import Schedule

REQUEST = Request(tokens=(1, 2), params=SamplingParams(max_new_tokens=2))
NUM_TOKENS = 6


def request(prompt, sample=0, seed=3):
    params = SamplingParams(max_new_tokens=NUM_TOKENS, seed=seed)
    return Request(tokens=(1, 2), params=params, prompt_index=prompt, sample_index=sample)


def token_of(request, position):
    """Return a token that follows from what a request is, and from nothing else."""
    return random.Random(f"{request.params.seed} {request.prompt_index} {request.sample_index} {position}").randrange(
        100
    )


class Ranks:
    """Ranks that give each request a token a slice; one may be lost, with all that it had."""

    def __init__(self, num_ranks=2):
        self.num_ranks, self.running, self.asked = num_ranks, [{} for _ in range(num_ranks)], []
        self.lost, self.free = {}, [asyncio.Event() for _ in range(num_ranks)]
        for event in self.free:
            event.set()

    async def until_whole(self, ranks):
        pass

    async def advance(self, rank, asked):
        self.asked.append((rank, [request.prompt_index for _, request in asked.new], asked.num_steps))
        await self.free[rank].wait()
        await asyncio.sleep(0)
        running = self.running[rank]
        running |= {number: [request, 0] for number, request in asked.new}
        for number in asked.cancelled:
            running.pop(number, None)
        outputs = [self.step(number, one) for number, one in list(running.items())]
        for output in outputs:
            if output.finish_reason is not None:
                del running[output.request_id]
        self.lost[rank] = self.lost.get(rank, -1) - 1
        if self.lost[rank] == 0:  # in the middle of a slice, whose outputs nobody gets
            running.clear()
            raise WorkerDiedError("rollout", rank, "advance", "it was killed")
        return SliceResult(tuple(outputs))

    def step(self, number, one):
        request, position = one
        one[1] += 1
        reason = "length" if one[1] == NUM_TOKENS else None
        token = (token_of(request, position),)
        return Output(
            request_id=number, tokens=token, logprobs=(0.0,), sampled_logprobs=(0.0,), version=0, finish_reason=reason
        )

    async def forget(self):
        for running in self.running:
            running.clear()


class Restoring:
    """Has a rank anew at once, and counts."""

    def __init__(self):
        self.restored = []

    async def restore(self, error):
        self.restored.append((error.rank, type(error)))
        await asyncio.sleep(0)


async def responses(mailbox, *requests, ranks):
    found = await asyncio.gather(*map(mailbox.sample, requests, ranks))
    return [[token for output in outputs for token in output.tokens] for outputs in found]


ASKED = [request(prompt, sample) for prompt in range(2) for sample in range(2)]
EXPECTED = [[token_of(one, position) for position in range(NUM_TOKENS)] for one in ASKED]


@pytest.mark.parametrize("is_watched", [False, True], ids=["alone", "at a barrier"])
def test_what_a_lost_rank_had_is_sent_again_and_gives_the_same_tokens(is_watched):
    async def main():
        ranks, supervisor = Ranks(), Restoring()
        ranks.lost[1] = 3  # it has given two tokens of each by then
        mailbox = Mailbox(ranks, Schedule(), supervisor)
        if not is_watched:
            return await responses(mailbox, *ASKED, ranks=[0, 0, 1, 1]), supervisor, ranks
        with mailbox.barrier.watched():
            waiting = asyncio.create_task(responses(mailbox, *ASKED, ranks=[0, 0, 1, 1]))
            while not waiting.done():
                nearer = asyncio.create_task(mailbox.barrier.next())
                await asyncio.wait({nearer, waiting}, return_when=asyncio.FIRST_COMPLETED)
                nearer.cancel()
        return await waiting, supervisor, ranks

    found, supervisor, ranks = asyncio.run(main())
    assert found == EXPECTED
    assert supervisor.restored == [(1, WorkerDiedError)]
    assert [new for rank, new, _ in ranks.asked if rank == 1 and new] == [[1, 1], [1, 1]]
    assert [new for rank, new, _ in ranks.asked if rank == 0 and new] == [[0, 0]] * (2 if is_watched else 1)


def test_a_lost_rank_without_a_supervisor_fails_all_requests_with_its_error():
    async def main():
        ranks = Ranks()
        ranks.lost[1] = 3
        mailbox = Mailbox(ranks, Schedule())
        found = await asyncio.gather(*map(mailbox.sample, ASKED, [0, 0, 1, 1]), return_exceptions=True)
        await mailbox.stop()
        assert mailbox.is_idle.is_set()
        return found

    assert {type(one) for one in asyncio.run(main())} == {WorkerDiedError}


def test_no_rank_waits_for_a_slower_one():
    async def main():
        ranks = Ranks()
        ranks.free[1].clear()
        mailbox = Mailbox(ranks, Schedule())
        slow = asyncio.create_task(responses(mailbox, ASKED[2], ranks=[1]))
        fast = await responses(mailbox, *ASKED[:2], ranks=[0, 0])
        assert not slow.done()
        ranks.free[1].set()
        return [*fast, *await slow]

    assert asyncio.run(main()) == EXPECTED[:3]


class InThisProcess:
    """A rank with its real engine, which may be lost in the middle of its responses."""

    num_ranks = 1

    def __init__(self, worker, lost_in=None):
        self.worker, self.lost_in, self.num_slices = worker, lost_in, 0

    async def until_whole(self, ranks):
        pass

    async def advance(self, rank, asked):
        done = self.worker.advance(dataclasses.replace(asked, num_steps=3))
        self.num_slices += 1
        if self.num_slices == self.lost_in:
            self.worker.forget()
            raise WorkerDiedError("rollout", rank, "advance", "it was killed")
        return done


def test_responses_of_a_real_engine_that_is_lost_in_their_middle_are_the_same(tmp_path):
    spec = WorkerSpec(
        load_config("digits").config, make_tiny_model(tmp_path / "model"), SharedFolder.marked(tmp_path), None
    )
    context = WorkerContext("rollout", 0, Mesh({"dp_replicate": 1}), 1, "cpu", {}, lambda: None)
    ActorWorker(context, spec, actor_loss_of(spec.config))
    worker = RolloutWorker(context, spec, shares_actor=True)
    params = SamplingParams(max_new_tokens=8)
    asked = [
        Request(tokens=(3, 4 + prompt), params=params, prompt_index=prompt, sample_index=sample)
        for prompt in range(2)
        for sample in range(2)
    ]

    async def sampled(lost_in):
        rank = InThisProcess(worker, lost_in)
        found = await asyncio.gather(*map(Mailbox(rank, Schedule(), Restoring()).sample, asked))
        return [[(one.tokens, one.logprobs) for one in outputs] for outputs in found], rank.num_slices

    whole, num_slices = asyncio.run(sampled(None))
    again, more = asyncio.run(sampled(2))
    assert again == whole
    assert (num_slices, more) == (3, 5)


def test_ranks_are_told_to_forget_what_the_driver_forgot_with_their_next_orders():
    async def main():
        queue = RequestQueue(2)
        for number in range(3):
            queue.submit(number, REQUEST, "training", rank=number % 2)
        first = [queue.take(rank, version=3) for rank in (0, 1)]
        given_up = queue.clear()  # as after an error of one of the ranks
        assert [one.number for one in given_up] == [0, 1, 2]
        assert not queue.open
        queue.submit(7, REQUEST, "training", rank=1)
        return first, [queue.take(rank, version=3) for rank in (0, 1)]

    first, second = asyncio.run(main())
    assert [len(orders.new) for orders in first] == [2, 1]
    assert [orders.cancelled for orders in second] == [(0, 2), (1,)]
    assert [[number for number, _ in orders.new] for orders in second] == [[], [7]]


def test_a_person_who_has_read_a_beginning_is_told_that_it_is_lost_and_others_are_answered():
    async def main():
        queue, heard = RequestQueue(1), {1: [], 2: []}
        for number in heard:
            queue.submit(number, REQUEST, "person", rank=0, deliver=heard[number].append)
        begun = queue.take(0, version=0)
        one = Output(request_id=1, tokens=(5,), logprobs=(0.0,), sampled_logprobs=(0.0,), version=0)
        queue.receive([one])
        queue.resend(0)
        return begun, queue.take(0, version=0), heard

    begun, again, heard = asyncio.run(main())
    assert [number for number, _ in begun.new] == [1, 2]
    assert ([number for number, _ in again.new], again.cancelled) == ([2], ())
    assert isinstance(heard[1][-1].error, GenerationError)
    assert heard[2] == []


def test_what_was_read_of_a_response_is_not_delivered_again_after_its_rank_was_lost():
    def output(number, *tokens, reason=None):
        numbers = tuple(map(float, tokens))
        own = {"tokens": tokens, "logprobs": numbers, "sampled_logprobs": numbers}
        return Output(request_id=number, **own, version=0, finish_reason=reason)

    async def main():
        queue, delivered = RequestQueue(1), []
        for number in (1, 2):
            queue.submit(number, REQUEST, "training", deliver=delivered.append)
        queue.receive([output(1, 5), output(1, 6), output(2, 5)])
        queue.resend(0)
        queue.receive([output(1, 5)])
        queue.resend(0)  # before all of it was there again
        queue.receive([output(1, 5, 6, 7, reason="stop"), output(2, 8)])
        return delivered, queue.open

    delivered, still_open = asyncio.run(main())
    assert still_open == ()
    assert [one.tokens for one in delivered if one.request_id == 1] == [(5,), (6,), (), (7,)]
    assert "newer weights differ" in str(delivered[-1].error)


class TogetherRanks(Ranks):
    """Ranks whose tokens depend on who is in the batch, as logits do without `rollout.exact`."""

    def step(self, number, one):
        batch = sorted(request.prompt_index for request, _ in self.running[0].values())
        output = super().step(number, one)
        return dataclasses.replace(output, tokens=(output.tokens[0] + 1000 * len(batch) + sum(batch),))


@pytest.mark.parametrize("lost_in", range(1, 14))
def test_what_is_sampled_in_one_batch_is_sampled_again_in_the_same_one_also_with_what_has_ended(lost_in):
    lengths = (2, 9, 4, 12)
    asked = [
        dataclasses.replace(request(prompt), params=SamplingParams(max_new_tokens=lengths[prompt], seed=3))
        for prompt in range(4)
    ]

    class OfLengths(TogetherRanks):
        def step(self, number, one):
            output = super().step(number, one)
            return dataclasses.replace(
                output, finish_reason="length" if one[1] == lengths[one[0].prompt_index] else None
            )

    async def sampled(lost_in):
        ranks = OfLengths(1)
        ranks.lost[0] = lost_in
        mailbox = Mailbox(ranks, Schedule(), Restoring())
        found = await responses(mailbox, *asked, ranks=[0] * 4)
        while not mailbox.is_idle.is_set():
            await asyncio.sleep(0)
        return found, ranks.running

    whole, _ = asyncio.run(sampled(99))
    again, running = asyncio.run(sampled(lost_in))
    assert again == whole
    assert running == [{}], "nothing is sampled that nobody waits for"


def test_what_had_ended_is_not_sampled_to_its_end_once_nobody_waits_for_its_company():
    async def main():
        queue = RequestQueue(1)
        for number in (1, 2):
            queue.submit(number, REQUEST, "training", rank=0)
        queue.take(0, version=0)
        end = {"tokens": (5,), "logprobs": (0.0,), "sampled_logprobs": (0.0,), "version": 0, "finish_reason": "stop"}
        queue.receive([Output(request_id=1, **end)])
        queue.resend(0)
        again = queue.take(0, version=0)
        queue.receive([Output(request_id=2, **end)])
        last = queue.take(0, version=0)
        return [number for number, _ in again.new], last.cancelled, queue.has_work(0)

    assert asyncio.run(main()) == ([1, 2], (1,), False)


class Refilled(Ranks):
    """Ranks of which one lacks weights until newer ones have come to all."""

    def __init__(self):
        super().__init__()
        self.are_whole, self.versions = asyncio.Event(), []

    async def until_whole(self, ranks):
        if 1 in ranks:
            await self.are_whole.wait()

    async def load(self, version, published):
        self.are_whole.set()

    async def advance(self, rank, asked):
        self.versions.append((rank, asked.version))
        return await super().advance(rank, asked)


def test_a_rank_that_lacks_weights_is_asked_for_the_newest_once_it_has_them():
    async def main():
        ranks = Refilled()
        mailbox = Mailbox(ranks, Schedule())
        waiting = asyncio.create_task(responses(mailbox, ASKED[1], ranks=[1]))
        found = await responses(mailbox, ASKED[0], ranks=[0])
        assert not waiting.done()
        await mailbox.load(1)
        return [*found, *await waiting], ranks.versions

    found, versions = asyncio.run(main())
    assert found == EXPECTED[:2]
    assert {rank: {version for one, version in versions if one == rank} for rank in (0, 1)} == {0: {0}, 1: {1}}
