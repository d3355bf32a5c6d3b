"""Rows are dealt out evenly, and their results come back in the caller's order."""

import asyncio
import dataclasses

import pytest
import torch
from hypothesis import given, strategies as st

from rallypoint.cluster import Layout, Mesh, ResourcePool, WorkerContext, WorkerGroup, open_runtime, shard
from rallypoint.roles.dealing import deal, per_token
from rallypoint.types import PerToken, Sequences, offsets_from_lengths

LENGTHS = [3, 17, 1, 0, 9, 9, 2, 30]


def make_batch(lengths: list[int]) -> Sequences:
    """Rows whose tokens count up over the whole batch."""
    offsets = offsets_from_lengths(torch.tensor(lengths, dtype=torch.int64))
    num_tokens, rows = int(offsets[-1]), torch.arange(len(lengths))
    return Sequences(
        offsets=offsets,
        tokens=torch.arange(num_tokens),
        loss_mask=torch.ones(num_tokens, dtype=torch.bool),
        prompt_index=rows,
        sample_index=torch.zeros_like(rows),
    )


class Echo:
    """Says of every token which it is."""

    def __init__(self, context: WorkerContext) -> None:
        del context

    @shard
    def tokens(self, parts: list[Sequences]) -> list[PerToken]:
        return [PerToken(offsets=part.offsets, values=part.tokens.float()) for part in parts]


@given(st.lists(st.integers(0, 20), max_size=12), st.integers(1, 5))
def test_joined_parts_are_the_batch_again_once_every_row_is_at_its_place(lengths, num_parts):
    batch = make_batch(lengths)
    parts, place = deal(batch, num_parts, attention_cost=0.01)
    assert len(parts) == num_parts
    again = Sequences.join(parts).rows(place)
    assert torch.equal(again.tokens, batch.tokens)
    assert torch.equal(again.offsets, batch.offsets)


def test_ranks_get_equal_work_by_hand():
    # Tokens and a hundredth of their squares: 39.0, 19.9, 9.8, 9.8, 3.1, 2.0, 1.0, 0 in LENGTHS' order of size.
    parts, _ = deal(make_batch(LENGTHS), 2, attention_cost=0.01)
    assert [part.lengths.tolist() for part in parts] == [[3, 0, 30], [17, 1, 9, 9, 2]]


def test_rows_of_a_prompt_stay_together_where_that_costs_no_balance():
    batch = dataclasses.replace(make_batch([10] * 8), prompt_index=torch.arange(8) % 4)
    batch.loss_mask[:] = torch.arange(80) % 10 >= 6
    assert [part.prompt_index.tolist() for part in deal(batch, 2, 0.0)[0]] == [[0, 2, 0, 2], [1, 3, 1, 3]]
    # With a prompt for all of them one rank would have all the work.
    alone = dataclasses.replace(batch, prompt_index=torch.zeros(8, dtype=torch.int64))
    assert [len(part) for part in deal(alone, 2, 0.0)[0]] == [4, 4]


def test_rows_without_a_trained_token_have_no_prompt_to_share():
    batch = dataclasses.replace(make_batch([9, 9, 0, 3]), prompt_index=torch.tensor([5, 5, 6, 5]))
    batch.loss_mask[:] = False
    assert [part.lengths.tolist() for part in deal(batch, 2, 0.0)[0]] == [[9, 3], [9, 0]]


@pytest.mark.parametrize("axes", [{"dp": 1}, {"dp": 3}, {"dp": 2, "tp": 2}], ids=str)
def test_numbers_come_back_in_the_order_of_the_batch_whatever_ranks_there_are(tmp_path, axes):
    async def run() -> torch.Tensor:
        runtime = open_runtime("inline", log_folder=tmp_path)
        try:
            mesh = Mesh(axes)
            processes = await runtime.processes(ResourcePool([mesh.size], name="main"))
            group = await WorkerGroup.create(Layout("echo", processes, mesh), Echo)
            return await per_token(group, Echo.tokens, make_batch(LENGTHS), attention_cost=0.01)
        finally:
            await runtime.shutdown()

    assert asyncio.run(run()).tolist() == list(range(sum(LENGTHS)))
