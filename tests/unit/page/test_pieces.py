"""Every token of a rollout is shown as the text that it adds, whatever its tokenizer is and whatever was sampled."""

import random

import pytest
from planted_runs import byte_tokenizer
from tokenizers import Tokenizer, decoders, models

from rallypoint.page.tokens import pieces

TEXTS = ("hello world", " two  spaces ", "naïve café 日本語 👩‍👩‍👧‍👦 ﷽", "\n\ttabs\n", "e\u0301 Z̷̧͓a̶l̷g̵o̴")


def fallback_tokenizer() -> Tokenizer:
    """Return a tokenizer as Llama 2 has it: pieces with a mark for spaces, and a token for each byte."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *map(chr, range(33, 127))]
    tokenizer = Tokenizer(
        models.BPE({word: at for at, word in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True)
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


@pytest.fixture(params=[byte_tokenizer, fallback_tokenizer], ids=["byte-level", "byte-fallback"])
def tokenizer(request):
    return request.param()


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_are_the_text(tokenizer, text):
    ids = tokenizer.encode(text.replace(" ", "▁") if tokenizer.model.byte_fallback else text).ids
    found = pieces(tokenizer, ids)
    assert len(found) == len(ids)
    assert "".join(found) == tokenizer.decode(ids, skip_special_tokens=False)


def test_tokens_that_make_no_text_are_shown_and_lose_none_that_does(tokenizer):
    chance = random.Random(0)
    # Of bytes in a row that make no text the decoder of bytes shows none, letters among them.
    usable = [at for at in range(tokenizer.get_vocab_size()) if not "<0x00>" <= tokenizer.id_to_token(at) < "<0x80>"]
    for _ in range(200):
        ids = chance.choices(usable, k=chance.randrange(40))
        found = "".join(pieces(tokenizer, ids))
        letters = [one for one in tokenizer.decode(ids, skip_special_tokens=False) if "!" <= one <= "~"]
        assert [one for one in found if "!" <= one <= "~"] == letters


def test_half_a_character_at_the_end_is_shown(tokenizer):
    first = tokenizer.encode("é").ids[0]
    assert pieces(tokenizer, [first]) == ["\ufffd"]


def test_without_a_tokenizer_ids_are_shown():
    assert pieces(None, [7, 8]) == ["⟨7⟩", "⟨8⟩"]
