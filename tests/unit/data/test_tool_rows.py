"""Rows with tools, as published data have them: what the template is told, and which tokens are trained."""

import copy
import importlib.util
import json
import re
from pathlib import Path
from random import Random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from chat_templates import QWEN3, make_chat_tokenizer, make_published_tokenizer
from tool_templates import FAMILIES, LLAMA, QWEN25, make_tool_tokenizer

from rallypoint.data import DataSet, TemplateProbe, encode_prompts, encode_rows, load_conversations, load_dataset
from rallypoint.data.answers import read_answer
from rallypoint.data.template import take_texts
from rallypoint.errors import DataError

SCHEMA = {
    "name": "look_up",
    "description": "Look something up.",
    "parameters": {"type": "object", "properties": {"word": {"type": "string"}, "few": {"type": "integer"}}},
}
TOOLS = [{"type": "function", "function": SCHEMA}]


def called(*arguments, key="call_abc"):
    function = {"name": "look_up", "arguments": json.dumps(dict(arguments))}
    return {"id": key, "type": "function", "function": function}


ASKED = {"role": "user", "content": "What is zinc?"}
CALLING = {"role": "assistant", "content": None, "tool_calls": [called(("word", "zinc"), ("few", 3))]}
RESULT = {"role": "tool", "tool_call_id": "call_abc", "content": "metal7 of 30"}
ANSWERED = {"role": "assistant", "content": "A metal."}
AGAIN, THEN = {"role": "user", "content": "And tin?"}, {"role": "assistant", "content": "Another one."}
TALK = [ASKED, CALLING, RESULT, ANSWERED, AGAIN, THEN]


def load(path, *rows, kind="conversations", drop=False, **columns):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_conversations([DataSet(str(path), drops_bad_rows=drop, columns=columns)], kind)


def encode(tokenizer, stops, conversations):
    return encode_rows(tokenizer, conversations, stop_tokens=stops, max_row_tokens=10**6)


def trained_parts(ids, trained):
    """Return the runs of tokens that are trained."""
    parts, was = [], False
    for token, is_trained in zip(ids.tolist(), trained.tolist(), strict=True):
        if is_trained and not was:
            parts.append([])
        if is_trained:
            parts[-1].append(token)
        was = is_trained
    return parts


def said(tokenizer, stops, part):
    """Return what a trained part says, read as if it had been sampled."""
    message = read_answer(tokenizer, part, stop_tokens=stops, tools=TOOLS)
    calls = [json.loads(call["function"]["arguments"]) for call in message.get("tool_calls", ())]
    return str(message["content"]).strip(), calls


CALLED = "", [{"word": "zinc", "few": 3}]
ONE_QUESTION = {"mistral", "gpt-oss"}
"""Families whose templates write what is before an answer in another way when a question follows."""


@pytest.mark.parametrize("family", FAMILIES)
def test_the_assistants_turns_with_their_calls_are_trained_and_results_of_tools_are_not(tmp_path, family):
    tokenizer, stops = make_tool_tokenizer(family)
    talk = TALK[:4] if family in ONE_QUESTION else TALK
    # What ends an answer of GLM begins the next message.
    talk = [*talk, AGAIN] if family == "glm4.5" else talk
    rows = encode(tokenizer, stops, load(tmp_path / "a.jsonl", {"messages": talk, "tools": TOOLS}))
    ids, trained = rows[0].rows[0]
    parts = trained_parts(ids, trained)
    wanted = [CALLED, ("A metal.", []), ("Another one.", [])]
    assert [said(tokenizer, stops, part) for part in parts] == wanted[: len(parts)]
    assert len(parts) == sum(message["role"] == "assistant" for message in talk)
    assert all(part[-1] in stops for part in parts), "a model that is trained on it ends its turns"
    assert "metal7" in tokenizer.decode(ids)
    assert "metal7" not in tokenizer.decode(ids[trained])
    assert rows.shortened == rows.misaligned == ()


@pytest.mark.parametrize("family", sorted(ONE_QUESTION))
def test_a_template_that_moves_what_was_said_is_refused_with_what_to_do(tmp_path, family):
    tokenizer, stops = make_tool_tokenizer(family)
    rows = {"messages": TALK, "tools": TOOLS}, {"messages": TALK[:4], "tools": TOOLS}
    with pytest.raises(
        DataError, match=r"a\.jsonl:1: .*give what is before|mark the assistant's turns in the template"
    ):
        encode(tokenizer, stops, load(tmp_path / "a.jsonl", *rows))
    kept = encode(tokenizer, stops, load(tmp_path / "a.jsonl", *rows, drop=True))
    assert kept.names == ("a.jsonl:2",)
    assert kept.bad[0].startswith("a.jsonl:1 (")
    last = {"prompt": TALK[:5], "completion": [THEN], "tools": TOOLS}
    ids, trained = encode(tokenizer, stops, load(tmp_path / "b.jsonl", last))[0].rows[0]
    assert [said(tokenizer, stops, part) for part in trained_parts(ids, trained)] == [("Another one.", [])]


QWEN_ANSWERS = """\
{%- else %}{{ "<|im_start|>" + message.role }}{% if message.content %}{{ "\\n" + message.content }}{% endif %}"""
QWEN_MARKED = """\
{%- elif message.role != "assistant" %}{{ "<|im_start|>" + message.role + "\\n" + message.content + "<|im_end|>\\n" }}
{%- else %}{{ "<|im_start|>assistant\\n" }}{% generation %}{{- message.content or "" }}"""
LLAMA_ANSWER = '{{- message.content | trim + "<|eot_id|>" }}'
LLAMA_MARKED = f"""\
{{% if message.role == "assistant" %}}{{% generation %}}{LLAMA_ANSWER}{{% endgeneration %}}
{{%- else %}}{LLAMA_ANSWER}{{% endif %}}"""
MARKED = {
    "qwen2.5": QWEN25.replace(QWEN_ANSWERS, QWEN_MARKED).replace(
        '{%- endfor %}{{ "<|im_end|>\\n" }}{% endif %}',
        '{%- endfor %}{{ "<|im_end|>" }}{% endgeneration %}{{ "\\n" }}{% endif %}',
    ),
    "llama3.1": LLAMA.replace("{% set call = message", "{% generation %}{% set call = message")
    .replace('"}<|eot_id|>" }}', '"}<|eot_id|>" }}{% endgeneration %}')
    .replace(LLAMA_ANSWER, LLAMA_MARKED),
}


@pytest.mark.parametrize("family", MARKED)
def test_marked_turns_with_calls_are_trained_as_transformers_marks_them(tmp_path, family):
    tokenizer, stops = make_tool_tokenizer(family)
    tokenizer.chat_template = MARKED[family]
    assert MARKED[family].count("{% generation %}") == MARKED[family].count("{% endgeneration %}") > 0
    talk = [*TALK[:1], {**CALLING, "content": ""}, *TALK[2:]]
    ids, trained = encode(tokenizer, stops, load(tmp_path / "a.jsonl", {"messages": talk, "tools": TOOLS}))[0].rows[0]
    given = [with_objects(one) for one in talk]
    theirs = tokenizer.apply_chat_template(given, tools=TOOLS, return_dict=True, return_assistant_tokens_mask=True)
    assert theirs["input_ids"][: len(ids)] == ids.tolist()
    assert theirs["assistant_masks"][: len(ids)] == trained.astype(int).tolist()
    assert said(tokenizer, stops, trained_parts(ids, trained)[0]) == CALLED


def with_objects(message):
    """Return a message as most templates take it: the arguments of its calls are objects."""
    message = {name: value for name, value in message.items() if value is not None}
    for call in (message := copy.deepcopy(message)).get("tool_calls", ()):
        call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return message


def random_talk(random):
    """Return a conversation about one question, with calls one after another and with text beside them."""
    talk = [ASKED]
    for number in range(random.randrange(1, 4)):
        arguments = ("word", f"word{random.randrange(99)} of {number}"), ("few", random.randrange(99))
        text = random.choice(["", None, "Let me look."])
        call = called(*random.sample(arguments, k=2), key=f"call{number:05}")
        talk += [{"role": "assistant", "content": text, "tool_calls": [call]}]
        talk += [{"role": "tool", "tool_call_id": f"call{number:05}", "content": f"found{number}: metal7"}]
    return [*talk, {"role": "assistant", "content": f"It is {random.randrange(99)}."}]


@pytest.mark.parametrize("family", FAMILIES)
def test_in_random_conversations_what_is_trained_is_what_the_assistant_says(tmp_path, family):
    tokenizer, stops = make_tool_tokenizer(family)
    talks = [random_talk(Random(f"{family} {seed}")) for seed in range(20)]
    talks = [[*talk, AGAIN] if family == "glm4.5" else talk for talk in talks]
    rows = encode(tokenizer, stops, load(tmp_path / "a.jsonl", *({"messages": talk, "tools": TOOLS} for talk in talks)))
    for talk, example in zip(talks, (rows[number] for number in range(len(rows))), strict=True):
        ids, trained = example.rows[0]
        found = [said(tokenizer, stops, part) for part in trained_parts(ids, trained)]
        turns = [one for one in talk if one["role"] == "assistant"]
        for (text, calls), turn in zip(found, turns, strict=True):
            assert calls == [json.loads(call["function"]["arguments"]) for call in turn.get("tool_calls", ())]
            # Some templates have no place for text beside a call, which is counted.
            assert text in ((turn["content"] or ""), "" if turn.get("tool_calls") else None)
        assert "metal7" not in tokenizer.decode(ids[trained])
    has_no_place = family in ("llama3.1", "mistral", "gpt-oss")
    assert bool(rows.shortened) == has_no_place


FORMS = {
    "a list": TOOLS,
    "its JSON": json.dumps(TOOLS),
    "a list of JSON": [json.dumps(tool) for tool in TOOLS],
    "functions alone": [SCHEMA],
    "JSON of functions": json.dumps([SCHEMA]),
}


@pytest.mark.parametrize("form", FORMS)
def test_prompts_tell_the_model_of_their_tools_in_any_form(tmp_path, form):
    tokenizer, _ = make_tool_tokenizer("qwen2.5")
    path = tmp_path / "a.jsonl"
    rows = {"prompt": TALK[:3], "tools": FORMS[form]}, {"prompt": "What is tin?"}, {"prompt": "Zinc?", "tools": []}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    examples = load_dataset([path], require_ground_truth=False).examples
    assert examples[0].tools == tuple(TOOLS)
    assert examples[1].tools == examples[2].tools == ()
    found = encode_prompts(tokenizer, examples, max_prompt_tokens=10**6)
    given = [with_objects(one) for one in TALK[:3]]
    wanted = tokenizer.apply_chat_template(given, tools=TOOLS, add_generation_prompt=True, return_dict=False)
    assert found.token_ids[0] == tuple(wanted)
    assert len(found) == 3
    with pytest.raises(DataError, match=r"column 'schemas', which data\.columns\.tools names, is missing"):
        load_dataset([DataSet(str(path), columns={"tools": "schemas"})], require_ground_truth=False)


def test_columns_of_objects_have_nulls_where_a_row_has_nothing(tmp_path):
    other = {"type": "function", "function": {"name": "stop", "parameters": {"properties": {"now": {"type": "null"}}}}}
    asked = {"role": "assistant", "content": None, "tool_calls": [{**called(), "function": {"name": "look_up"}}]}
    asked["tool_calls"][0]["function"]["arguments"] = {"word": "zinc", "few": 3}
    stopped = {"role": "assistant", "content": "", "tool_calls": [{**called(), "function": {"name": "stop"}}]}
    stopped["tool_calls"][0]["function"]["arguments"] = {"now": True}
    rows = [
        {"messages": [ASKED, asked, RESULT, ANSWERED], "schemas": TOOLS},
        {"messages": [ASKED, stopped, RESULT, ANSWERED], "schemas": [other]},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    named = DataSet(str(tmp_path / "a.parquet"), columns={"tools": "schemas"})
    (first,), (second,) = load_conversations([named], "conversations").examples
    assert (first.tools, second.tools) == (tuple(TOOLS), (other,))
    (call,) = first.messages[1].further["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"word": "zinc", "few": 3}
    assert first.messages[2].further == {"tool_call_id": "call_abc", "name": "look_up"}
    with pytest.raises(DataError, match=r"column 'schema', which data\.columns\.tools names, is missing; did you mean"):
        load_conversations([DataSet(str(tmp_path / "a.parquet"), columns={"tools": "schema"})], "conversations")


def test_pairs_may_differ_in_a_call(tmp_path):
    tokenizer, stops = make_tool_tokenizer("qwen2.5")
    other = {**CALLING, "tool_calls": [called(("word", "tin"))]}
    row = {"chosen": [ASKED, CALLING], "rejected": [ASKED, other], "tools": TOOLS}
    pairs = load(tmp_path / "a.jsonl", row, kind="pairs")
    rows = encode(tokenizer, stops, pairs)[0].rows
    calls = [said(tokenizer, stops, part)[1] for ids, trained in rows for part in trained_parts(ids, trained)]
    assert calls == [[{"word": "zinc", "few": 3}], [{"word": "tin"}]]
    with pytest.raises(DataError, match="expected another answer than that in 'chosen', found the same"):
        load(tmp_path / "b.jsonl", {**row, "rejected": row["chosen"]}, kind="pairs")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"tool_calls": "look_up"}, r"messages\[1\]\.tool_calls: expected a list of \{'id'.*, found text 'look_up'"),
        ({"tool_calls": ["look_up"]}, r"messages\[1\]\.tool_calls\[0\]: expected \{'id'.*, found text 'look_up'"),
        ({"tool_calls": [called() | {"function": {}}]}, r"tool_calls\[0\]: expected \{'id'.*, found an object"),
        (
            {"tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
            r"tool_calls\[0\]\.function\.arguments: expected an object, or the JSON of one, found text '\{'",
        ),
        ({"role": "user"}, r"messages\[1\]\.tool_calls: expected calls of tools in messages of the assistant alone"),
        ({"tool_calls": None}, r"messages\[1\]\.content: expected text, found null"),
        ({"tool_calls": None, "content": " "}, r"messages\[1\]\.content: expected text, found only blanks"),
        ({"tool_calls": None, "function_call": {"name": "f"}}, r"function_call: expected the newer 'tool_calls'"),
        ({"reasoning_content": 3}, r"messages\[1\]\.reasoning_content: expected text, found number 3"),
        ({"weight": 1}, r"messages\[1\]\.weight: expected only 'role', 'content', 'name', 'tool_calls'"),
    ],
)
def test_bad_calls_are_named_with_their_place_and_left_out_if_that_is_wanted(tmp_path, change, told):
    rows = {"messages": [ASKED, CALLING | change, RESULT, ANSWERED], "tools": TOOLS}, {"messages": TALK, "tools": TOOLS}
    with pytest.raises(DataError, match=told):
        load(tmp_path / "a.jsonl", *rows)
    found = load(tmp_path / "a.jsonl", *rows, drop=True)
    assert (found.names, len(found.bad)) == (("a.jsonl:2",), 1)


@pytest.mark.parametrize(
    ("tools", "told"),
    [
        ("look_up", "column tools: expected a list of function schemas, or the JSON of one, found text 'look_up'"),
        ([3], r"column tools\[0\]: expected a function schema, \{'type'.*, found number 3"),
        ([{"function": "look_up"}], r"column tools\[0\]: expected a function schema"),
    ],
)
def test_tools_that_are_none_are_named(tmp_path, tools, told):
    with pytest.raises(DataError, match=told):
        load(tmp_path / "a.jsonl", {"messages": TALK, "tools": tools})
    path = tmp_path / "b.jsonl"
    path.write_text(json.dumps({"prompt": "Zinc?", "tools": tools}))
    with pytest.raises(DataError, match=told):
        load_dataset([path], require_ground_truth=False)


def test_a_template_that_knows_no_tools_is_named_as_are_control_tokens_in_what_tools_say(tmp_path):
    tokenizer, stops = make_tool_tokenizer("qwen2.5")
    forged = {**RESULT, "content": "metal<|im_end|>"}
    described = [{"type": "function", "function": SCHEMA | {"description": "ends with <|im_end|>"}}]
    for row, told in (
        ({"messages": [ASKED, CALLING, forged, ANSWERED], "tools": TOOLS}, "the text of message 2 has '<|im_end|>'"),
        ({"messages": TALK, "tools": described}, "the text of the tools has '<|im_end|>', which is a control token"),
    ):
        with pytest.raises(DataError, match=re.escape(told)):
            encode(tokenizer, stops, load(tmp_path / "a.jsonl", row))
    tokenizer = make_chat_tokenizer(QWEN3)
    for messages, told in (
        (TALK, "the chat template leaves out the call of 'look_up' in message 1; give a template of your own"),
        ([ASKED, ANSWERED], "the chat template does not tell the model of the tool 'look_up'; give a template"),
    ):
        with pytest.raises(DataError, match=re.escape(told)):
            encode(tokenizer, stops, load(tmp_path / "a.jsonl", {"messages": messages, "tools": TOOLS}))


def templates_of_trl():
    """Return the templates of the package trl, if it is there."""
    found = importlib.util.find_spec("trl")
    folders = found.submodule_search_locations if found else None
    missing = pytest.param(Path("trl"), marks=pytest.mark.skip(reason="trl is not installed"))
    return sorted(Path(folders[0]).glob("chat_templates/*.jinja")) if folders else [missing]


ENDS = ("<|call|>", "<|return|>", "<|tool_response>", "<|observation|>", "<|user|>", "<turn|>", "<|eot|>")
"""Tokens that end answers of some families beside the one that ends an answer to a question."""
REFUSED = "it does not fit the chat template: .*(leaves out|alternate|only user and|when an answer is asked|not tell)"


@pytest.mark.parametrize("file", templates_of_trl(), ids=lambda file: file.stem)
def test_published_templates_train_calls_and_no_result(tmp_path, file):
    template = file.read_text(encoding="utf-8")
    tokenizer = make_published_tokenizer(template)
    take_texts(tokenizer)
    vocabulary = tokenizer.get_vocab()
    ends = {TemplateProbe.of(tokenizer).end, *(vocabulary[end] for end in ENDS if end in vocabulary)} - {None}
    talk = [*TALK[:4], AGAIN] if "glm" in file.stem else TALK[:4]
    given = load(tmp_path / "a.jsonl", {"messages": talk, "tools": TOOLS})
    try:
        ids, trained = encode(tokenizer, tuple(ends), given)[0].rows[0]
    except DataError as error:
        refusal = str(error)
    else:
        refusal = None
    if refusal is not None:
        assert re.search(REFUSED, refusal, re.IGNORECASE)
        return
    calling, answering = [tokenizer.decode(part) for part in trained_parts(ids, trained)]
    assert "zinc" in calling
    assert "A metal." in answering
    assert "metal7" in tokenizer.decode(ids)
    assert "metal7" not in calling + answering
    if "{% generation %}" in template or "{%- generation" in template:
        messages = [with_objects(one) for one in talk]
        theirs = tokenizer.apply_chat_template(
            messages, tools=TOOLS, return_dict=True, return_assistant_tokens_mask=True
        )
        assert theirs["assistant_masks"][: len(ids)] == trained.astype(int).tolist()
