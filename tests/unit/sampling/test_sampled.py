"""Which sampled tokens nobody sees."""

from chat_templates import QWEN3, make_chat_tokenizer
from tokenizers import AddedToken

from rallypoint.sampling.sampled import shown_tokens


def test_tokens_without_a_text_are_hidden_whether_they_are_named_special_or_belong_to_nothing():
    tokenizer = make_chat_tokenizer(QWEN3)
    tokenizer.add_tokens([AddedToken("<tool>", special=True), AddedToken("<word>", special=False)])
    stops = [tokenizer.convert_tokens_to_ids("<|im_end|>"), len(tokenizer) + 3]
    is_shown = shown_tokens(tokenizer, stops).tolist()
    assert len(is_shown) == len(tokenizer) + 4
    for token, shown in enumerate(is_shown):
        text = tokenizer.decode([token], skip_special_tokens=True) if token < len(tokenizer) else ""
        assert shown == (bool(text) or token in stops), token
