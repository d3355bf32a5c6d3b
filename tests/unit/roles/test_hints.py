"""Rows as a teacher reads them who has seen a hint."""

import torch
from transformers import PreTrainedTokenizerFast

from rallypoint.data import EncodedPrompts, Example, Message, make_digits_tokenizer
from rallypoint.roles.teacher import Hints, said_of, shown as with_prompts
from rallypoint.types import Sequences


def test_a_hint_stands_behind_the_prompt_and_what_is_said_comes_back_to_the_students_tokens():
    batch = Sequences(
        offsets=torch.tensor([0, 4, 9]),
        tokens=torch.tensor([1, 2, 7, 8, 3, 7, 4, 8, 9]),  # the second row has two turns: 4 is an observation
        loss_mask=torch.tensor([False, False, True, True, False, True, False, True, True]),
        prompt_index=torch.tensor([5, 6]),
        sample_index=torch.tensor([0, 0]),
    )
    shown = with_prompts(batch, [[1, 2, 5, 6, 9], [3, 30, 31]])
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


def words(ids):
    return "".join(make_digits_tokenizer().convert_ids_to_tokens(list(ids)))


def test_feedback_is_read_by_the_row_it_is_about_and_what_does_not_fit_is_cut():
    first, second = (Example(f"a:{number}", "a", (Message("user", str(number)),), "", "13", {}) for number in range(2))
    prompts = EncodedPrompts(((1,), (2,)), (first, second), (), ())
    hints = Hints.of("+{feedback}={ground_truth}", prompts, make_digits_tokenizer(), max_prompt_tokens=9)
    found = hints.prompts([1, 0, 0, 1, 0], ["7", "", "12345678", "{ground_truth}", "{" * 99])
    assert words(found[0]) == "<user>1+7=13<assistant>"
    assert found[1] is None, "nothing was said of it"
    assert words(found[2]) == "<user>0+12=13<assistant>", "half of it would be too long"
    assert found[3:] == [None, None], "text that the tokenizer does not know ends no run"


class Counted(PreTrainedTokenizerFast):
    """A tokenizer that counts what takes long: to look through its vocabulary, and to write prompts."""

    num_looks = num_writings = 0

    def get_vocab(self):
        Counted.num_looks += 1
        return super().get_vocab()

    def apply_chat_template(self, *args, **kwargs):
        Counted.num_writings += 1
        return super().apply_chat_template(*args, **kwargs)


def test_a_step_is_encoded_in_one_call_and_the_vocabulary_is_looked_through_once_a_run():
    tokenizer = make_digits_tokenizer()
    tokenizer.__class__ = Counted
    example = Example("a:1", "a", (Message("user", "1"),), "", "13", {})
    hints = Hints.of("+{feedback}", EncodedPrompts(((1,),), (example,), (), ()), tokenizer, max_prompt_tokens=9)
    looks, writings = Counted.num_looks, Counted.num_writings
    for step in range(3):
        said = [f"{step}{row % 10}" for row in range(500)]
        assert words(hints.prompts([0] * 500, said)[499]) == f"<user>1+{step}9<assistant>"
    assert (Counted.num_looks - looks, Counted.num_writings - writings) == (0, 3)
    too_long = ["1" * (row + 10) for row in range(500)]
    assert {words(ids) for ids in hints.prompts([0] * 500, too_long)} == {"<user>1+11111<assistant>"}
    assert Counted.num_writings - writings == 3 + 2, "once whole, once cut"


def test_feedback_is_cut_by_its_tokens_wherever_the_tokenizer_joins_them():
    tokenizer = make_digits_tokenizer()
    example = Example("a:1", "a", (Message("user", "1"),), "", "13", {})
    prompts = EncodedPrompts(((1,),), (example,), (), ())
    for most, expected in ((9, "11111"), (5, "1"), (4, None)):
        hints = Hints.of("+{feedback}", prompts, tokenizer, max_prompt_tokens=most)
        (ids,) = hints.prompts([0], ["1" * 4000])
        assert (None if ids is None else words(ids)) == (expected and f"<user>1+{expected}<assistant>")
