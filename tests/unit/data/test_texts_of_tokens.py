"""The text of each token, special ones included."""

import pytest
from hypothesis import given, strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rallypoint.data.tokenizer import TokenTexts, make_digits_tokenizer


def byte_tokenizer():
    """A token a byte: a character beyond ASCII has several."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({character: number for number, character in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<end>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")


def word_tokenizer():
    """Words with a mark for the space before them, which is lost at the beginning of a text."""
    backend = Tokenizer(models.WordLevel({"▁a": 0, "▁b": 1, "c": 2, "<end>": 3}, unk_token="c"))
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens([AddedToken("<end>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")


BYTES = byte_tokenizer()


def test_a_token_of_the_digits_has_its_character_and_a_special_one_its_name():
    tokenizer = make_digits_tokenizer()
    ids = [*tokenizer.encode("07", add_special_tokens=False), tokenizer.eos_token_id]
    assert TokenTexts(tokenizer)(ids) == ["0", "7", tokenizer.eos_token]


def test_a_character_of_several_tokens_is_the_last_ones():
    ids = BYTES.encode("né<end>€", add_special_tokens=False)
    assert TokenTexts(BYTES)(ids) == ["n", "", "é", "<end>", "", "", "€"]


def test_a_space_at_the_beginning_of_a_token_is_the_tokens():
    tokenizer = word_tokenizer()
    assert TokenTexts(tokenizer)([0, 1, 2, 0, 3]) == ["a", " b", "c", " a", "<end>"]
    assert TokenTexts(tokenizer)([]) == []


@given(st.text(max_size=12), st.integers(0, 30))
def test_the_texts_joined_are_the_whole_text_also_where_it_was_cut(text, end):
    ids = BYTES.encode(text, add_special_tokens=False)[:end]
    texts = TokenTexts(BYTES)(ids)
    assert len(texts) == len(ids)
    assert "".join(texts) == BYTES.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("ids", [[0, 1], [1, 1, 1], [2, 0]])
def test_what_is_remembered_of_single_tokens_changes_nothing(ids):
    texts = TokenTexts(word_tokenizer())
    assert texts(ids) == texts(ids) == TokenTexts(word_tokenizer())(ids)
