"""Prompts whose tokens would not say what their text says."""

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rallypoint.data import Example, Message, encode_prompts, make_digits_tokenizer
from rallypoint.errors import DataError

TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message.role + '|>' + message.content + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|><think>{% endif %}"
)


def example(text, name="train.jsonl:17", system=None):
    prompt = (*([Message("system", system)] if system else []), Message("user", text))
    return Example(name=name, data_source="d", prompt=prompt, ability="", ground_truth="1", extra_info={})


def encode(tokenizer, *texts, **changes):
    examples = [example(text, f"train.jsonl:{line}") for line, text in enumerate(texts, start=1)]
    return encode_prompts(tokenizer, examples, max_prompt_tokens=99, **changes)


def make_tokenizer(backend, *, special=("<|end|>",), ordinary=("<|user|>", "<|system|>", "<|assistant|>", "<think>")):
    """A tokenizer as models have them: the end is special, the roles and <think> are not."""
    backend.add_tokens([AddedToken(name, special=False, normalized=False) for name in ordinary])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=special[0])
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.fixture(scope="module")
def bytes_tokenizer():
    """Byte-level, as most models of today have: it knows every text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({token: number for number, token in enumerate(["<|end|>", *alphabet])}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return make_tokenizer(backend)


def letters_tokenizer(*, unknown, normalizer=None):
    """Of the letters a to f alone; without an unknown token it leaves out all others."""
    vocabulary = {token: number for number, token in enumerate(["<|end|>", "[UNK]", *"abcdef "])}
    backend = Tokenizer(models.BPE(vocabulary, [], unk_token="[UNK]" if unknown else None))
    if normalizer:
        backend.normalizer = normalizer
    return make_tokenizer(backend)


def test_text_that_the_tokenizer_does_not_know_is_an_error_with_row_and_characters():
    with pytest.raises(DataError) as raised:
        encode(make_digits_tokenizer(), "12", "Tom has 3", "1\n")
    said = str(raised.value)
    assert "2 problems" in said
    assert "train.jsonl:2: the tokenizer knows no token for 'T', 'o', 'm', 'h', 'a' and 1 more: 6 of the pro" in said
    assert "are <unk>; use a model whose tokenizer knows them, or leave the row out" in said
    assert "train.jsonl:3: the tokenizer knows no token for '\\n': 1 of the prompt's 4 tokens are <unk>" in said


def test_unknown_text_of_a_system_message_is_found_and_of_a_dropped_prompt_is_not():
    tokenizer = make_digits_tokenizer()
    with pytest.raises(DataError, match=r"train.jsonl:17: the tokenizer knows no token for 'x'"):
        encode_prompts(tokenizer, [example("1", system="x")], max_prompt_tokens=9)
    kept = encode_prompts(
        tokenizer, [example("1", "a:0"), example("x" * 9, "a:1")], max_prompt_tokens=9, on_too_long="drop"
    )
    assert kept.dropped == ("a:1",)


def test_the_name_of_the_unknown_token_in_the_template_is_none():
    """Some tokenizers have one token for the end of a text and for what they do not know."""
    tokenizer = letters_tokenizer(unknown=True)
    tokenizer.add_tokens(["[UNK]"])
    tokenizer.chat_template = TEMPLATE.replace("<|assistant|>", "[UNK]")
    assert len(encode(tokenizer, "abc").token_ids) == 1
    with pytest.raises(DataError, match=r"knows no token for 'x': 1 of the prompt's 6 tokens are \[UNK\]"):
        encode(tokenizer, "ax")


def test_characters_that_make_no_token_are_an_error():
    tokenizer = letters_tokenizer(unknown=False)
    with pytest.raises(DataError, match=r"train.jsonl:2: the tokenizer \(\w+\) leaves out 'x', 'y', which the mod"):
        encode(tokenizer, "abc", "axby")


def test_what_a_tokenizer_leaves_out_and_nobody_can_see_is_no_error():
    tokenizer = letters_tokenizer(unknown=False, normalizer=normalizers.Replace("\u200b", ""))
    assert len(encode(tokenizer, "a\u200bb\n").token_ids) == 1


def test_accents_that_are_stripped_are_named():
    strip = normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()])
    with pytest.raises(DataError, match="leaves out '\u0301'"):
        encode(letters_tokenizer(unknown=False, normalizer=strip), "e\u0301")


@pytest.mark.parametrize("token", ["<|end|>", "<|user|>", "<|system|>", "<|assistant|>"])
def test_a_control_token_in_the_text_is_an_error_with_row_and_token(bytes_tokenizer, token):
    with pytest.raises(DataError) as raised:
        encode(bytes_tokenizer, "héllo", f"Say {token} now")
    assert f"1 problem in the data:\n  - train.jsonl:2: the text of message 0 has '{token}', which is a" in str(
        raised.value
    )


def test_words_that_are_tokens_but_frame_no_message_may_be_spoken_of(bytes_tokenizer):
    encoded = encode(bytes_tokenizer, "Think in <think> tags", "1 < 2", "<|endless")
    assert bytes_tokenizer.convert_tokens_to_ids("<think>") in encoded.token_ids[0][:-1]


def test_ordinary_prompts_have_the_tokens_of_the_chat_template(bytes_tokenizer):
    text = "Grüße, 世界!\n\t<b>42</b>"
    [ids] = encode(bytes_tokenizer, text).token_ids
    message = [{"role": "user", "content": text}]
    assert list(ids) == bytes_tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False)
    assert bytes_tokenizer.decode(ids) == f"<|user|>{text}<|end|><|assistant|><think>"
