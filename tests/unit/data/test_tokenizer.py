import json

import pytest
from hypothesis import given, settings, strategies as st
from jinja2.exceptions import SecurityError

from rallypoint.config.sections.material import TokenizerConfig
from rallypoint.data import Example, Message, encode_prompts, load_tokenizer, make_digits_tokenizer, save_tokenizer
from rallypoint.data.digits import score_digits
from rallypoint.errors import DataError, ModelError

TOKENIZER = make_digits_tokenizer()
CHARACTERS = "0123456789+-= ,"


def tokens(messages, *, add_generation_prompt=True):
    ids = TOKENIZER.apply_chat_template(messages, add_generation_prompt=add_generation_prompt, return_dict=False)
    return TOKENIZER.convert_ids_to_tokens(ids)


def example(name, *messages):
    prompt = tuple(Message(role, content) for role, content in messages)
    return Example(name=name, data_source="d", prompt=prompt, ability="", ground_truth="1", extra_info={})


def test_a_prompt_of_six_digits_is_eight_tokens():
    message = {"role": "user", "content": "493105"}
    assert tokens([message]) == ["<user>", "4", "9", "3", "1", "0", "5", "<assistant>"]


def test_system_and_assistant_turns_have_their_place_and_an_answer_ends():
    conversation = [
        {"role": "system", "content": "1"},
        {"role": "user", "content": "21"},
        {"role": "assistant", "content": "12"},
    ]
    expected = ["<system>", "1", "<user>", "2", "1", "<assistant>", "1", "2", "<eos>"]
    assert tokens(conversation, add_generation_prompt=False) == expected


def test_an_unknown_role_is_refused():
    with pytest.raises(Exception, match="the digits tokenizer knows no role tool"):
        tokens([{"role": "tool", "content": "1"}])


@given(st.text(CHARACTERS, max_size=30))
def test_every_character_is_one_token_and_comes_back_without_blanks_between(text):
    ids = TOKENIZER(text)["input_ids"]
    assert len(ids) == len(text)
    assert TOKENIZER.decode([*ids, TOKENIZER.eos_token_id], skip_special_tokens=True) == text


@given(st.lists(st.integers(1, len(TOKENIZER) - 1), max_size=10))
def test_whatever_an_untrained_policy_samples_there_is_one_score_for_each_of_its_tokens(ids):
    text = TOKENIZER.decode(ids, skip_special_tokens=True)
    assert len(score_digits("", text, "013459")) == len(ids)


def test_the_vocabulary_has_twenty_ids_and_an_end():
    assert len(TOKENIZER) == 20
    assert (TOKENIZER.eos_token, TOKENIZER.eos_token_id) == ("<eos>", 0)
    assert TOKENIZER.all_special_tokens == ["<eos>"]


def test_a_saved_tokenizer_is_loaded_as_the_same(tmp_path):
    TOKENIZER.save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path)
    message = [{"role": "user", "content": "4931 x"}]
    for tokenizer in (loaded, load_tokenizer(str(tmp_path))):
        assert tokenizer.get_vocab() == TOKENIZER.get_vocab()
        assert tokenizer.eos_token_id == tokenizer.pad_token_id == 0
        made = [
            one.apply_chat_template(message, add_generation_prompt=True, return_dict=False)
            for one in (tokenizer, TOKENIZER)
        ]
        assert made[0] == made[1]
        assert tokenizer.decode(made[0], skip_special_tokens=True) == "<user>4931 <unk><assistant>"


def saved(folder, **changes):
    """Save the tokenizer with keys of its config changed; None takes a key away."""
    TOKENIZER.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return folder


def test_a_folder_without_a_tokenizer_names_the_files_and_the_remedy(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ModelError, match=r"no tokenizer.json, .*save_pretrained"):
        load_tokenizer(tmp_path)


def test_a_missing_chat_template_names_the_file_and_the_remedy(tmp_path):
    saved(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(ModelError, match=r"no chat template.*model.tokenizer.chat_template=FILE.*chat_template.jinja"):
        load_tokenizer(tmp_path)


def test_a_missing_end_of_sequence_token_names_the_file_and_the_key(tmp_path):
    saved(tmp_path, eos_token=None)
    named = r"no end-of-sequence token.*model.tokenizer.eos_token=TOKEN.*'eos_token' in .*tokenizer_config.json"
    with pytest.raises(ModelError, match=named):
        load_tokenizer(tmp_path)


def changed(folder, **changes):
    """Load the tokenizer of a folder that has neither a template nor an end, with what a config changes."""
    saved(folder, eos_token=None)
    (folder / "chat_template.jinja").unlink()
    return load_tokenizer(folder, changes=TokenizerConfig(**changes))


def test_a_config_gives_a_base_model_its_template_and_its_end_which_are_saved_with_it(tmp_path):
    template = tmp_path / "chat.jinja"
    template.write_text("{{ '<user>' + messages[0].content + '=' }}")
    tokenizer = changed(tmp_path, chat_template=str(template), eos_token="=")
    (tmp_path / "copy").mkdir()
    stops = tmp_path / "copy" / "generation_config.json"
    for before, after in [({}, 17), ({"eos_token_id": 3}, [17, 3]), ({"eos_token_id": [3, 17]}, [3, 17])]:
        stops.write_text(json.dumps(before))
        save_tokenizer(tokenizer, tmp_path / "copy")
        assert json.loads(stops.read_text()) == {"eos_token_id": after}
    loaded = load_tokenizer(tmp_path / "copy")
    assert (loaded.eos_token, loaded.eos_token_id) == ("=", 17)
    assert loaded.apply_chat_template([{"role": "user", "content": "12"}], tokenize=False) == "<user>12="


def test_what_cannot_be_changed_in_a_tokenizer_names_the_key(tmp_path):
    with pytest.raises(ModelError, match=r"model.tokenizer.eos_token='<end>' is not a token of .*"):
        changed(tmp_path, eos_token="<end>")
    with pytest.raises(ModelError, match=r"model.tokenizer.eos_token='<eoss>' .*did you mean '<eos>'"):
        changed(tmp_path, eos_token="<eoss>")
    with pytest.raises(ModelError, match=r"model.tokenizer.chat_template=.*/none cannot be read: No such file"):
        changed(tmp_path, chat_template=str(tmp_path / "none"))
    (tmp_path / "broken").write_text("\n{% if %}")
    with pytest.raises(ModelError, match=r"model.tokenizer.chat_template=.*/broken, line 2: no template in Jinja"):
        changed(tmp_path, chat_template=str(tmp_path / "broken"))
    (tmp_path / "sly").write_text("{{ ''.__class__.__mro__ }}")  # transformers' sandbox: read, and not run freely
    sly = changed(tmp_path, chat_template=str(tmp_path / "sly"), eos_token="=")
    with pytest.raises(SecurityError, match=r"access to attribute '__class__'"):
        sly.apply_chat_template([{"role": "user", "content": "1"}])


@pytest.mark.parametrize("content", ["", "{", "{}", '{"model": {"type": "Nope"}}', "[1]"])
def test_a_damaged_tokenizer_file_is_an_error_that_names_the_folder(tmp_path, content):
    saved(tmp_path)
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelError, match=f"{tmp_path}: its tokenizer cannot be read"):
        load_tokenizer(tmp_path)


def test_a_tokenizer_of_a_newer_library_is_an_error_that_names_the_folder(tmp_path):
    saved(tmp_path)
    path = tmp_path / "tokenizer.json"
    path.write_text(path.read_text().replace('"WordLevel"', '"WordLevel9"'))
    with pytest.raises(ModelError, match=f"{tmp_path}: its tokenizer cannot be read"):
        load_tokenizer(tmp_path)


def test_code_in_a_model_folder_is_not_run_unless_allowed(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "own", "auto_map": {"AutoTokenizer": ["own.Own", null]}}')
    (tmp_path / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["own.Own", null]}}')
    (tmp_path / "vocab.txt").write_text("a")
    (tmp_path / "own.py").write_text("raise SystemExit('was run')")
    with pytest.raises(ModelError, match=r"if you trust its author, set model\.trust_remote_code=true"):
        load_tokenizer(tmp_path)


def test_a_file_is_no_model_folder(tmp_path):
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(ModelError, match="is a file, expected a model folder"):
        load_tokenizer(tmp_path / "model.bin")


@pytest.mark.parametrize("name", ["./no-such-model", "/no/such/model", "runs/a/export", "~/no-such-model"])
def test_a_path_that_does_not_exist_is_not_looked_for_on_the_hub(name):
    with pytest.raises(ModelError, match="does not exist"):
        load_tokenizer(name)


def test_a_name_that_is_neither_folder_nor_hub_model_says_both():
    # The hub's client refuses this name itself, so that no test needs a network.
    with pytest.raises(ModelError, match=r"'no such/name' is neither a folder here .* nor a model that the Hugging"):
        load_tokenizer("no such/name")


def test_prompts_are_encoded_in_the_chat_template_with_the_cue_for_the_assistant():
    examples = [example("a:0", ("user", "12")), example("a:1", ("system", "1"), ("user", "3"))]
    encoded = encode_prompts(TOKENIZER, examples, max_prompt_tokens=5)
    assert [TOKENIZER.decode(ids) for ids in encoded.token_ids] == [
        "<user>12<assistant>",
        "<system>1<user>3<assistant>",
    ]
    assert encoded.examples == tuple(examples)
    assert encoded.dropped == ()


def test_prompts_that_are_too_long_are_all_named():
    examples = [example(f"a:{row}", ("user", "1" * row)) for row in range(1, 7)]
    with pytest.raises(DataError, match="a:5: the prompt has 7 tokens, but max_prompt_tokens is 6") as raised:
        encode_prompts(TOKENIZER, examples, max_prompt_tokens=6)
    assert "2 problems" in str(raised.value)
    assert "a:6" in str(raised.value)


def test_prompts_that_are_too_long_are_dropped_and_named_on_request():
    examples = [example(f"a:{row}", ("user", "1" * row)) for row in range(1, 7)]
    encoded = encode_prompts(TOKENIZER, examples, max_prompt_tokens=6, on_too_long="drop")
    assert encoded.dropped == ("a:5", "a:6")
    assert [len(ids) for ids in encoded.token_ids] == [3, 4, 5, 6]
    assert [one.name for one in encoded.examples] == ["a:1", "a:2", "a:3", "a:4"]


def test_prompts_that_are_too_long_keep_their_end_on_request_and_are_named():
    examples = [example("a:0", ("system", "7"), ("user", "123")), example("a:1", ("user", "4"))]
    encoded = encode_prompts(TOKENIZER, examples, max_prompt_tokens=5, on_too_long="truncate")
    assert encoded.truncated == ("a:0",)
    assert encoded.dropped == ()
    assert [TOKENIZER.decode(ids) for ids in encoded.token_ids] == ["<user>123<assistant>", "<user>4<assistant>"]
    assert encoded.examples == tuple(examples)


def test_a_prompt_with_an_id_that_the_model_does_not_know_is_named():
    nine = TOKENIZER.convert_tokens_to_ids("9")
    examples = [example("train.parquet:17", ("user", "19")), example("train.parquet:18", ("user", "1"))]
    with pytest.raises(DataError, match=rf"train.parquet:17: token 2 of the prompt has the id {nine}, but .* 0 to 13;"):
        encode_prompts(TOKENIZER, examples, max_prompt_tokens=9, num_ids=nine)


def test_a_full_disk_is_an_error_of_the_disk(tmp_path):
    (tmp_path / "tokenizer.json").symlink_to("/dev/full")
    with pytest.raises(OSError, match="the tokenizer cannot be written: No space left on device"):
        save_tokenizer(TOKENIZER, tmp_path)


def test_dropping_every_prompt_is_an_error():
    with pytest.raises(DataError, match="no prompt is left: all 1 are longer than 2 tokens"):
        encode_prompts(TOKENIZER, [example("a:0", ("user", "123"))], max_prompt_tokens=2, on_too_long="drop")


def test_a_prompt_without_tokens_is_named(tmp_path):
    tokenizer = make_digits_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{% endfor %}"
    with pytest.raises(DataError, match="a:0: the chat template makes no token"):
        encode_prompts(tokenizer, [example("a:0", ("user", ""))], max_prompt_tokens=9)


def test_prompts_that_the_template_refuses_are_named_and_the_others_are_not():
    examples = [example(f"a:{row}", ("tool" if row in (3, 8) else "user", "1")) for row in range(10)]
    with pytest.raises(DataError, match="2 problems") as raised:
        encode_prompts(TOKENIZER, examples, max_prompt_tokens=9)
    assert "a:3: the messages do not fit the model's chat template" in str(raised.value)
    assert "a:8" in str(raised.value)


@pytest.mark.parametrize("template", ["{{ 1 / 0 }}", "{{ range(10 ** 9) }}", "{{ messages + 1 }}", "{% if %}"])
def test_whatever_a_template_raises_is_named_with_its_prompt(template):
    tokenizer = make_digits_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(DataError, match="a:0: the messages do not fit the model's chat template"):
        encode_prompts(tokenizer, [example("a:0", ("user", "12"))], max_prompt_tokens=9)


@settings(max_examples=5, deadline=None)
@given(st.integers(1020, 2060))
def test_many_prompts_are_encoded_in_parts_without_losing_any(num_examples):
    examples = [example(f"a:{row}", ("user", str(row))) for row in range(num_examples)]
    encoded = encode_prompts(TOKENIZER, examples, max_prompt_tokens=9)
    assert [TOKENIZER.decode(ids[1:-1]) for ids in encoded.token_ids] == [str(row) for row in range(num_examples)]
