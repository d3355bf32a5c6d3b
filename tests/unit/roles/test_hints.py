"""Rows as a teacher reads them who has seen a hint."""

import torch

from rallypoint.data import EncodedPrompts, Example, Message, make_digits_tokenizer
from rallypoint.roles.hints import Hints, said_of
from rallypoint.types import Sequences


def test_a_hint_stands_behind_the_prompt_and_what_is_said_comes_back_to_the_students_tokens():
    batch = Sequences(
        offsets=torch.tensor([0, 4, 9]),
        tokens=torch.tensor([1, 2, 7, 8, 3, 7, 4, 8, 9]),  # the second row has two turns: 4 is an observation
        loss_mask=torch.tensor([False, False, True, True, False, True, False, True, True]),
        prompt_index=torch.tensor([5, 6]),
        sample_index=torch.tensor([0, 0]),
    )
    shown = Hints([[3, 30, 31], [1, 2, 5, 6, 9]]).shown(batch, [1, 0])
    assert shown.offsets.tolist() == [0, 7, 14]
    assert shown.tokens.tolist() == [1, 2, 5, 6, 9, 7, 8, 3, 30, 31, 7, 4, 8, 9]
    assert shown.loss_mask.int().tolist() == [0, 0, 0, 0, 0, 1, 1, 0, 0, 0, 1, 0, 1, 1]
    said = torch.where(shown.loss_mask, -torch.arange(14.0), 0.0)
    assert said_of(batch, shown, said).tolist() == [0, 0, -5, -6, 0, -10, 0, -12, -13]


def test_the_hint_is_part_of_the_last_message():
    example = Example("a:1", "a", (Message("system", "="), Message("user", "31")), "", "13", {})
    prompts = EncodedPrompts(((1,),), (example,), (), ())
    hints = Hints.of("={ground_truth}", prompts, make_digits_tokenizer(), max_prompt_tokens=9)
    words = make_digits_tokenizer().convert_ids_to_tokens(list(hints.token_ids[0]))
    assert "".join(words) == "<system>=<user>31=13<assistant>"
