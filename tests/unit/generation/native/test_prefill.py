"""Which prompts are computed side by side, and what those see that look back."""

import pytest
import torch

from rallypoint.generation.native.block_manager import Block
from rallypoint.generation.native.kv_cache import KVCache, LayerShapes
from rallypoint.generation.native.model_runner import deal_out
from rallypoint.generation.native.prefill import PrefillAttention
from rallypoint.generation.native.sequence import PrefillChunk
from rallypoint.models.products import Limits
from rallypoint.models.varlen import by_products


def chunk(block, num_tokens, past=()):
    return PrefillChunk(past, (3,) * num_tokens, [(block, place) for place in range(num_tokens)])


def test_prompts_of_their_own_are_dealt_out_by_length():
    first, second, third = (chunk(Block(place), length) for place, length in enumerate((2, 9, 4)))
    assert deal_out([first, second, third], 2) == [[second, first], [third]]
    assert deal_out([first], 3) == [[first]]


def test_a_prompt_that_looks_back_is_computed_in_one_pass_with_those_before_it():
    past = Block(0, None, (3, 3))
    before, behind = chunk(past, 2), chunk(Block(1), 5, [past])
    assert deal_out([behind, before], 2) == [[before, behind]]


def test_prompts_that_write_to_one_block_are_not_computed_side_by_side():
    block = Block(0)
    one, other = chunk(block, 3), chunk(block, 3)
    assert deal_out([one, other], 2) == [[one, other]]


def test_prompts_that_look_back_stay_in_their_order():
    past = Block(0, None, (3, 3))
    one, other = chunk(Block(1), 2, [past]), chunk(Block(2), 5, [past, Block(1, None, (3, 3))])
    assert deal_out([one, other], 2) == [[one, other]]


@pytest.mark.parametrize("window", [None, 30])
@pytest.mark.parametrize("num_padding", [0, 2])
@pytest.mark.parametrize("has_fresh", [True, False])
def test_one_call_for_all_chunks_gives_each_the_attention_of_its_own(window, num_padding, has_fresh):
    """A first chunk, one behind a full block of it, a preempted response behind both, and one behind older blocks."""
    cache = KVCache(9, LayerShapes(2, 4, 2, 8, torch.zeros(1, dtype=torch.float64)))
    generator = torch.Generator().manual_seed(0)
    for memory in (cache.keys, cache.values):
        memory.copy_(torch.randn(memory.shape, generator=generator, dtype=torch.float64))
    common, end, own, old = (Block(n, None, (3,) * size) for n, size in ((1, 32), (2, 5), (3, 0), (5, 32)))
    chunks = [chunk(end, 5, [common]), chunk(own, 7, [common, end]), chunk(Block(7), 9, [old])]
    if has_fresh:
        chunks = [chunk(common, 32), chunk(Block(8), 3), *chunks]
    num = sum(len(one.tokens) for one in chunks) + num_padding
    states = [torch.randn(num, heads, 8, generator=generator, dtype=torch.float64) for heads in (4, 2, 2)]
    one_by_one = PrefillAttention(cache, chunks, num).attend(1, *states, 8**-0.5, Limits(window))
    at_once = PrefillAttention(cache, chunks, num).attend_at_once(by_products, 1, *states, 8**-0.5, Limits(window))
    torch.testing.assert_close(at_once, one_by_one, rtol=1e-10, atol=1e-12)
