"""Blocks of a stream have equal tokens and about equal work, and what a block sees is the same for every kernel."""

import pytest
import torch
from hypothesis import given, strategies as st

from rallypoint.models import Dealt, PackedRows, SharedPrefixes
from rallypoint.models.cut_rows import _Block, block_of_tokens
from rallypoint.models.products import Limits
from rallypoint.models.varlen import PackedKeys, by_products
from rallypoint.parallel import DeviceMesh
from rallypoint.types import offsets_from_lengths

CPU = torch.device("cpu")


def work_of(block, lengths, num_blocks):
    """Return how many keys the queries of each block see."""
    seen = torch.cat([torch.arange(1, length + 1) for length in lengths])
    return torch.bincount(block, weights=seen.double(), minlength=num_blocks)


@given(st.lists(st.integers(0, 40), min_size=1, max_size=9), st.integers(1, 5))
def test_blocks_differ_by_a_token_at_most(lengths, num_blocks):
    block = block_of_tokens(torch.tensor(lengths), num_blocks)
    sizes = torch.bincount(block, minlength=num_blocks)
    assert len(block) == sum(lengths)
    assert sizes.max() - sizes.min() <= 1


# Lengths of rows, and how much more than the mean the busiest of 8 blocks has to do at most.
ROWS = {
    "one row": ([32_000], 1.001),
    "two rows": ([16_000, 16_000], 1.001),
    "three rows": ([24_000, 16_000, 8_000], 1.001),
    "a long row and short ones": ([16_000, *[500] * 32], 1.001),
    "rows of many lengths": ([1_000 * (7 * n % 13 + 1) for n in range(12)], 1.001),
    "many short rows": ([100 + 37 * n % 900 for n in range(200)], 1.06),
}


@pytest.mark.parametrize(("lengths", "most"), ROWS.values(), ids=ROWS)
def test_the_busiest_block_has_little_more_to_do_than_the_mean(lengths, most):
    work = work_of(block_of_tokens(torch.tensor(lengths), 8), lengths, 8)
    assert work.max() / work.mean() <= most


class FakeRank:
    """One of three ranks, to which the others give what a stream has."""

    size = 3

    def __init__(self, rank):
        self.rank = rank


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("lengths", [[5, 1, 12, 7], [40], [9, 9, 9]], ids=str)
def test_a_kernel_for_rows_of_any_lengths_finds_what_products_of_the_whole_stream_find(lengths, window):
    offsets, generator = offsets_from_lengths(torch.tensor(lengths)), torch.Generator().manual_seed(0)
    tokens = torch.arange(int(offsets[-1])) % 4 if len(set(lengths)) > 1 else torch.arange(int(offsets[-1])) % 9 // 8
    shared = SharedPrefixes.of(offsets, tokens, torch.zeros(len(lengths), dtype=torch.int64))
    whole, limits = PackedRows(offsets, CPU, shared), Limits(window)
    states = [torch.randn(len(shared.kept), heads, 8, generator=generator, dtype=torch.float64) for heads in (4, 2, 2)]
    expected = whole.attend(0, *states, 0.3, limits)
    for rank in range(3):
        mesh = DeviceMesh.solo()
        object.__setattr__(mesh, "cp", FakeRank(rank))
        object.__setattr__(mesh, "tokens", FakeRank(rank))
        dealt = Dealt.of(offsets, shared, len(shared.kept), mesh)
        block = _Block(offsets, CPU, dealt, mesh.cp)
        seen, view = block._of_window(window), block._view(rank, window)
        order = shared.place[torch.searchsorted(torch.arange(len(tokens)), dealt.shared.kept)]
        query, key, value = (part[order] for part in states)
        start = sum(dealt.blocks[:rank])
        query, key, value = query[start : start + dealt.blocks[rank]], key[view.keys], value[view.keys]
        assert sum(seen.num_taken) == len(view.keys)
        for rows in (seen.rows.attend, None):
            if rows is None:
                out = PackedKeys(*seen.rows._layout).attend(by_products, query, key, value, 0.3, limits)
            else:
                out = rows(0, query, key, value, 0.3, limits)
            found = expected[order][start : start + dealt.blocks[rank]]
            torch.testing.assert_close(out, found, rtol=1e-10, atol=1e-12)
