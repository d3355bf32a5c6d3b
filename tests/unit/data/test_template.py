"""What a run adds to a chat template, and what it must know of one."""

import json
import re
from datetime import datetime

import pytest
from chat_templates import LLAMA3, PUBLISHED, QWEN3, SPECIAL, ZEPHYR, make_chat_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rallypoint.data import (
    Conversations,
    Example,
    Message,
    TemplateProbe,
    encode_prompts,
    encode_rows,
    load_tokenizer,
    save_tokenizer,
)
from rallypoint.data.chat_text import chat_text
from rallypoint.data.conversations import Conversation
from rallypoint.data.template import check_template, complete_template, hold_clock, take_texts
from rallypoint.errors import DataError, ModelError

START = "<|im_start|>"
CHATML = """\
{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if thinks is not defined or thinks %}<think>
{% endif %}{% endif %}"""
PARTS = """\
{% for message in messages %}<|im_start|>{{ message.role }}:
{% for part in message.content %}{% if part.type == "text" %}{{ part.text }}{% endif %}{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant:{% endif %}"""
TALK = [{"role": "system", "content": "S"}, {"role": "user", "content": "hi"}]


def tokenizer_with(template, kind=QWEN3):
    tokenizer = make_chat_tokenizer(kind)
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture
def load(tmp_path):
    """Returns a function that saves a tokenizer with a template, and loads it."""

    def load(text, **options):
        save_tokenizer(tokenizer_with(text), tmp_path)
        return load_tokenizer(tmp_path, **options)

    return load


def written(tokenizer, messages=TALK, **arguments):
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, **arguments)


@pytest.mark.parametrize("begin", ["", "\n", "  {% if true %}x{% endif %}\n", "{%- if true %}\ny{% endif %}\n"])
@pytest.mark.parametrize("value", [False, None, "a 'b' \"c\" {% \n ü \U0001f600", [1, {"a": None}], 2.5])
def test_an_argument_is_written_into_the_template_and_nothing_else_changes(begin, value):
    template = begin + "{{ x | default('none given') | tojson }}" + CHATML
    ours, theirs = tokenizer_with(template), tokenizer_with(template)
    complete_template(ours, "model", {"x": value})
    assert written(ours) == written(theirs, x=value)
    assert written(ours, x="other") == written(theirs, x="other"), "who renders it may give another"


def test_checkpoints_have_the_arguments_and_a_later_run_may_give_others(load, tmp_path):
    tokenizer = load(CHATML, template={"thinks": False})
    assert "<think>" not in written(tokenizer)
    save_tokenizer(tokenizer, tmp_path / "checkpoint")
    assert written(load_tokenizer(tmp_path / "checkpoint")) == written(tokenizer)
    assert written(load_tokenizer(tmp_path / "checkpoint", template={"thinks": True})).endswith("<think>\n")


def test_an_argument_that_the_template_does_not_read_is_an_error(load):
    with pytest.raises(ModelError, match=r"data.template: 'think' is nothing that .* reads; did you mean 'thinks'"):
        load(CHATML, template={"think": False})
    with pytest.raises(ModelError, match=r"data.template: 'messages' is given to every template already"):
        load(CHATML, template={"messages": []})


def test_a_template_shows_the_time_of_the_start_for_ever(tmp_path):
    clock = "{% if strftime_now is defined %}{{ strftime_now('%d %b %Y') }} {{ strftime_now( \"%H:%M\" ) }}{% endif %}"
    begun, again = tokenizer_with(clock + CHATML), tokenizer_with(clock + CHATML)
    moment = hold_clock(begun, lambda: datetime(2026, 1, 31, 23, 59, 58))
    assert written(begun).startswith("31 Jan 2026 23:59<|im_start|>")
    complete_template(again, "model", {"strftime_now": moment})
    assert written(again) == written(begun)
    save_tokenizer(begun, tmp_path)
    assert written(load_tokenizer(tmp_path)) == written(begun)
    assert hold_clock(begun) is None
    with pytest.raises(ModelError, match="strftime_now='soon': expected the time that the template shows"):
        complete_template(tokenizer_with(clock), "model", {"strftime_now": "soon"})
    with pytest.raises(ModelError, match="asks for the time with a format that is not a literal"):
        hold_clock(tokenizer_with("{% set f = '%d' %}{{ strftime_now(f) }}" + CHATML))


def test_a_template_that_is_no_function_of_the_messages_is_refused(load):
    with pytest.raises(ModelError, match="writes the same messages differently each time"):
        load("{{ range(10 ** 4) | random }}" + CHATML)


def test_a_template_that_reads_lists_of_parts_is_given_them_also_from_a_checkpoint(load, tmp_path):
    tokenizer = load(PARTS)
    assert written(tokenizer) == f"{START}system:\nS<|im_end|>\n{START}user:\nhi<|im_end|>\n{START}assistant:"
    as_parts = [{**one, "content": [{"type": "text", "text": one["content"]}]} for one in TALK]
    assert written(tokenizer, as_parts) == written(tokenizer)
    save_tokenizer(tokenizer, tmp_path / "checkpoint")
    again = load_tokenizer(tmp_path / "checkpoint")
    assert again.chat_template == tokenizer.chat_template
    with pytest.raises(ModelError, match=r"leaves out what the user says .*model.tokenizer.chat_template=FILE"):
        load("{% for message in messages %}{{ message.text }}{% endfor %}x")


def test_a_message_that_the_template_leaves_out_is_an_error_with_its_row():
    tokenizer = tokenizer_with(CHATML.replace("in messages %}", "in messages if message.role != 'system' %}"))
    prompt = tuple(Message(one["role"], one["content"]) for one in TALK)
    lost = r"row 1: .*leaves out the text of message 0 \(system\), 'S'; give a template of your own"
    with pytest.raises(DataError, match=lost):
        encode_prompts(tokenizer, [Example("row 1", "", prompt, "", None, {})], max_prompt_tokens=99)
    rows = Conversations(("row 1",), ((Conversation((*prompt, Message("assistant", "yo"))),),))
    with pytest.raises(DataError, match=lost):
        encode_rows(tokenizer, rows, stop_tokens=[tokenizer.eos_token_id], max_row_tokens=99)


SYSTEM, ASKED, TOOL = ("system", "Be 'brief'."), ("user", 'say "x"\n ok'), ("tool", '{"x": "<b>\n"}')
ANSWERED = ("assistant", "<think>\nhm\n</think>\n\nb c")
REFUSED = {  # what a template says of messages that it has no place for
    ("gemma2", SYSTEM): "System role not supported",
    ("gemma2", TOOL): "roles must alternate",
    ("llama2", TOOL): "roles must alternate",
    ("deepseek-r1", TOOL): r"leaves out the text of message 2 \(tool\)",
}
NOT_TRAINED = {  # what is said of a conversation whose turns cannot be found, or would not end
    "qwen3-2507-thinking": "written differently when an answer is asked for",
    "deepseek-r1": "written differently when an answer is asked for",
    "glm4.5": "does not end a turn of the assistant with",
    "gpt-oss": "'<|return|>' only if nothing follows, and message 1 has another one after it",
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_templates_like_those_of_published_models_keep_what_is_said_or_are_refused_by_name(name):
    tokenizer = make_chat_tokenizer(PUBLISHED[name])
    take_texts(tokenizer)
    check_template(tokenizer, name)
    assert (hold_clock(tokenizer) is not None) == (name in ("llama3.1", "gpt-oss"))
    probe = TemplateProbe.of(tokenizer)
    assert probe.end == (None if name == "glm4.5" else tokenizer.eos_token_id)
    assert probe.opened == ("<think>" if name in ("qwen3-2507-thinking", "deepseek-r1") else None)
    conversations = {
        ASKED: (ASKED,),
        SYSTEM: (SYSTEM, ASKED),
        ANSWERED: (("user", "a"), ANSWERED, ASKED),
        TOOL: (("user", "a"), ("assistant", "b"), TOOL, ("assistant", "c"), ASKED),
    }
    for kind, messages in conversations.items():
        prompt = tuple(Message(*message) for message in messages)
        example, asked = (
            Example("row", "", prompt, "", None, {}),
            [{"role": m.role, "content": m.content} for m in prompt],
        )
        if refusal := REFUSED.get((name, kind)):
            with pytest.raises(ModelError, match=refusal):
                chat_text(tokenizer, asked)
            with pytest.raises(DataError, match=f"row: .*{refusal}"):
                encode_prompts(tokenizer, [example], max_prompt_tokens=999)
            continue
        (ids,) = encode_prompts(tokenizer, [example], max_prompt_tokens=999).token_ids
        assert tokenizer.decode(ids) == chat_text(tokenizer, asked)
        rows = Conversations(("row",), ((Conversation((*prompt, Message("assistant", "done")), len(prompt)),),))
        if (name in NOT_TRAINED and name != "gpt-oss") or (name, kind) == ("mistral-v0.3", SYSTEM):
            continue
        encoded = encode_rows(tokenizer, rows, stop_tokens=[tokenizer.eos_token_id], max_row_tokens=999)
        assert encoded.tokens[: len(ids)].tolist() == list(ids)
        assert not encoded.is_trained[: len(ids)].any()
        assert encoded.is_trained[len(ids) :].all()
        trained = tokenizer.decode(encoded.tokens[len(ids) :])
        assert re.fullmatch(rf".*\bdone ?{re.escape(tokenizer.eos_token)}", trained, re.DOTALL)


@pytest.mark.parametrize("name", NOT_TRAINED)
def test_conversations_that_a_template_cannot_train_are_refused_with_the_reason(name):
    tokenizer = make_chat_tokenizer(PUBLISHED[name])
    messages = tuple(Message(*one) for one in (("user", "a"), ("assistant", "b"), ASKED, ("assistant", "done")))
    rows = Conversations(("row",), ((Conversation(messages),),))
    with pytest.raises(DataError, match=re.escape(NOT_TRAINED[name])):
        encode_rows(tokenizer, rows, stop_tokens=[tokenizer.eos_token_id], max_row_tokens=999)


@pytest.mark.parametrize("template", [QWEN3, LLAMA3, ZEPHYR], ids=["qwen3", "llama3", "zephyr"])
def test_the_probe_finds_what_ends_a_turn_whatever_the_tokenizer_calls_its_end(template):
    for eos in (SPECIAL[template][-1], SPECIAL[template][0]):
        tokenizer = make_chat_tokenizer(template, eos=eos)
        end = eos if template is ZEPHYR else SPECIAL[template][-1]
        assert TemplateProbe.of(tokenizer).end == tokenizer.convert_tokens_to_ids(end)


def test_the_probe_finds_the_tag_that_a_cue_leaves_open():
    tokenizer = tokenizer_with(CHATML)
    assert TemplateProbe.of(tokenizer).opened == "<think>"
    complete_template(tokenizer, "model", {"thinks": False})
    assert TemplateProbe.of(tokenizer).opened is None
    assert TemplateProbe.of(tokenizer_with(CHATML.replace("<think>\n", "<think>\n\n</think>\n"))).opened is None
    assert TemplateProbe.of(tokenizer_with("{{ messages[0].content }}<assistant>")).opened is None, "that is a role"
    hidden = tokenizer_with(CHATML)
    hidden.add_special_tokens({"additional_special_tokens": ["<think>", "</think>"]})
    assert TemplateProbe.of(hidden).opened == "<think>", "also if text is decoded without it"


@pytest.mark.parametrize("template", [QWEN3, LLAMA3, ZEPHYR], ids=["qwen3", "llama3", "zephyr"])
def test_the_probe_finds_that_a_template_has_no_generation_prompt(template):
    tokenizer = make_chat_tokenizer(template)
    assert TemplateProbe.of(tokenizer).uncued == ""
    tokenizer.chat_template = template.partition("{%- if add_generation_prompt")[0]
    assert "assistant" in TemplateProbe.of(tokenizer).uncued
    needs_none = "{% for one in messages %}{{ '[INST]' if one.role == 'user' }}{{ one.content }} {% endfor %}"
    assert TemplateProbe.of(tokenizer_with(needs_none)).uncued == ""


@pytest.mark.parametrize("decoder", [decoders.Fuse(), decoders.WordPiece(cleanup=True)], ids=["fuse", "word pieces"])
def test_text_is_decoded_as_it_was_sampled(tmp_path, decoder):
    words = {word: number for number, word in enumerate(("<eos>", "do", " n't", " .", "n't", "."))}
    backend = Tokenizer(models.WordLevel(words, unk_token="<eos>"))
    backend.decoder = decoder
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", clean_up_tokenization_spaces=True)
    tokenizer.save_pretrained(tmp_path)
    ids = [1, 2, 3] if isinstance(decoder, decoders.Fuse) else [1, 4, 5]
    assert tokenizer.decode(ids) == "don't."
    loaded = load_tokenizer(tmp_path, for_chat=False)
    assert loaded.decode(ids) == loaded.batch_decode([ids])[0] == "do n't ."
    save_tokenizer(loaded, tmp_path / "checkpoint")
    assert load_tokenizer(tmp_path / "checkpoint", for_chat=False).decode(ids) == "do n't ."


def test_a_tokenizer_that_makes_nothing_of_its_words_is_refused_with_the_class_that_was_chosen(tmp_path):
    backend = Tokenizer(models.WordLevel({"<eos>": 0, "<unk>": 1, "hello": 2, "world": 3}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>").save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mistral"}))
    assert load_tokenizer(tmp_path, for_chat=False).encode("hello world") == [2, 3]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    with pytest.raises(ModelError, match=r"no token of '.*', .* loaded it as Qwen2Tokenizer, .* \(TokenizersBackend"):
        load_tokenizer(tmp_path, for_chat=False)
