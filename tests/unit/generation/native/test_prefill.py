"""Which prompts are computed side by side."""

from rallypoint.generation.native.block_manager import Block
from rallypoint.generation.native.model_runner import deal_out
from rallypoint.generation.native.sequence import PrefillChunk


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
