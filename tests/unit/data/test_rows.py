"""Which tokens of a conversation are trained: the assistant's, to the token that ends a response."""

import re

import numpy as np
import pytest
from chat_templates import LLAMA3, QWEN3, SPECIAL, ZEPHYR, make_chat_tokenizer, merging_tokenizer
from sine_models import MARKED

from rallypoint.data import Conversations, Message, encode_rows, make_digits_tokenizer
from rallypoint.data.conversations import Conversation
from rallypoint.errors import DataError
from rallypoint.prepare.data_notes import say_fates

FORGETFUL = """\
{%- for message in messages -%}
    {%- if not (message.role == "assistant" and not loop.last) -%}
        {{- "<" + message.role + ">" + message.content -}}
        {%- if message.role == "assistant" -%}{{- eos_token -}}{%- endif -%}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- "=<assistant>" -}}{%- endif -%}
"""


def tokenizer_with(template=None):
    tokenizer = make_digits_tokenizer()
    if template is not None:
        tokenizer.chat_template = template
    return tokenizer


def talk(*contents, first_trained=0, system=None):
    roles = ("user", "assistant") * len(contents)
    messages = tuple(Message(role, content) for role, content in zip(roles, contents, strict=False))
    return Conversation((*((Message("system", system),) if system else ()), *messages), first_trained)


def encoded(*rows, template=None, max_row_tokens=99, stop_tokens=None, may_drop=(), **options):
    examples = tuple(row if isinstance(row, tuple) else (row,) for row in rows)
    tokenizer = tokenizer_with(template)
    stops = (tokenizer.eos_token_id,) if stop_tokens is None else stop_tokens
    names = tuple(f"a.jsonl:{place}" for place in range(len(examples)))
    given = Conversations(names, examples, may_drop=frozenset(may_drop))
    return encode_rows(tokenizer, given, stop_tokens=stops, max_row_tokens=max_row_tokens, **options)


def shown(rows, row=0):
    """Write a row, with its trained tokens in brackets."""
    part = slice(rows.offsets[row], rows.offsets[row + 1])
    words = make_digits_tokenizer().convert_ids_to_tokens(rows.tokens[part].tolist())
    return "".join(f"[{word}]" if trained else word for word, trained in zip(words, rows.is_trained[part], strict=True))


@pytest.mark.parametrize("template", [None, MARKED], ids=["without marks", "with marks"])
def test_every_turn_of_the_assistant_is_trained_with_its_end_and_nothing_else(template):
    rows = encoded(talk("31", "13", "2", "2", system="="), talk("7", "7"), template=template)
    assert shown(rows, 0) == "<system>=<user>31<assistant>[1][3][<eos>]<user>2<assistant>[2][<eos>]"
    assert shown(rows, 1) == "<user>7<assistant>[7][<eos>]"
    assert len(rows) == rows.rows_per_example + 1 == 2
    assert rows.max_tokens == 14
    assert rows.counts() == {"data/num_examples": 2, "data/num_tokens": 19, "data/num_trained_tokens": 7}


@pytest.mark.parametrize("template", [None, MARKED], ids=["without marks", "with marks"])
def test_turns_of_a_prompt_are_context(template):
    rows = encoded(talk("31", "13", "2", "2", first_trained=3), template=template)
    assert shown(rows) == "<user>31<assistant>13<eos><user>2<assistant>[2][<eos>]"


def test_a_row_ends_with_its_last_trained_token():
    after = MARKED.replace("{%- endgeneration -%}", '{%- endgeneration -%}{{- "=" -}}')
    assert shown(encoded(talk("1", "2", "3", "4"), template=after)) == (
        "<user>1<assistant>[2][<eos>]=<user>3<assistant>[4][<eos>]"
    )
    unmarked = after.replace("{%- generation -%}", "").replace("{%- endgeneration -%}", "")
    assert shown(encoded(talk("1", "2"), template=unmarked)) == "<user>1<assistant>[2][<eos>]"
    asked_last = Conversation((*talk("1", "2").messages, Message("user", "3")))
    assert shown(encoded(asked_last)) == "<user>1<assistant>[2][<eos>]"


def test_both_rows_of_a_pair_are_neighbours():
    rows = encoded((talk("31", "13", first_trained=1), talk("31", "1", first_trained=1)))
    assert (len(rows), rows.rows_per_example, rows.offsets.tolist()) == (1, 2, [0, 7, 13])
    assert shown(rows, 1) == "<user>31<assistant>[1][<eos>]"


def test_a_template_that_does_not_end_a_turn_is_refused():
    endless = tokenizer_with().chat_template.replace("{{- eos_token -}}", "")
    with pytest.raises(DataError, match=r"does not end a turn of the assistant with '<eos>', but writes '13'"):
        encoded(talk("31", "13"), template=endless)


def test_marks_that_leave_out_the_end_of_a_turn_are_refused():
    short = MARKED.replace("+ eos_token -}}{%- endgeneration -%}", "-}}{%- endgeneration -%}{{- eos_token -}}")
    assert short != MARKED
    named = r"{% generation %} leaves out '<eos>', which ends a turn .*; put {% endgeneration %} after it"
    with pytest.raises(DataError, match=named):
        encoded(talk("31", "13"), template=short)


def chatted(template, *contents, eos=None):
    """Encode one conversation with a tokenizer that has the tokens of a template; return that, and how it looks."""
    tokenizer = make_chat_tokenizer(template, eos=eos)
    given = Conversations(("a.jsonl:0",), ((talk(*contents, system="S"),),))
    rows = encode_rows(tokenizer, given, stop_tokens=(tokenizer.eos_token_id,), max_row_tokens=999)
    shown, was = "", False
    for token, trained in zip(rows.tokens.tolist(), rows.is_trained.tolist(), strict=True):
        shown += ("[" if trained else "]") * (trained != was) + tokenizer.decode([token])
        was = trained
    return rows, shown + "]" * was


def test_templates_as_published_models_have_them_are_trained_from_the_cue_to_the_end_of_the_turn():
    system, user, answer = (f"<|im_start|>{role}\n" for role in ("system", "user", "assistant"))
    rows, shown = chatted(QWEN3, "hi", "yo", "so", "<think>\nr\n</think>\n\nno")
    assert shown == (
        f"{system}S<|im_end|>\n{user}hi<|im_end|>\n{answer}[yo<|im_end|>]\n"
        f"{user}so<|im_end|>\n{answer}[<think>\nr\n</think>\n\nno<|im_end|>]"
    )
    assert rows.shortened == ()
    system, user, answer = (
        f"<|start_header_id|>{role}<|end_header_id|>\n\n" for role in ("system", "user", "assistant")
    )
    rows, shown = chatted(LLAMA3, "hi", "\nyo ")
    assert shown == f"<|begin_of_text|>{system}S<|eot_id|>{user}hi<|eot_id|>{answer}[yo<|eot_id|>]"
    assert rows.shortened == (), "blanks are nothing that is said"
    _, shown = chatted(ZEPHYR, "hi", "yo", "so", "no")
    assert (
        shown
        == "<|system|>\nS</s>\n<|user|>\nhi</s>\n<|assistant|>\n[yo</s>]\n<|user|>\nso</s>\n<|assistant|>\n[no</s>]"
    )


def test_turns_of_which_the_template_leaves_out_a_part_are_counted():
    reasoned = "<think>\nr\n</think>\n\nyo"
    rows, shown = chatted(QWEN3, "hi", reasoned, "so", reasoned, "no", reasoned)
    assert rows.shortened == ("a.jsonl:0", "a.jsonl:0")
    assert shown.count("r\n</think>") == 1
    marked = MARKED.replace("message.content + eos_token", 'message.content.split("=")[-1] + eos_token')
    assert encoded(talk("1", "2=3", "1", "2"), template=marked).shortened == ("a.jsonl:0",)


@pytest.mark.parametrize("template", [QWEN3, LLAMA3], ids=["qwen3", "llama3"])
def test_the_error_on_a_base_model_whose_end_is_not_that_of_a_turn_names_the_line_to_set(template):
    first, *_, end = SPECIAL[template]
    named = (
        rf"with '{re.escape(first)}', but with '{re.escape(end)}': .*; set model.tokenizer.eos_token='{re.escape(end)}'"
    )
    with pytest.raises(DataError, match=named):
        chatted(template, "hi", "yo", "so", "no", eos=first)


def test_a_template_in_which_a_turn_cannot_be_found_is_refused_and_the_marks_are_the_remedy():
    with pytest.raises(DataError, match=r"a.jsonl:0: .* mark the assistant's turns in the template with"):
        encoded(talk("31", "13", "2", "2"), template=FORGETFUL)


def test_a_conversation_that_begins_with_the_assistant_needs_the_marks():
    first = Conversation((Message("assistant", "1"), Message("user", "2"), Message("assistant", "3")))
    with pytest.raises(DataError, match=r"a.jsonl:0: .* it begins with the assistant, .* a turn of the user or"):
        encoded(first)
    assert shown(encoded(first, template=MARKED)) == "<assistant>[1][<eos>]<user>2<assistant>[3][<eos>]"


def test_long_rows_are_refused_dropped_or_cut_at_their_end():
    rows = talk("1", "2"), talk("31", "13579"), talk("123456", "1")
    with pytest.raises(DataError, match=r"a.jsonl:1: the row has 10 tokens, but data.max_row_tokens is 7"):
        encoded(*rows, max_row_tokens=7)
    dropped = encoded(*rows, max_row_tokens=7, on_too_long="drop")
    assert (dropped.names, dropped.dropped, dropped.truncated) == (("a.jsonl:0",), ("a.jsonl:1", "a.jsonl:2"), ())
    cut = encoded(*rows, max_row_tokens=7, on_too_long="truncate")
    assert (cut.names, cut.truncated, cut.dropped) == (("a.jsonl:0", "a.jsonl:1"), ("a.jsonl:1",), ("a.jsonl:2",))
    assert shown(cut, 1) == "<user>31<assistant>[1][3][5]"
    with pytest.raises(DataError, match="no example is left: all 3 are longer than 3 tokens"):
        encoded(*rows, max_row_tokens=3, on_too_long="drop")


def test_an_example_of_which_no_token_would_be_trained_is_refused_or_left_out():
    nothing = MARKED.replace("{%- endgeneration -%}", "").replace(
        "{%- generation -%}", "{%- generation -%}{%- endgeneration -%}"
    )
    with pytest.raises(DataError, match=r"a.jsonl:0: no token of it would be trained: the template's {% generation %}"):
        encoded(talk("1", "2"), template=nothing)
    kept = encoded(talk("1", "2"), template=nothing, on_too_long="drop", may_be_empty=True)
    assert (len(kept), kept.dropped) == (0, ("a.jsonl:0",))


def test_text_that_the_tokens_do_not_represent_is_refused_as_in_prompts():
    with pytest.raises(DataError, match=r"a.jsonl:0: the tokenizer knows no token for 'a'"):
        encoded(talk("1", "a"))
    with pytest.raises(DataError, match=r"the text of message 1 has '<eos>', which is a control token"):
        encoded(talk("1", "2<eos>"))
    with pytest.raises(DataError, match=r"a.jsonl:0: token 3 of the row has the id 7, but the model knows 0 to 6"):
        encoded(talk("1", "2"), num_ids=7)


def test_the_template_may_refuse_a_row_and_the_others_are_named_too():
    odd = Conversation((Message("tool", "1"), Message("assistant", "2")))
    with pytest.raises(
        DataError, match=r"2 problems(.|\n)*a.jsonl:0: it does not fit the chat template(.|\n)*a.jsonl:1"
    ):
        encoded(odd, talk("1", "b"))


def test_the_numbers_take_four_bytes_a_token():
    assert encoded(talk("1", "2")).tokens.dtype == np.int32


def test_examples_with_a_control_token_in_their_text_are_left_out_if_that_is_wanted():
    rows = talk("31", "<eos>"), talk("1", "2")
    with pytest.raises(DataError, match="'<eos>', which is a control token"):
        encoded(*rows)
    found = encoded(*rows, may_drop=("a.jsonl:0",))
    assert found.names == ("a.jsonl:1",)
    (bad,) = found.bad
    assert bad.startswith("a.jsonl:0 (the text of message 1 has '<eos>', which is a control token")
    with pytest.raises(DataError, match=r"no example is left: .*, or cannot be used; the first of these is a\.jsonl:0"):
        encoded(rows[0], may_drop=("a.jsonl:0",))


def merged(tokenizer, *rows):
    given = Conversations(tuple(f"a:{row}" for row in range(len(rows))), tuple((row,) for row in rows))
    return encode_rows(tokenizer, given, stop_tokens=(tokenizer.eos_token_id,), max_row_tokens=999)


CUES = [(" ", (" ", "y")), ("\n", ("\n", "y")), ("\n", ("\n", "\n"))]


@pytest.mark.parametrize(("cue", "merge"), CUES)
def test_an_answer_is_tokenized_apart_from_its_cue_as_it_is_sampled(cue, merge):
    tokenizer = merging_tokenizer(cue, merge)
    answer = merge[1] + "es"
    rows = merged(tokenizer, talk("q", answer), talk("q", answer, "r", answer))
    for row, example in enumerate((rows[0], rows[1])):
        ids, trained = example.rows[0]
        asked = [{"role": "user", "content": "q"}]
        prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
        said = tokenizer.encode(answer + "</s>", add_special_tokens=False)
        assert ids.tolist()[: len(prompt) + len(said)] == [*prompt, *said]
        assert trained.tolist()[: len(prompt) + len(said)] == [False] * len(prompt) + [True] * len(said)
        assert trained.sum() == len(said) * (row + 1), "of every turn the first token, too"
    # Written anew, the earlier answer is merged with its cue, so that the second turn is asked for in other words.
    assert rows.misaligned == ("a:1",)


@pytest.mark.parametrize(("cue", "merge"), CUES)
def test_marked_turns_are_trained_as_transformers_marks_them_and_said_where_sampling_sees_other_tokens(cue, merge):
    tokenizer = merging_tokenizer(cue, merge, marked=True)
    talks = talk("q", merge[1] + "es"), talk("q", "no", "r", "no"), talk("q", "no", "r", merge[1])
    rows = merged(tokenizer, *talks)
    assert rows.misaligned == ("a:0", "a:2")
    said = []
    say_fates(rows, 999, said.append)
    assert said[-1].startswith("2 examples have a turn of the assistant before which a model asked for it sees other")
    assert "the first in a:0" in said[-1]
    for place, row in enumerate(talks):
        messages = [{"role": one.role, "content": one.content} for one in row.messages]
        theirs = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        ids, trained = rows[place].rows[0]
        assert theirs["input_ids"][: len(ids)] == ids.tolist()
        assert [place for place, one in enumerate(theirs["assistant_masks"]) if one] == trained.nonzero()[0].tolist()


def test_a_marked_row_whose_cue_is_written_in_another_way_when_an_answer_is_asked_for_is_said():
    opened = MARKED + "{%- if add_generation_prompt -%}{{- '=' -}}{%- endif -%}"
    assert encoded(talk("1", "2"), template=MARKED).misaligned == ()
    assert encoded(talk("1", "2"), template=opened).misaligned == ("a.jsonl:0",)


@pytest.mark.parametrize("scheme", ["first", "always"])
def test_a_tokenizer_that_puts_a_blank_before_a_text_does_not_put_one_before_an_answer(scheme):
    """Where only the first text gets one the answer is tokenized apart, else the token of both is trained."""
    tokenizer = merging_tokenizer(" ", (" ", "y"), start_blank=scheme)
    rows = merged(tokenizer, talk("q", "yes"), talk("q", "no"))
    texts = [tokenizer.decode(rows[row].rows[0][0]) for row in (0, 1)]
    assert texts == ["U:qA: yes</s>", "U:qA: no</s>"]
    trained = [tokenizer.decode(ids[mask]) for (ids, mask) in (rows[row].rows[0] for row in (0, 1))]
    assert trained == ["yes</s>", "no</s>"]
    assert rows.misaligned == (() if scheme == "first" else ("a:0",))


def test_pairs_whose_rows_are_equal_are_bad_rows():
    cut = talk("31", "13579", first_trained=1), talk("31", "13531", first_trained=1)
    good = talk("1", "2", first_trained=1), talk("1", "3", first_trained=1)
    options = {"max_row_tokens": 7, "on_too_long": "truncate"}
    with pytest.raises(
        DataError, match=r"a.jsonl:1: expected a pair that differs, .* when cut at data.max_row_tokens=7"
    ):
        encoded(good, cut, **options)
    kept = encoded(good, cut, may_drop=("a.jsonl:1",), **options)
    assert (kept.names, len(kept.bad)) == (("a.jsonl:0",), 1)
    assert encoded(good, cut, **{**options, "on_too_long": "drop"}).dropped == ("a.jsonl:1",)
    assert len(encoded(good, cut, **{**options, "max_row_tokens": 8})) == 2
    trims = tokenizer_with().chat_template.replace("message.content", "message.content.replace('=', '')")
    with pytest.raises(DataError, match=r"a.jsonl:0: .*the same tokens: the chat template or the tokenizer leaves out"):
        encoded((talk("1", "2", first_trained=1), talk("1", "2=", first_trained=1)), template=trims)
