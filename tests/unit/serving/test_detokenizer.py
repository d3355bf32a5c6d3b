"""Text that comes in parts is the text of the whole, whatever the parts."""

from itertools import pairwise

from hypothesis import given, strategies as st
from tokenizers import Tokenizer, decoders, models

from rallypoint.serving.detokenizer import Detokenizer, StopText

TEXTS = st.text(st.sampled_from("ab é中😀\ufffd\n"), max_size=40)


def cut(sequence, places):
    borders = [0, *sorted(place % (len(sequence) + 1) for place in places), len(sequence)]
    return [sequence[start:end] for start, end in pairwise(borders)]


def parts_of(decode, tokens, places):
    detokenizer = Detokenizer(decode)
    return [*(detokenizer.push(part) for part in cut(tokens, places)), detokenizer.finish()]


def spoilt(text: str) -> bool:
    return "\ufffd" in text


@given(tokens=st.lists(st.integers(0, 256), max_size=200), places=st.lists(st.integers(0, 200), max_size=200))
def test_tokens_that_are_any_bytes_give_the_text_of_all_of_them(tokenizer, tokens, places):
    def decode(ids):
        return tokenizer.decode(list(ids), skip_special_tokens=True)

    assert "".join(parts_of(decode, tokens, places)) == decode(tokens)


@given(text=TEXTS, places=st.lists(st.integers(0, 200), max_size=60))
def test_no_character_is_shown_before_it_is_whole(tokenizer, text, places):
    tokens = tokenizer.encode(text.replace("\ufffd", ""))
    parts = parts_of(tokenizer.decode, tokens, places)
    assert "".join(parts) == text.replace("\ufffd", "")
    assert not any(map(spoilt, parts))


WORDS = {word: number for number, word in enumerate(["▁the", "▁", "s", "中", "<0xE4>", "<0xB8>", "<0xAD>"])}


@given(
    words=st.lists(st.sampled_from([["▁the"], ["▁"], ["s"], ["中"], ["<0xE4>", "<0xB8>", "<0xAD>"]]), max_size=100),
    places=st.lists(st.integers(0, 300), max_size=150),
)
def test_the_first_space_and_bytes_that_a_vocabulary_falls_back_to_are_treated_as_in_the_whole(words, places):
    backend = Tokenizer(models.BPE(vocab=WORDS, merges=[]))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokens = [WORDS[part] for word in words for part in word]
    assert "".join(parts_of(backend.decode, tokens, places)) == backend.decode(tokens)


def test_what_can_never_become_a_character_is_shown_in_time(tokenizer):
    detokenizer = Detokenizer(tokenizer.decode)
    byte = tokenizer.encode("中")[0]
    shown = [detokenizer.push([byte]) for _ in range(1000)]
    assert len("".join(shown)) >= 700


@given(
    text=st.text("abc", max_size=60),
    strings=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
    places=st.lists(st.integers(0, 60), max_size=60),
)
def test_a_text_ends_before_the_first_stop_string_and_nothing_is_lost(text, strings, places):
    ends = [place for string in strings if (place := text.find(string)) >= 0]
    stops = StopText(strings)
    shown = ""
    for part in cut(text, [*places, *range(len(text))]):  # a character at a time, so that the first one is known
        shown += stops.push(part)
        assert text.startswith(shown)
    shown += stops.finish()
    first = next((end for end in range(len(text) + 1) if any(string in text[:end] for string in strings)), None)
    expected = text if first is None else text[: min(p for s in strings if (p := text[:first].find(s)) >= 0)]
    assert shown == expected
    assert stops.has_ended == bool(ends)
