"""Requests of persons, spread over ranks and brought back, whatever the ranks do meanwhile."""

import asyncio

import pytest

from rallypoint.errors import BusyError, GenerationError, WorkerDiedError, WorkerError
from rallypoint.generation import Output, Request, SamplingParams
from rallypoint.recipes.endpoint import GuestRequests
from rallypoint.sampling.mailbox import Mailbox
from rallypoint.sampling.replay import Schedule

REQUEST = Request(tokens=(1, 2), params=SamplingParams(max_new_tokens=2))


def output(number, token, reason=None):
    return Output(
        request_id=number, tokens=(token,), logprobs=(0.0,), sampled_logprobs=(0.0,), version=1, finish_reason=reason
    )


class Ranks:
    """Ranks that give each request some tokens, one a slice, and remember what they were told."""

    num_ranks = 2

    def __init__(self, num_ranks=2):
        self.orders, self.running, self.error = [], [{} for _ in range(num_ranks)], None
        self.num_tokens, self.logged = 2, []
        self.may_work = asyncio.Event()
        self.may_work.set()

    async def advance(self, rank, order):
        raise AssertionError("a person's request went the way of training's")

    async def advance_guests(self, orders):
        self.orders.append(orders)
        await asyncio.sleep(0)
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        outputs = []
        for running, order in zip(self.running, orders, strict=True):
            running |= {number: 0 for number, _ in order.new}
            for number in order.cancelled:
                running.pop(number, None)
            outputs.append(
                [
                    output(number, done, "stop" if done + 1 == self.num_tokens else None)
                    for number, done in running.items()
                ]
            )
            for number in list(running):
                running[number] += 1
                if running[number] == self.num_tokens:
                    del running[number]
        return outputs


def meet(script, *, patience_s=60.0):
    """Run a script beside guests and ranks."""

    async def main():
        ranks = Ranks()
        mailbox = Mailbox(ranks, Schedule())
        mailbox.version = 7
        guests = GuestRequests(
            mailbox,
            max_request_tokens=9,
            in_place=ranks.may_work,
            log=lambda said: ranks.logged.append(said),
            patience_s=patience_s,
        )
        running = asyncio.create_task(guests.run())
        try:
            await asyncio.wait_for(script(ranks, guests), 30)
        finally:
            running.cancel()

    asyncio.run(main())


async def until(holds):
    while not holds():
        await asyncio.sleep(0.001)


def test_requests_are_dealt_to_ranks_and_every_output_comes_back():
    async def script(ranks, guests):
        assert guests.version == 7
        outputs = {}
        for _ in range(4):
            number = guests.submit(REQUEST, lambda one: outputs.setdefault(one.request_id, []).append(one))
            outputs[number] = []
        await until(lambda: all(own and own[-1].finish_reason == "stop" for own in outputs.values()))
        assert all([one.tokens for one in own] == [(0,), (1,)] for own in outputs.values())
        assert [len(order.new) for order in ranks.orders[0]] == [2, 2]
        num_slices = len(ranks.orders)
        await asyncio.sleep(0.01)
        assert len(ranks.orders) == num_slices

    meet(script)


def test_a_request_that_gets_no_slice_in_time_is_refused_and_forgotten():
    async def script(ranks, guests):
        ranks.may_work.clear()
        outputs = []
        guests.submit(REQUEST, outputs.append)
        await until(lambda: outputs)
        assert isinstance(outputs[0].error, BusyError)
        assert "no time for this request within 0.01 s; try again" in str(outputs[0].error)
        ranks.may_work.set()
        await until(lambda: ranks.orders)
        assert ranks.orders[0][0].new == ()

    meet(script, patience_s=0.01)


def test_a_request_that_is_given_up_is_taken_from_its_rank():
    async def script(ranks, guests):
        ranks.num_tokens, outputs = 10**9, []
        number = guests.submit(REQUEST, outputs.append)
        await until(lambda: ranks.orders)
        guests.cancel(number)
        guests.cancel(number)
        await until(lambda: any(order.cancelled for orders in ranks.orders for order in orders))
        assert ranks.orders[-1][0].cancelled == (number,)
        assert not ranks.running[0]
        assert all(one.finish_reason is None for one in outputs)

    meet(script)


def test_a_slice_that_fails_ends_its_requests_and_no_others():
    async def script(ranks, guests):
        ranks.error = WorkerDiedError("rollout", 0, "advance", "it was killed")
        first, second = [], []
        guests.submit(REQUEST, first.append)
        await until(lambda: first)
        assert isinstance(first[0].error, GenerationError)
        guests.submit(REQUEST, second.append)
        await until(lambda: second and second[-1].finish_reason)
        assert second[-1].finish_reason == "stop"

    meet(script)


def test_persons_are_told_what_failed_and_not_where_in_our_files():
    async def script(ranks, guests):
        ranks.error = WorkerError(
            "rollout", 0, "advance", "MemoryError: full", "Traceback ...\n  File native.py, line 3"
        )
        outputs = []
        guests.submit(REQUEST, outputs.append)
        await until(lambda: outputs)
        said = "these requests failed and are lost: rollout rank 0 failed in advance: MemoryError: full"
        assert str(outputs[0].error) == said
        await until(lambda: ranks.logged)
        assert "MemoryError: full\n\nTraceback ...\n  File native.py, line 3" in ranks.logged[0]

    meet(script)


def test_a_log_that_cannot_be_written_ends_no_answers():
    async def script(ranks, guests):
        ranks.logged = None
        ranks.error = WorkerDiedError("rollout", 0, "advance", "it was killed")
        first, second = [], []
        guests.submit(REQUEST, first.append)
        await until(lambda: first)
        guests.submit(REQUEST, second.append)
        await until(lambda: second and second[-1].finish_reason)
        assert second[-1].finish_reason == "stop"

    meet(script)


def test_nothing_waits_for_a_run_that_has_ended():
    async def script(ranks, guests):
        ranks.may_work.clear()
        outputs = []
        guests.submit(REQUEST, outputs.append)
        guests.close()
        await until(lambda: outputs)
        assert isinstance(outputs[0].error, GenerationError)
        with pytest.raises(GenerationError, match="the run has ended"):
            guests.submit(REQUEST, outputs.append)
        guests.cancel(1)

    meet(script)
