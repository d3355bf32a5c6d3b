"""Attention over blocks, beside a loop over queries and heads in float64."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from rallypoint.generation.native.accelerator.backend import PagedAttention
from rallypoint.generation.native.block_manager import AttentionMetadata, BlockManager, BlockTables
from rallypoint.generation.native.cpu.backend import BagAttention
from rallypoint.generation.native.kv_cache import KVCache, LayerShapes
from rallypoint.models.products import Limits

SIZE, DIM, LAYERS = 4, 8, 2
WITH_SINKS = Limits(window=5, sinks=torch.tensor([0.5, -1.0, 2.0, 30.0, -30.0, 0.0], dtype=torch.float64))
"""As many as there are heads, or more."""


def reference(query, keys, values, scaling, limits):
    """[H, D], [tokens, K, D] twice, of which the last is the query's own -> [H, D]."""
    rows = []
    for head in range(len(query)):
        kv_head = head // (len(query) // keys.shape[1])
        scores = keys[:, kv_head] @ query[head] * scaling
        if limits.softcap is not None:
            scores = limits.softcap * torch.tanh(scores / limits.softcap)
        if limits.window is not None:
            scores[: max(0, len(scores) - limits.window)] = -math.inf
        if limits.sinks is not None:
            scores = torch.cat([scores, limits.sinks[head : head + 1]])
        rows.append(scores.softmax(0)[: len(values)] @ values[:, kv_head])
    return torch.stack(rows)


@pytest.mark.parametrize("in_bags", [True, False], ids=["bags", "pages"])
@pytest.mark.parametrize("limits", [Limits(), Limits(window=5), Limits(softcap=1.5), WITH_SINKS], ids=str)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 30), st.booleans()), min_size=1, max_size=6),
    share=st.sampled_from([1, 3]),
    tile=st.sampled_from([1, 8]),
    num_columns=st.sampled_from([1, 16]),
    seed=st.integers(0, 99),
)
def test_every_query_attends_to_its_own_tokens_only(in_bags, limits, lengths, share, tile, num_columns, seed):
    """Rows of all lengths, whose prompts end within a block, for two tokens each, in two layers."""
    torch.manual_seed(seed)
    kv_heads, heads = 2, 2 * share
    if limits.sinks is not None:
        limits = dataclasses.replace(limits, sinks=limits.sinks[:heads])
    like = torch.zeros(0, dtype=torch.float64)
    cache = KVCache(100, LayerShapes(LAYERS, heads, kv_heads, DIM, like), SIZE)
    manager, tables = BlockManager(100, SIZE), BlockTables(len(lengths), SIZE)
    stored = torch.randn(LAYERS, 2, len(lengths), 50, kv_heads, DIM, dtype=torch.float64)
    own_lines, has_memory = [], []
    for row, (num_prompt, num_response, has_room) in enumerate(lengths):
        prompt, line = tuple(range(num_prompt)), tables.take_line()
        blocks = []
        for start in range(0, num_prompt, SIZE):
            blocks.append(
                manager.allocate_shared(blocks[-1] if blocks else None, (row, *prompt[start + 1 : start + SIZE]))
            )
        num_blocks = len(blocks)
        blocks += [manager.allocate() for _ in range(-(-(num_response + 1) // SIZE))]
        cache.zero(manager.take_new())
        places = [(blocks[n // SIZE], n % SIZE) for n in range(num_prompt)]
        places += [(blocks[num_blocks + n // SIZE], n % SIZE) for n in range(num_response - 1)]
        indices, slots = torch.tensor([(block.index, place) for block, place in places]).view(-1, 2).unbind(1)
        for layer in range(LAYERS):
            cache.keys[layer, indices, :, :, slots] = stored[layer, 0, row, : len(places)]
            cache.values[layer, indices, :, slots] = stored[layer, 1, row, : len(places)]
        # Nobody looks at the second token of a row that has no memory for it.
        tables.append(line, blocks[: num_blocks + -(-(num_response + has_room) // SIZE)])
        own_lines.append(line)
        has_memory.append(has_room or num_response % SIZE > 0)
    positions = np.array([sum(both[:2]) - 1 for both in lengths])
    metadata = tables.metadata(np.array(own_lines), positions, positions)
    if in_bags:
        rows = BagAttention(cache, metadata, heads, num_rows=tile, num_steps=2)
    else:
        rows = PagedAttention(cache, metadata, num_rows=tile, num_columns=num_columns, num_steps=2)
    for step in range(2):
        if step:
            rows.advance(torch.from_numpy(positions) + 1)
        assert rows.position_ids[0, : len(lengths)].tolist() == (positions + step).tolist()
        for layer in range(LAYERS):
            query = torch.randn(len(rows.tokens), heads, DIM, dtype=torch.float64)
            at = torch.from_numpy(positions + step)
            key, value = (stored[layer, kind, torch.arange(len(lengths)), at] for kind in (0, 1))
            missing = len(query) - len(lengths)
            query[len(lengths) :] = query[len(lengths) - 1]
            key, value = (torch.cat([states, states[-1:].expand(missing, -1, -1)]) for states in (key, value))
            out = rows.attend(layer, query, key, value, 0.3, limits)
            for row in range(len(lengths)):
                if step and not has_memory[row]:
                    continue
                past = stored[layer, :, row, : positions[row] + step + 1]
                expected = reference(query[row], past[0], past[1], 0.3, limits)
                torch.testing.assert_close(out[row], expected)


def test_metadata_of_single_tokens_is_that_of_block_tables():
    manager, tables = BlockManager(20, SIZE), BlockTables(3, SIZE)
    rows = [[manager.allocate_shared(None, (row,)), *(manager.allocate() for _ in range(row * 5))] for row in (1, 2)]
    taken = []
    for blocks in rows:
        taken.append(tables.take_line())
        tables.append(taken[-1], blocks[:1])
        tables.append(taken[-1], blocks[1:])
    found = tables.metadata(np.array(taken), np.array([7, 8]), np.array([9, 10]))
    expected = AttentionMetadata.of([(7, 9, rows[0]), (8, 10, rows[1])], SIZE)
    assert found.table_lines.tolist() == taken
    for name in (slot for slot in AttentionMetadata.__slots__ if slot != "table_lines"):  # of `BlockTables` alone
        inside = np.arange(found.blocks.shape[1]) < found.num_blocks[:, None]
        one, other = getattr(found, name), getattr(expected, name)
        assert (np.where(inside, one, 0) == np.where(inside, other, 0)).all() if one.ndim == 2 else (one == other).all()
