"""Requests on their way to ranks: what a rank still has of those that the driver forgot."""

import asyncio

from rallypoint.generation import Request, SamplingParams
from rallypoint.roles.requests import RequestQueue

REQUEST = Request(tokens=(1, 2), params=SamplingParams(max_new_tokens=2))


def test_ranks_are_told_to_forget_what_the_driver_forgot_with_their_next_orders():
    async def main():
        sent = []

        async def advance(orders):
            sent.append(orders)
            return [[] for _ in orders]

        queue = RequestQueue(2, advance, lambda: 3)
        for number in range(3):
            queue.submit(number, REQUEST, lambda output: None, rank=number % 2)
        await queue.advance()
        queue.clear()  # as after an error of one of the ranks
        assert not queue.open
        queue.submit(7, REQUEST, lambda output: None, rank=1)
        await queue.advance()
        return sent

    first, second = asyncio.run(main())
    assert [len(orders.new) for orders in first] == [2, 1]
    assert [orders.cancelled for orders in second] == [(0, 2), (1,)]
    assert [[number for number, _ in orders.new] for orders in second] == [[], [7]]
